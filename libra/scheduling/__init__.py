"""Which server a rollout request goes to, and when. Pure."""
