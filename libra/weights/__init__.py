"""Which weights are complete, which may be deleted, who has acknowledged what. Pure."""
