"""Advantages and the numbers of the objective. Pure."""
