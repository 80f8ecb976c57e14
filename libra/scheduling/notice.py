"""What the scheduler wants said once, as values: the supervisor logs them and acts on some."""

from typing import TypeAlias

import msgspec

from libra.ids import Incarnation, InstanceId


class KvCapacityMissing(msgspec.Struct, frozen=True, tag=True):
    """`load_metric: kv_tokens` leaves the instance out: its KV capacity is not known."""

    instance_id: InstanceId
    tp: int


class KvCapacityDiffers(msgspec.Struct, frozen=True, tag=True):
    """`kv_capacity_tokens_by_tp` wins, but the server measured over 10 % more or less."""

    instance_id: InstanceId
    tp: int
    configured_tokens: int
    measured_tokens: int


class FeedbackLost(msgspec.Struct, frozen=True, tag=True):
    """No fresh snapshot: the instance is routed by the local estimate alone."""

    instance_id: InstanceId


class FeedbackRestored(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId


class RestartSeen(msgspec.Struct, frozen=True, tag=True):
    """The metrics come from a process that nobody announced; its version has to be confirmed."""

    instance_id: InstanceId
    incarnation: Incarnation
    """The one that is gone."""


class BreakerOpened(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId


class BreakerClosed(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId


Notice: TypeAlias = (
    KvCapacityMissing
    | KvCapacityDiffers
    | FeedbackLost
    | FeedbackRestored
    | RestartSeen
    | BreakerOpened
    | BreakerClosed
)
