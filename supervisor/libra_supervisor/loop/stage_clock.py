"""How long each child was in each stage of a change. Pure."""

from collections.abc import Mapping


class StageClock:
    """Adds up seconds by child and stage, from looks at what they do."""

    def __init__(self, *, attempt: int = 0) -> None:
        self.attempt_before = attempt
        """Of the gang, when the change began."""

        self.seconds: dict[str, dict[str, float]] = {}
        self._stages: dict[str, str] = {}
        self._looked_at = 0.0

    def look(self, stages: Mapping[str, str], *, now: float) -> None:
        """What children did so far they did until now; from now on they do what `stages` says."""
        for child, stage in self._stages.items():
            spent = self.seconds.setdefault(child, {})
            spent[stage] = spent.get(stage, 0.0) + now - self._looked_at
        self._stages, self._looked_at = dict(stages), now
