"""What is asked of the scheduler and what it answers."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import msgspec

from libra.ids import Incarnation, InstanceId, PolicyVersion, PromptId, RequestId

CHARS_PER_TOKEN = 4
"""Only for requests that come without an exact prompt length."""

Filter: TypeAlias = Literal[
    "not_ready",
    "draining",
    "stale_version",
    "kv_capacity_unknown",
    "breaker_open",
    "breaker_trial",
    "saturated",
    "occupancy",
    "queue_cap",
]
"""Why an instance is no candidate, in the order in which the filters are applied."""

FILTERS: tuple[Filter, ...] = get_args(Filter)

WaitReason: TypeAlias = Filter | Literal["no_instances"]
RefusalReason: TypeAlias = Literal["queue_full", "deadline", "draining"]
FailureKind: TypeAlias = Literal["client_error", "saturated", "fault"]
"""`client_error`: the request was bad (4xx). `saturated`: the server said 429 or 503 and lives.
`fault`: the server broke (5xx, reset, timeout)."""


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to be placed."""

    request_id: RequestId
    max_new_tokens: int
    num_prompt_tokens: int | None = None
    """Exact length; None falls back to `num_prompt_chars`."""

    num_prompt_chars: int = 0
    prompt_id: PromptId | None = None
    """Siblings and later turns carry the same one: it names a prefix."""

    category: str = "default"
    """Requests of one category are expected to have outputs of similar length."""

    min_version: PolicyVersion | None = None
    """Oldest policy version that may answer; None takes the fleet's floor."""

    avoided: frozenset[InstanceId] = frozenset()
    """Taken only when there is no other candidate: they did not answer this in time. A request that
    avoids any goes wherever there is room, not where its prompt is."""

    deadline_at: float | None = None
    """No place is given from this moment on; None means now + queue_deadline_s."""

    def prompt_tokens(self) -> int:
        """Return the exact prompt length, else an estimate from its characters."""
        if self.num_prompt_tokens is not None:
            return self.num_prompt_tokens
        return -(-self.num_prompt_chars // CHARS_PER_TOKEN)


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """A place on one incarnation of one instance; give it back exactly once."""

    serial: int
    """Unique within one scheduler."""

    instance_id: InstanceId
    incarnation: Incarnation
    policy_version: PolicyVersion
    """The instance's version when the request was placed."""

    num_tokens: int
    """Prompt plus expected output."""

    category: str
    reserved_at: float


class Routed(msgspec.Struct, frozen=True, gc=False):
    """Send the request to `instance`, then complete, fail or cancel the reservation."""

    instance: InstanceId
    reservation: Reservation


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The request was turned away; nothing is reserved."""

    reason: RefusalReason
    waiting_for: WaitReason | None
    """What it would have waited, or has waited, for."""


class Ticket(msgspec.Struct, eq=False):
    """A place in the waiting queue. The scheduler sets `outcome` once, then calls `wake`."""

    serial: int
    request: RouteRequest
    enqueued_at: float
    deadline_at: float
    outcome: Routed | Refused | None = None
    wake: Callable[[], object] | None = None


class Wait(msgspec.Struct, frozen=True):
    """No candidate now; `ticket` is in the queue until it is routed, refused or abandoned."""

    reason: WaitReason
    ticket: Ticket


Decision: TypeAlias = Routed | Wait | Refused
