"""Training waits until the recompute probe has been judged. Pure."""

from libra.planner.plan import TrainPlacement
from libra.wire.rank import RecomputeProbed


class ProbeGate:
    """Collects what the ranks of one attempt say; `is_open` when training may begin."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks` 0: no rank probes, the gate is always open."""
        self._num_ranks = num_ranks
        self._probes: list[RecomputeProbed] = []
        self.is_open = num_ranks == 0
        self.forced: TrainPlacement | None = None
        """What the loss of a node made of the core, which has not been judged yet."""

    def on_attempt(self, *, restored_step: int) -> None:
        """Ranks start anew; what is restored has been trained with this layout before."""
        self._probes.clear()
        if self.forced is None:
            self.is_open = self._num_ranks == 0 or restored_step > 0

    def on_other_layout(self) -> None:
        """Ranks start anew as others than those the probe was for: none is waited for."""
        self.forced, self._num_ranks = None, 0
        self._probes.clear()
        self.is_open = True

    def on_forced_layout(self, placement: TrainPlacement) -> None:
        """Ranks start anew as nobody planned it: they probe, whatever they restore."""
        self.forced, self._num_ranks = placement, placement.world_size
        self._probes.clear()
        self.is_open = False

    def on_probed(self, probed: RecomputeProbed) -> tuple[RecomputeProbed, ...] | None:
        """What is to be judged: all ranks' answers, or those up to the first that did not fit."""
        if self.is_open or any(earlier.error for earlier in self._probes):
            return None
        self._probes.append(probed)
        is_complete = bool(probed.error) or len(self._probes) == self._num_ranks
        return tuple(self._probes) if is_complete else None

    def on_kept(self) -> None:
        self.forced = None
        self.is_open = True
