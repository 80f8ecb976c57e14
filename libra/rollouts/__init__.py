"""Trajectories, groups, staleness and batches: pure state machines and values."""
