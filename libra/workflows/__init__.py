"""How a task becomes a trajectory: asynchronous functions over a client that answers with tokens.

A workflow is `async def run(task, client) -> Trajectory`; `libra.workflows.loading` finds one by
name. What it may call is `libra.workflows.client.RolloutClient`.
"""
