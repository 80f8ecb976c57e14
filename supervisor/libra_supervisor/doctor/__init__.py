"""Does this machine have what a run needs? Each finding says what to do."""
