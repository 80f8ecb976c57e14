"""Processes that failed in a batch of reloads and are not replaced for it at once. Pure.

One that told of its failure lives, and is tried once more with the next committed version. One
that lost its transfer by another's fault only has to receive again, a few times.
"""

from collections import Counter

from libra.ids import Incarnation, InstanceId
from libra.pools.pool import RolloutPool
from libra_supervisor.loop.open_batch import OpenBatch


class SecondChances:
    def __init__(self, *, max_aborts: int) -> None:
        """`max_aborts` transfers lost in a row: then it is the process that cannot."""
        self._max_aborts = max_aborts
        self._num_aborts_of = Counter[Incarnation]()
        self._to_rescue: dict[InstanceId, Incarnation] = {}

    def may_receive_again(
        self, open_batch: OpenBatch | None, instance_id: InstanceId, incarnation: Incarnation | None
    ) -> bool:
        """Whether it has lost a transfer and nothing else; each call with one counts it."""
        if open_batch is None or incarnation is None or not open_batch.was_aborted(instance_id):
            return False
        self._num_aborts_of[incarnation] += 1
        return self._num_aborts_of[incarnation] < self._max_aborts

    def keep(
        self, open_batch: OpenBatch | None, instance_id: InstanceId, incarnation: Incarnation
    ) -> bool:
        """Keep it for the next committed version, if it may be; False: it is to be replaced."""
        if open_batch is None or open_batch.is_catch_up or not open_batch.has_failed(instance_id):
            return False
        self._to_rescue[instance_id] = incarnation
        return True

    def take(self, pool: RolloutPool) -> list[InstanceId]:
        """Those that were kept and still are the same process; none is kept any more."""
        waiting, self._to_rescue = self._to_rescue, {}
        return [it for it, process in waiting.items() if pool[it].incarnation == process]

    def on_proved(self, incarnation: Incarnation) -> None:
        self._num_aborts_of.pop(incarnation, None)

    def forget(self, instance_id: InstanceId) -> None:
        """It is no member of the pool any more."""
        self._to_rescue.pop(instance_id, None)
