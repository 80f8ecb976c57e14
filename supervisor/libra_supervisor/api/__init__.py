"""The control API over the Unix socket and TCP."""
