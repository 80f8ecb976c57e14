"""From a dataset row to a trajectory, over a client port."""
