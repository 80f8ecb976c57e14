"""A leader's end of the link on a real port, for followers that run their whole program."""

import os
import secrets
from contextlib import asynccontextmanager
from random import Random

import anyio

from libra import clock
from libra.version import __version__
from libra_supervisor.app.shared_config import config_digest
from libra_supervisor.nodes.leader import LeaderEnd, NodeSaid
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter, NodeJoined
from libra_supervisor.nodes.transport import node_listener

RUN_ID = f"followed-{os.getpid()}"
"""A follower ends all that runs on the machine under its run's name: no other test has it."""


class Leading:
    """What a leader of `told`'s run hears of node 1."""

    def __init__(self, told, run_id, term):
        cluster = told.config.cluster
        charter = Charter(
            run_id=run_id,
            run_directory=str(told.directory.root),
            term=term,
            leader=f"L{term}",
            version=__version__,
            config_digest=config_digest(told.config),
            num_nodes=2,
            lease=LeaseTerms(
                lease_s=cluster.node_lease_s, orphan_grace_s=cluster.node_orphan_grace_s
            ),
        )
        self.news = []
        self.end = LeaderEnd(charter, post=self.post, rng=Random(secrets.randbits(32)))

    async def post(self, event):
        self.news.append(event)

    @property
    def said(self):
        return [event.event for event in self.news if isinstance(event, NodeSaid)]

    async def until(self, condition, *, within_s=20):
        with anyio.fail_after(within_s):
            while not condition(self):
                await clock.sleep(0.02)

    async def until_joined(self):
        await self.until(lambda it: any(isinstance(event, NodeJoined) for event in it.news))


@asynccontextmanager
async def leading(told, *, run_id=RUN_ID, term=1):
    """Lead where `told` dials."""
    it = Leading(told, run_id, term)
    site = told.site
    async with (
        node_listener(it.end.serve, host=site.hosts[0], port=site.port, token=told.token),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(it.end.run)
        yield it
        tasks.cancel_scope.cancel()
