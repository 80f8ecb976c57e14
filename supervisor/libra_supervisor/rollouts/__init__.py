"""The tasks that make trajectories: workflows over the engines, retries, scores, events."""
