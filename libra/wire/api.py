"""Bodies of the control API. `GET /v1/status` answers a StatusSnapshot, verbs a VerbReply."""

from typing import Annotated, Any, Literal

import msgspec

from libra.config.rollout import TpBucket

Verb = Literal["drain", "undrain", "restart", "reload", "replan", "stop", "explain"]
VERBS: tuple[Verb, ...] = ("drain", "undrain", "restart", "reload", "replan", "stop", "explain")


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class PlanOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan in the words of the configuration; what is None stays as it is."""

    train_gpus: Size | None = None
    """Of the core, without hybrid replicas; DP follows from it."""

    train_tp_size: Size | None = None
    train_pp_size: Size | None = None
    train_cp_size: Size | None = None
    train_ep_size: Size | None = None
    instances: tuple[TpBucket, ...] | None = None
    """All of them, by TP degree."""

    hybrids: Annotated[int, msgspec.Meta(ge=0, le=2**20)] | None = None
    """Hybrid replicas."""


class VerbRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/<verb>`; an empty body means every default."""

    target: str = ""
    """A child's name; required by drain, undrain and restart, unless a node is given."""

    node: Count | None = None
    """drain, undrain: every engine of this node."""

    now: bool = False
    """stop: do not finish the step that is being trained."""

    dry_run: bool = False
    """replan: say what would be done, and do nothing."""

    plan: PlanOrder | None = None
    """replan: go over to this plan, whatever it earns; None asks the planner."""

    prompt_id: str | None = None
    """explain: of the group or conversation that the request would belong to."""

    num_prompt_tokens: Count | None = None
    """explain: length of the prompt."""

    max_new_tokens: Count = 1024
    """explain: most tokens of the answer."""

    min_version: Count | None = None
    """explain: oldest policy version that may answer."""


class VerbReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ok: bool
    message: str
    details: dict[str, Any] | None = None
    """explain: the decision with every instance's values, as `Explanation` of the scheduler.
    replan: the line of reconfigurations.jsonl, and `plan_wanted`; of an order `transitions` too."""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a data-parallel server, as its metrics tell; None while unknown."""

    engine: str
    num_running: int | None
    num_queued: int | None
    kv_use_fraction: float | None


class ChildStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised child."""

    child: str
    role: Literal["rollout", "trainer"]
    state: str
    """A hybrid replica's is what it is to the core: joining, catching_up, member, leaving."""

    since_s: float
    """Seconds in this state; of a hybrid replica, its processes in theirs."""

    pid: int | None
    num_restarts: int
    policy_version: int | None
    num_in_flight: int
    num_queued: int | None
    """Requests waiting inside the engine; None while unknown."""

    kv_use_fraction: float | None
    signals_age_s: float | None
    """Age of the two before; None: never seen."""

    last_error: str
    engines: tuple[EngineStatus, ...] = ()
    """What the queue and the KV use are made of, when a server has several; else empty."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a run over several."""

    node: int
    host: str
    state: str
    """leads, joining, member, suspected or lost."""

    since_s: float | None
    """Seconds in this state; None for the leader, which is there as long as its run."""

    detail: str
    num_samples: int = 0
    """Trajectories that it has to make, those that are being made included."""


class StatusSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The run at one moment."""

    run_id: str
    run_directory: str
    pid: int
    phase: str
    step: int
    total_steps: int | None
    policy_version: int | None
    waiting_for: str
    reward_mean: float | None
    num_running: int
    num_buffered: int
    uptime_s: float
    eta_s: float | None
    plan: str
    last_decision: str
    """The newest look at the plan, as a sentence; empty before the first."""

    children: tuple[ChildStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    """Empty on one machine."""

    oldest_wait: str
    """The request that has waited longest, as a sentence; empty when none waits."""
