"""The control plane: one asyncio process per node that plans, supervises, routes and reloads."""
