"""The real planner and scheduler on a virtual clock."""
