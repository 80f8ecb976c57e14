"""The two kinds of lines in reconfigurations.jsonl: what was decided, and how a change ended."""

from typing import Literal, TypeAlias

import msgspec

from libra.ids import InstanceId, ReplicaId
from libra.planner.plan import Plan
from libra.pools.reconfiguration import Cause

Outcome: TypeAlias = Literal["done", "rolled_back", "refused", "failed"]
"""`done`: the plan wanted is in force. `rolled_back`: the plan before is, and serves. `refused`:
nothing was touched. `failed`: the plan before is in force, but a part of it does not serve yet."""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="decision"):
    """One look at the plan, whether or not a change came of it."""

    decision_id: int
    """Counts up over the whole run; the line of the change that followed has the same."""

    wall_time_ns: int
    step: int
    """The newest trained step."""

    verdict: Literal["keep", "switch", "ordered"]
    """`ordered`: an operator named the plan, and nothing was weighed."""

    switch_kind: str = ""
    """What a switch changes (`rollout`, `to_training`, ...); empty when the plan is kept."""

    reason: str
    numbers: dict[str, float]
    """Everything that was weighed, each under a name with its unit."""

    plan: str
    """In force, in words."""

    candidate: str = ""
    """The best other plan, or the one that was ordered, in words; empty when there is none."""

    is_dry_run: bool = False
    """It was only asked for: a switch was not made."""


class ReconfigurationRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reconfiguration"
):
    """One change of the plan, from the first transition to the last."""

    decision_id: int
    """0 where no decision came before it: see `cause`."""

    cause: Cause = "decision"
    wall_time_ns: int
    step: int
    strategy: str
    outcome: Outcome
    reason: str
    """Why it was wanted, or why it came to nothing."""

    total_s: float
    stalled_s: float
    """Of them the trainer stood still at a step boundary because of the change."""

    phases: dict[str, float]
    """Seconds by kind of transition (`drain`, `stop`, `start`, ...), those side by side once."""

    stages: dict[str, dict[str, float]] = {}
    """Seconds by child and by what it did: `vllm-2: {start: 8.1, load: 0.2}`."""

    transitions: tuple[str, ...]
    """In words, in order, those of a roll-back included."""

    started: tuple[InstanceId, ...] = ()
    stopped: tuple[InstanceId, ...] = ()
    """Left the plan; those of them that are among `asleep` did not end."""

    asleep: tuple[InstanceId, ...] = ()
    """Wait for their devices after it, whenever they left."""

    attached: tuple[ReplicaId, ...] = ()
    detached: tuple[ReplicaId, ...] = ()
    plan: Plan
    """In force after it."""


Line: TypeAlias = DecisionRecord | ReconfigurationRecord
