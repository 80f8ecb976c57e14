"""Which part of a mini-batch contributed, and what its mean has to be multiplied by. Pure."""

from collections.abc import Container, Sequence

from libra.algorithms.objective import Aggregation
from libra.ids import ReplicaId
from libra.wire.hybrid import MemberShare
from libra.wire.rank import MiniBatch


class Shares:
    """The tokens and sequences of one mini-batch, by who has them."""

    def __init__(
        self,
        aggregation: Aggregation,
        mini_batch: MiniBatch,
        members: Sequence[MemberShare],
        index: int,
    ) -> None:
        self._counts_tokens = aggregation == "token-mean"
        self._whole = (mini_batch.global_num_tokens, mini_batch.global_num_sequences)
        self._members = members
        self._index = index

    def without(self, dropped: Container[ReplicaId]) -> tuple[int, float]:
        """Tokens that contributed, and the factor that makes the loss their mean.

        The weights of the loss divide by the tokens, or the sequences, of the whole mini-batch.
        """
        tokens, sequences = self._whole
        for share in self._members:
            if share.replica_id in dropped:
                tokens -= share.num_tokens[self._index]
                sequences -= share.num_sequences[self._index]
        which = 0 if self._counts_tokens else 1
        left = (tokens, sequences)[which]
        return tokens, self._whole[which] / left if left else 1.0
