"""Where a plan that comes into force is written down, and how the gang gets to its new place."""

from libra.planner.plan import Plan, TrainPlacement
from libra_supervisor.app.builder import Builder
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.launch import Launch, on_plan, write_plan
from libra_supervisor.app.recall import RunMemory
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.ranks.gang import Gang


class PlanFiles:
    """`libra_supervisor.loop.execute.Plans` over the run directory."""

    def __init__(self, launch: Launch, memory: RunMemory, forecaster: Forecaster) -> None:
        self._launch = launch
        self._memory = memory
        self._forecaster = forecaster

    def write(self, plan: Plan) -> None:
        write_plan(on_plan(self._launch, plan))
        self._forecaster.follow(plan)

    def remember(self, memory: PlanMemory) -> None:
        self._memory.remember_plan(memory)


class TrainerPlace:
    """`libra_supervisor.ports.Trainers` over the gang."""

    def __init__(self, builder: Builder, gang: Gang) -> None:
        self._builder = builder
        self._gang = gang

    def reshape(self, placement: TrainPlacement, *, probes: bool) -> None:
        self._builder.reshape(self._gang, placement, probes=probes)
