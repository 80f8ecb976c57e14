"""The steps that lead from one plan to another: what each one does to the ground, and says. Pure.

Some are done as soon as they are ordered (`Start`), the others end with an event.
"""

from typing import TypeAlias, assert_never

import msgspec

from libra.ids import InstanceId, ReplicaId
from libra.planner.plan import (
    HybridPlacement,
    InstancePlacement,
    TrainPlacement,
    slots_in_words,
)
from libra.pools.ground import WITHOUT_DEVICE, Ground, Stage


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Start processes up to the point where each needs its device."""

    placements: tuple[InstancePlacement, ...]
    replicas: tuple[HybridPlacement, ...] = ()


class AwaitWarm(msgspec.Struct, frozen=True, tag=True):
    """Until they wait for their devices."""

    instance_ids: tuple[InstanceId, ...]
    replica_ids: tuple[ReplicaId, ...] = ()


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start servers on their slots, those that are warm by letting them go on."""

    placements: tuple[InstancePlacement, ...]


class AwaitVersion(msgspec.Struct, frozen=True, tag=True):
    """Until they serve the committed version."""

    instance_ids: tuple[InstanceId, ...]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Send nothing new; until nothing is in flight there."""

    instance_ids: tuple[InstanceId, ...]
    gives_back: bool = False
    """Do not wait for answers: what is in flight goes back to the queue."""


class Undrain(msgspec.Struct, frozen=True, tag=True):
    """They stay after all."""

    instance_ids: tuple[InstanceId, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End them; until their devices are free."""

    instance_ids: tuple[InstanceId, ...]


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Have them give their devices back and stay; until they have, or have ended instead."""

    instance_ids: tuple[InstanceId, ...]


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Let sleeping servers have their devices again."""

    instance_ids: tuple[InstanceId, ...]


class HoldStep(msgspec.Struct, frozen=True, tag=True):
    """Until the trainer stands at a step boundary; it goes on with `ReleaseStep`."""


class ReshapeTraining(msgspec.Struct, frozen=True, tag=True):
    """Start the gang anew in another layout from a checkpoint of its step; until it is ready."""

    placement: TrainPlacement


class AttachHybrid(msgspec.Struct, frozen=True, tag=True):
    """Start replicas, those that are warm by letting them go on; until they are members."""

    placements: tuple[HybridPlacement, ...]


class DetachHybrid(msgspec.Struct, frozen=True, tag=True):
    """Until the replicas have left and their devices are free."""

    replica_ids: tuple[ReplicaId, ...]


class ReleaseStep(msgspec.Struct, frozen=True, tag=True):
    """Let the trainer go on."""


Transition: TypeAlias = (
    Warm
    | AwaitWarm
    | Start
    | AwaitVersion
    | Drain
    | Undrain
    | Stop
    | Sleep
    | Wake
    | HoldStep
    | ReshapeTraining
    | AttachHybrid
    | DetachHybrid
    | ReleaseStep
)

PHASE_OF: dict[type, str] = {
    Warm: "warm",
    AwaitWarm: "warm",
    Start: "start",
    AwaitVersion: "start",
    Drain: "drain",
    Undrain: "start",
    Stop: "stop",
    Sleep: "sleep",
    Wake: "start",
    HoldStep: "hold",
    ReshapeTraining: "reshape",
    AttachHybrid: "join",
    DetachHybrid: "leave",
    ReleaseStep: "hold",
}
"""Under which name the seconds of a transition are added up."""


def begun(ground: Ground, transition: Transition) -> Ground:  # noqa: C901, PLR0911, PLR0912 - a table
    """The ground once `transition` has been ordered."""
    match transition:
        case Warm(placements, replicas):
            for replica in replicas:
                ground = ground.with_hybrid(replica, is_member=False, waits=Stage.WARMING)
            return ground.joined_by(placements, Stage.WARMING)
        case Start(placements):
            return ground.joined_by(placements, Stage.STARTING)
        case AwaitWarm() | AwaitVersion():
            return ground
        case Drain(instance_ids):
            return ground.staged(instance_ids, Stage.DRAINING)
        case Undrain(instance_ids):
            # A version may have passed it by: it serves when it has proved the newest.
            return ground.staged(instance_ids, Stage.STARTING)
        case Stop(instance_ids):
            doomed = set(instance_ids)
            cold = doomed & set(ground.ids_in(*WITHOUT_DEVICE))
            return ground.staged(cold, Stage.COOLING).staged(doomed - cold, Stage.STOPPING)
        case Sleep(instance_ids):
            return ground.staged(instance_ids, Stage.FALLING_ASLEEP)
        case Wake(instance_ids):
            return ground.staged(instance_ids, Stage.STARTING)
        case HoldStep():
            return msgspec.structs.replace(ground, is_hold_wanted=True)
        case ReleaseStep():
            return msgspec.structs.replace(ground, is_hold_wanted=False, is_held=False)
        case ReshapeTraining(placement):
            return msgspec.structs.replace(ground, reshaping=placement)
        case AttachHybrid(placements):
            for replica in placements:
                ground = ground.with_hybrid(replica, is_member=False)
            return ground
        case DetachHybrid(replica_ids):
            for hybrid in ground.hybrids:
                if hybrid.placement.replica_id in replica_ids:
                    ground = ground.with_hybrid(
                        hybrid.placement, is_member=False, waits=hybrid.waits
                    )
            return ground
        case _:
            assert_never(transition)


def ended(ground: Ground, transition: Transition) -> Ground:  # noqa: C901, PLR0911, PLR0912 - a table
    """The ground once `transition` has ended well."""
    match transition:
        case Warm() | Start() | Wake() | Undrain() | ReleaseStep():
            return ground
        case AwaitWarm(instance_ids, replica_ids):
            for replica_id in replica_ids:
                ground = ground.with_warm_hybrid(replica_id)
            return ground.staged(instance_ids, Stage.WARM)
        case AwaitVersion(instance_ids):
            return ground.staged(instance_ids, Stage.SERVING)
        case Drain(instance_ids):
            return ground.staged(instance_ids, Stage.DRAINED)
        case Stop(instance_ids):
            return ground.without(instance_ids)
        case Sleep(instance_ids):
            return ground.staged(instance_ids, Stage.ASLEEP)
        case HoldStep():
            return msgspec.structs.replace(ground, is_held=True)
        case ReshapeTraining(placement):
            return msgspec.structs.replace(
                ground, train=placement, reshaping=None, is_core_gone=False
            )
        case AttachHybrid(placements):
            for replica in placements:
                ground = ground.with_hybrid(replica, is_member=True)
            return ground
        case DetachHybrid(replica_ids):
            for replica_id in replica_ids:
                ground = ground.without_hybrid(replica_id)
            return ground
        case _:
            assert_never(transition)


def is_over(ground: Ground, transition: Transition) -> bool:  # noqa: C901, PLR0911, PLR0912 - a table
    """Whether nothing is left to wait for."""
    match transition:
        case Warm() | Start() | Wake() | Undrain() | ReleaseStep():
            return True
        case AwaitWarm(instance_ids, replica_ids):
            warming = {*ground.ids_in(Stage.WARMING), *ground.replicas_in(Stage.WARMING)}
            return not {*instance_ids, *replica_ids} & warming
        case AwaitVersion(instance_ids):
            return not set(instance_ids) & set(ground.ids_in(Stage.STARTING))
        case Drain(instance_ids):
            return not set(instance_ids) & set(ground.ids_in(Stage.DRAINING))
        case Stop(instance_ids):
            return not set(instance_ids) & set(ground.ids_in(*Stage))
        case Sleep(instance_ids):
            return not set(instance_ids) & set(ground.ids_in(Stage.FALLING_ASLEEP))
        case HoldStep():
            return ground.is_held
        case ReshapeTraining():
            return ground.reshaping is None
        case AttachHybrid(placements):
            ids = {it.replica_id for it in placements}
            coming = {it.placement.replica_id for it in ground.hybrids if not it.is_member}
            return not ids & coming
        case DetachHybrid(replica_ids):
            present = {it.placement.replica_id for it in ground.hybrids}
            return not set(replica_ids) & present
        case _:
            assert_never(transition)


def in_words(transition: Transition) -> str:  # noqa: C901, PLR0911, PLR0912 - a table
    match transition:
        case Warm(placements, replicas):
            parts = (_placed(placements), *(it.replica_id for it in replicas))
            return f"warm up {', '.join(filter(None, parts))}"
        case AwaitWarm(instance_ids, replica_ids):
            return f"wait until {', '.join((*instance_ids, *replica_ids))} needs a device"
        case Start(placements):
            return f"start {_placed(placements)}"
        case AwaitVersion(instance_ids):
            return f"wait until {', '.join(instance_ids)} serves"
        case Drain(instance_ids, gives_back):
            how = "take back what is in flight at" if gives_back else "drain"
            return f"{how} {', '.join(instance_ids)}"
        case Undrain(instance_ids):
            return f"keep {', '.join(instance_ids)}"
        case Stop(instance_ids):
            return f"stop {', '.join(instance_ids)}"
        case Sleep(instance_ids):
            return f"put {', '.join(instance_ids)} to sleep"
        case Wake(instance_ids):
            return f"wake up {', '.join(instance_ids)}"
        case HoldStep():
            return "hold the trainer at a step boundary"
        case ReshapeTraining(placement):
            ranks = enumerate(placement.slots)
            where = slots_in_words((placement.node_of_rank(rank), slot) for rank, slot in ranks)
            return (
                f"start the trainer as TP {placement.tp}, PP {placement.pp}, CP {placement.cp}, "
                f"DP {placement.dp} on slots {where}"
            )
        case AttachHybrid(placements):
            return f"attach {', '.join(it.replica_id for it in placements)}"
        case DetachHybrid(replica_ids):
            return f"detach {', '.join(replica_ids)}"
        case ReleaseStep():
            return "let the trainer go on"
        case _:
            assert_never(transition)


def _placed(placements: tuple[InstancePlacement, ...]) -> str:
    return ", ".join(
        f"{it.instance_id} (TP {it.tp}, slots {'+'.join(map(str, it.slots))}"
        f"{f' of node {it.node}' if it.node else ''})"
        for it in placements
    )
