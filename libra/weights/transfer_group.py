"""Ranks of the group through which weights go from the trainer to the engines. Pure.

Rank 0 is the trainer's rank 0. Every instance has as many ranks in a row as it has workers.
"""

from collections.abc import Mapping
from itertools import accumulate

import msgspec

from libra.errors import InvariantError
from libra.ids import InstanceId


class TransferGroup(msgspec.Struct, frozen=True):
    """Which ranks every instance's workers have."""

    num_workers_of: dict[InstanceId, int]
    rank_offset_of: dict[InstanceId, int]
    """Rank of the instance's first worker."""

    @property
    def world_size(self) -> int:
        return 1 + sum(self.num_workers_of.values())

    def ranks_of(self, instance_id: InstanceId) -> range:
        first = self.rank_offset_of[instance_id]
        return range(first, first + self.num_workers_of[instance_id])


def transfer_group(
    num_workers_of: Mapping[InstanceId, int],
    *,
    rank_offset_of: Mapping[InstanceId, int] | None = None,
) -> TransferGroup:
    """Give every instance its ranks, in the order of `num_workers_of` unless offsets are given.

    Raises InvariantError unless the trainer and all workers together have each rank once.
    """
    if rank_offset_of is None:
        firsts = accumulate(num_workers_of.values(), initial=1)
        rank_offset_of = dict(zip(num_workers_of, firsts, strict=False))
    if rank_offset_of.keys() != num_workers_of.keys():
        raise InvariantError("every instance needs a rank offset, and nobody else")
    if any(count < 1 for count in num_workers_of.values()):
        raise InvariantError("an instance without workers cannot receive weights")
    group = TransferGroup(dict(num_workers_of), dict(rank_offset_of))
    taken = [0, *(rank for it in num_workers_of for rank in group.ranks_of(it))]
    if sorted(taken) != list(range(group.world_size)):
        raise InvariantError(
            f"ranks {sorted(taken)} are not each of 0 to {group.world_size - 1} once: offsets "
            f"{dict(rank_offset_of)} for {dict(num_workers_of)} workers"
        )
    return group
