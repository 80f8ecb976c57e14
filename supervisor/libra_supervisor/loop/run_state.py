"""Every machine of one run, and what the cycle's orders mean for them. Pure."""

from typing import assert_never

import msgspec

from libra.pools.pool import RolloutPool
from libra_supervisor.loop import commands, cycle
from libra_supervisor.loop.collection import Collection, CollectionTerms
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Cycle, Phase
from libra_supervisor.loop.evaluator import Evaluator
from libra_supervisor.loop.hybrid_desk import HybridDesk
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.node_desk import NodeDesk
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.probe_gate import ProbeGate
from libra_supervisor.loop.publication import Publication
from libra_supervisor.loop.rollout_desk import RolloutDesk
from libra_supervisor.loop.step_book import StepBook


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What the control state needs of the configuration beyond its machines."""

    min_rollout_gpus: int
    publishes: bool
    """False: `rollout_weight_sync_mode: none`."""

    transfers: bool = False
    """Weights go through a process group: the trainer holds a version until it is committed."""

    num_probes: int = 0
    """Ranks that run a recompute probe before training; 0: none does."""

    collection: CollectionTerms = CollectionTerms()


class RunState:
    """The whole control state. Only the loop's families of events change it."""

    def __init__(  # noqa: PLR0913 - every machine
        self,
        *,
        cycle_machine: Cycle,
        pool: RolloutPool,
        desk: RolloutDesk,
        publication: Publication,
        evaluator: Evaluator,
        policy: Policy,
        plans: PlanDesk,
        hybrids: HybridDesk | None = None,
        nodes: NodeDesk | None = None,
    ) -> None:
        self.cycle = cycle_machine
        self.pool = pool
        self.desk = desk
        self.publication = publication
        self.evaluator = evaluator
        self.plans = plans
        self.hybrids = hybrids
        """None in a run that cannot have hybrid replicas."""

        self.nodes = nodes
        """None in a run that does not go on without a node."""

        self.book = StepBook()
        self.attempt = 0
        self.attempts_before = 0
        """Of earlier supervisors of the run: what is recorded counts through all of them."""

        self.ready_step: int | None = None
        """The step that the gang holds; None while it is not ready."""

        self.collection = Collection(policy.collection)
        self.probe = ProbeGate(policy.num_probes)
        self.stop_exit_code = 0
        self.is_ending = False
        self.policy = policy

    def follow(self, ordered: tuple[cycle.Command, ...], at: Moment) -> tuple[Command, ...]:
        """Turn what the cycle wants next into commands."""
        done: list[Command] = []
        self.book.on_phase(is_settling=self.cycle.phase is Phase.SETTLING, at=at)
        for command in ordered:
            match command:
                case cycle.Publish(version):
                    done += self.publication.begin(version, attempt=self.attempt)
                case cycle.Collect():
                    done += self.close_step(at)
                    self.book.on_collect(at)
                    self.collection.begin(now=at.now)
                    self.desk.open()
                case cycle.Save(step):
                    done += self.close_step(at)
                    done.append(commands.SaveRun(self.attempt, step, self.desk.state()))
                case cycle.Evaluate() | cycle.DropEvaluation():
                    done += self._evaluate(command, at)
                case cycle.Reshape():
                    done += self.close_step(at)
                    done.append(
                        commands.ReshapeGang(
                            self.plans.plan_to_reshape(), probes=self.probe.forced is not None
                        )
                    )
                case cycle.Finish(reason):
                    done += self.close_step(at)
                    done.append(commands.EndRun(self.stop_exit_code, reason))
                case _:
                    assert_never(command)
        return tuple(done)

    def _evaluate(
        self, command: cycle.Evaluate | cycle.DropEvaluation, at: Moment
    ) -> tuple[Command, ...]:
        if isinstance(command, cycle.Evaluate):
            return self.evaluator.begin(command.version, at)
        return self.evaluator.drop()

    def close_step(self, at: Moment) -> tuple[Command, ...]:
        return self.book.close(
            attempt=self.attempts_before + self.attempt,
            num_dropped=self.desk.dropped_by_reason,
            at=at,
        )
