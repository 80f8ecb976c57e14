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
        """Ranks in all: 1 and the workers', and those that given offsets leave to others."""
        return max((self.ranks_of(it).stop for it in self.num_workers_of), default=1)

    def ranks_of(self, instance_id: InstanceId) -> range:
        first = self.rank_offset_of[instance_id]
        return range(first, first + self.num_workers_of[instance_id])


def transfer_group(
    num_workers_of: Mapping[InstanceId, int],
    *,
    rank_offset_of: Mapping[InstanceId, int] | None = None,
) -> TransferGroup:
    """Give every instance its ranks, in the order of `num_workers_of` unless offsets are given.

    Raises InvariantError when a rank would be taken twice, the trainer's included.
    """
    if any(count < 1 for count in num_workers_of.values()):
        raise InvariantError("an instance without workers cannot receive weights")
    if rank_offset_of is None:
        firsts = accumulate(num_workers_of.values(), initial=1)
        rank_offset_of = dict(zip(num_workers_of, firsts, strict=False))
    if rank_offset_of.keys() != num_workers_of.keys():
        raise InvariantError("every instance needs a rank offset, and nobody else")
    group = TransferGroup(dict(num_workers_of), dict(rank_offset_of))
    taken = {0: "the trainer"}
    for instance_id in num_workers_of:
        for rank in group.ranks_of(instance_id):
            if rank in taken:
                raise InvariantError(f"rank {rank} is {taken[rank]}'s and {instance_id}'s")
            taken[rank] = instance_id
    return group
