"""Starting, watching and ending child processes; the only package that sends signals."""
