"""A weight sync: every instance reloads, by the configured method, strategy and pause mode.

`inplace` with `keep` freezes requests and goes on with them; with `abort` they lose their cache and
go on as new requests with what they have; with `wait` they end before the load. `restart` replaces
the process: requests begin anew. `parallel` loads all at once, `serial` one at a time per node.
"""

from collections.abc import Callable
from itertools import groupby

import msgspec

from libra.config.weights import WeightsConfig
from libra.ids import PolicyVersion
from libra.planner.publish_cost import PublishModel
from libra.simulate.fleet import Fleet, Instance
from libra.simulate.timeline import Timeline


class ReloadTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one weight sync. `load_s` is by TP degree."""

    export_s: float
    load_s: dict[int, float]


def reload_times(model: PublishModel, degrees: set[int]) -> ReloadTimes:
    """Export once; then every worker reads its own shard of the checkpoint."""
    return ReloadTimes(export_s=model.export_s, load_s={tp: model.load_s(tp) for tp in degrees})


class Reload:
    """One batch over the whole fleet; `on_committed` is called once, after the last instance."""

    def __init__(
        self,
        timeline: Timeline,
        fleet: Fleet,
        *,
        weights: WeightsConfig,
        times: ReloadTimes,
        version: PolicyVersion,
        on_committed: Callable[[], None],
    ) -> None:
        self._timeline, self._fleet = timeline, fleet
        self._weights, self._times = weights, times
        self._version, self._on_committed = version, on_committed
        self._num_left = len(fleet.instances)

    def start(self) -> None:
        if not self._fleet.instances:
            # All are being exchanged; those that come start with this version.
            self._commit()
            return
        if self._weights.rollout_weight_reload_strategy == "parallel":
            queues = [[instance] for instance in self._fleet.instances]
        else:
            by_node = sorted(self._fleet.instances, key=lambda instance: instance.node)
            queues = [list(group) for _, group in groupby(by_node, key=lambda i: i.node)]
        for queue in queues:
            self._next(queue)

    def _next(self, queue: list[Instance]) -> None:
        instance, rest = queue[0], queue[1:]
        drains = self._is_inplace and self._weights.rollout_weight_pause_mode == "wait"
        self._fleet.begin_reload(instance, drains=drains, done=lambda: self._load(instance, rest))

    def _load(self, instance: Instance, rest: list[Instance]) -> None:
        evicts = not self._is_inplace or self._weights.rollout_weight_pause_mode == "abort"
        self._fleet.load(instance, evicts=evicts, keeps_tokens=self._is_inplace)
        loaded_at = self._timeline.now + self._times.load_s[instance.tp]
        self._timeline.at(loaded_at, lambda: self._on_loaded(instance, rest))

    def _on_loaded(self, instance: Instance, rest: list[Instance]) -> None:
        self._fleet.finish_reload(instance, self._version)
        self._num_left -= 1
        if rest:
            self._next(rest)
        if self._num_left == 0:
            self._commit()

    def _commit(self) -> None:
        self._fleet.commit(self._version)
        self._on_committed()

    @property
    def _is_inplace(self) -> bool:
        return self._weights.rollout_weight_reload_method == "inplace"
