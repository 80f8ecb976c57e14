"""How the devices are split between training and rollout. Pure."""
