"""Builders for scheduling tests: fleets of instances that need no server."""

import itertools

import msgspec

from libra.config.rollout import SchedulingConfig
from libra.ids import Incarnation, InstanceId, PolicyVersion, PromptId, RequestId
from libra.scheduling.load import LoadSnapshot
from libra.scheduling.request import Reservation, Routed, RouteRequest
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slot import InstanceSpec

FIRST = Incarnation("first")
SECOND = Incarnation("second")
_ids = itertools.count()


def scheduling(**options: object) -> SchedulingConfig:
    """A configuration whose ranges are checked as for a user's file."""
    return msgspec.convert(options, SchedulingConfig)


def spec(
    name: str, *, incarnation: str = FIRST, tp: int = 1, version: int | None = 0
) -> InstanceSpec:
    return InstanceSpec(
        instance_id=InstanceId(name),
        incarnation=Incarnation(incarnation),
        tp=tp,
        policy_version=None if version is None else PolicyVersion(version),
        is_ready=True,
    )


def fleet_of(num_instances: int, *, now: float = 0.0, **options: object) -> Scheduler:
    """A scheduler with ready instances i0, i1, ... at version 0."""
    scheduler = Scheduler(scheduling(**options))
    for index in range(num_instances):
        scheduler.observe_instance(spec(f"i{index}"), now)
    return scheduler


def request(
    *,
    prompt: str | None = None,
    num_prompt_tokens: int = 100,
    max_new_tokens: int = 50,
    category: str = "default",
    min_version: int | None = None,
    deadline_at: float | None = None,
) -> RouteRequest:
    return RouteRequest(
        request_id=RequestId(f"r{next(_ids)}"),
        prompt_id=None if prompt is None else PromptId(prompt),
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        category=category,
        min_version=None if min_version is None else PolicyVersion(min_version),
        deadline_at=deadline_at,
    )


def avoiding(asked: RouteRequest, *names: str) -> RouteRequest:
    """The same request, which these instances did not answer before."""
    return msgspec.structs.replace(asked, avoided=frozenset(map(InstanceId, names)))


def place(scheduler: Scheduler, now: float = 0.0, **what: object) -> Reservation:
    """Route one request that must find a place at once."""
    decision = scheduler.route(request(**what), now)
    assert isinstance(decision, Routed), decision
    return decision.reservation


def snapshot(at: float, *, incarnation: str = FIRST, **signals: float | None) -> LoadSnapshot:
    return LoadSnapshot(incarnation=Incarnation(incarnation), sampled_at=at, **signals)
