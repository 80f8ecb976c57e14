"""What each child does during a change of the plan. Pure."""

from collections.abc import Iterator

from libra.ids import InstanceId
from libra.pools.ground import Stage
from libra.pools.hybrid import Hybrid, HybridState
from libra.pools.member import ANSWERING, MemberState
from libra.pools.reconfiguration import Reconfiguration
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.run_state import RunState

TRAINER = "trainer"
_STAGES = {
    Stage.WARMING: "warm",
    Stage.DRAINING: "drain",
    Stage.FALLING_ASLEEP: "sleep",
    Stage.STOPPING: "stop",
    Stage.COOLING: "stop",
}


def stages_now(state: RunState, change: Reconfiguration) -> dict[str, str]:
    """By child; those that the change waits for no more are left out."""
    return dict((*_instances(state, change), *_replicas(state, change), *_trainer(state, change)))


def _instances(state: RunState, change: Reconfiguration) -> Iterator[tuple[str, str]]:
    for server in change.ground.servers:
        if server.instance_id in change.untouched:
            continue
        if server.stage is Stage.STARTING:
            yield server.instance_id, _on_its_way(state, server.instance_id)
        elif server.stage in _STAGES:
            yield server.instance_id, _STAGES[server.stage]


def _on_its_way(state: RunState, instance_id: InstanceId) -> str:
    member = state.pool.get(instance_id)
    if member is not None and member.state is MemberState.WAKING:
        return "wake"
    return "load" if member is not None and member.state in ANSWERING else "start"


def _replicas(state: RunState, change: Reconfiguration) -> Iterator[tuple[str, str]]:
    if state.hybrids is None:
        return
    pool = state.hybrids.pool
    known = {it.replica_id: it for it in pool.hybrids}
    for placed in change.ground.hybrids:
        hybrid = known.get(placed.placement.replica_id)
        if placed.waits is Stage.WARMING:
            yield placed.placement.replica_id, "warm"
        elif hybrid is not None and not placed.is_member and placed.waits is None:
            yield hybrid.replica_id, _of_replica(hybrid, saving=pool.saving)


def _of_replica(hybrid: Hybrid, *, saving: int | None) -> str:
    if hybrid.state is HybridState.JOINING:
        if not hybrid.is_ready:
            return "start"
        is_saved = hybrid.snapshot is not None and hybrid.snapshot != saving
        return "load" if is_saved else "snapshot"
    return "catch_up" if hybrid.state is HybridState.CATCHING_UP else "leave"


def _trainer(state: RunState, change: Reconfiguration) -> Iterator[tuple[str, str]]:
    ground = change.ground
    if ground.reshaping is None:
        if ground.is_hold_wanted:
            yield TRAINER, "hold" if ground.is_held else "finish_step"
    elif state.cycle.phase is Phase.SAVING:
        yield TRAINER, "save"
    else:
        yield TRAINER, "start" if state.attempt > state.plans.stages.attempt_before else "stop"
