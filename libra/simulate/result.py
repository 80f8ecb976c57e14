"""What a simulated run did."""

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. Instants are seconds of virtual time since the start."""

    step: int
    started_at: float
    ended_at: float
    freed_at: float
    """When the weights were written and the trainer was free; `ended_at` without a publication."""

    waited_s: float
    """The trainer's wait for its batch."""

    num_response_tokens: int
    num_trajectories: int
    mean_staleness: float
    max_staleness: int


class TpUse(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one TP degree over the whole run."""

    tp: int
    num_instances: int
    busy_fraction: float
    """Time with at least one running request."""

    num_preemptions: int


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario. Rates leave out the first steps, while the pipeline fills."""

    name: str
    train: str
    rollout: str
    num_gpus: int
    seed: int
    steps: tuple[StepRecord, ...]
    num_warm_up_steps: int
    uses: tuple[TpUse, ...]
    num_stale_dropped: int
    num_refused: int

    @property
    def _measured(self) -> tuple[StepRecord, ...]:
        return self.steps[self.num_warm_up_steps :]

    @property
    def measured_s(self) -> float:
        return self.steps[-1].freed_at - self.steps[self.num_warm_up_steps - 1].freed_at

    @property
    def step_s(self) -> float:
        """Mean time from one step's end to the next."""
        return self.measured_s / len(self._measured)

    @property
    def tokens_per_gpu_s(self) -> float:
        """Trained response tokens per second and GPU."""
        tokens = sum(step.num_response_tokens for step in self._measured)
        return tokens / self.measured_s / self.num_gpus

    @property
    def train_busy_fraction(self) -> float:
        busy = sum(step.ended_at - step.started_at for step in self._measured)
        return busy / self.measured_s

    @property
    def mean_staleness(self) -> float:
        return sum(step.mean_staleness for step in self._measured) / len(self._measured)
