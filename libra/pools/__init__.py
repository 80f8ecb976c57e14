"""Which members a pool has and the legal moves between their states. Pure."""
