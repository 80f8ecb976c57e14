"""Training waits until the recompute probe has been judged. Pure."""

from libra.wire.rank import RecomputeProbed


class ProbeGate:
    """Collects what the ranks of one attempt say; `is_open` when training may begin."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks` 0: no rank probes, the gate is always open."""
        self._num_ranks = num_ranks
        self._probes: list[RecomputeProbed] = []
        self.is_open = num_ranks == 0

    def on_attempt(self, *, restored_step: int) -> None:
        """Ranks start anew; what is restored has been trained with this layout before."""
        self._probes.clear()
        self.is_open = self._num_ranks == 0 or restored_step > 0

    def on_other_layout(self) -> None:
        """Ranks start anew as others than those the probe was for: none is waited for."""
        self._num_ranks = 0
        self._probes.clear()
        self.is_open = True

    def on_probed(self, probed: RecomputeProbed) -> tuple[RecomputeProbed, ...] | None:
        """What is to be judged: all ranks' answers, or those up to the first that did not fit."""
        if self.is_open or any(earlier.error for earlier in self._probes):
            return None
        self._probes.append(probed)
        is_complete = bool(probed.error) or len(self._probes) == self._num_ranks
        return tuple(self._probes) if is_complete else None

    def on_kept(self) -> None:
        self.is_open = True
