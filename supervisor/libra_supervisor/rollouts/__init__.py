"""Tasks that turn admitted prompts into scored trajectories."""
