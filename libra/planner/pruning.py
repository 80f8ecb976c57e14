"""Branches that the search left, each with what it lacked."""

from collections.abc import Iterator

import msgspec

from libra.planner.train_layout import TrainLayout


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """One branch and the reason it was left. `branch` names what all its layouts share."""

    branch: str
    reason: str
    num_layouts: int = 1
    """Layouts of this branch that were met; those below a branch that was cut early count as 1."""

    def __str__(self) -> str:
        return f"{self.branch}: {self.reason}"


class PruneLog:
    """Collects reasons.

    Layouts of one branch that lack the same thing become one entry, with the reason of the layout
    that came closest.
    """

    def __init__(self) -> None:
        self._branches: list[Pruned] = []
        self._leaves: dict[tuple[str, str], list[tuple[float, TrainLayout, str]]] = {}

    def cut(self, branch: str, reason: str) -> None:
        """Leave a whole branch before its layouts were enumerated."""
        self._branches.append(Pruned(branch=branch, reason=reason))

    def leave(
        self, layout: TrainLayout, *, branch: str, kind: str, lack: float, reason: str
    ) -> None:
        """Leave one layout of `branch`. `lack` says how much was missing, in units of `kind`."""
        self._leaves.setdefault((branch, kind), []).append((lack, layout, reason))

    def entries(self) -> Iterator[Pruned]:
        yield from self._branches
        for (branch, _), leaves in self._leaves.items():
            _, closest, reason = min(leaves)
            others = f" (closest of {len(leaves)} layouts)" if len(leaves) > 1 else ""
            yield Pruned(
                branch=f"{branch} DP{closest.dp} micro-batch {closest.micro_batch_size}{others}",
                reason=reason,
                num_layouts=len(leaves),
            )
