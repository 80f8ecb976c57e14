"""How training ranks are arranged, and which of them share links."""

import msgspec


class TrainLayout(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Sizes of the parallel groups.

    Ranks are ordered TP, CP, DP, PP, fastest first; EP is cut out of CP x DP.
    """

    tp: int
    ep: int
    pp: int
    cp: int
    dp: int
    micro_batch_size: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def model_parallel_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def cp_span(self) -> int:
        """Consecutive GPUs within which a context-parallel group lies."""
        return self.tp * self.cp

    @property
    def ep_span(self) -> int:
        return self.tp * max(self.cp, self.ep)

    @property
    def dp_span(self) -> int:
        return self.tp * self.cp * self.dp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"]
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"PP{self.pp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        return " ".join([*parts, f"DP{self.dp}", f"micro-batch {self.micro_batch_size}"])
