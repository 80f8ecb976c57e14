"""A latch with two thresholds: it sets above one and resets below a lower one."""


class Latch:
    """Sets above `enter`, resets below `exit_below`; in between it keeps its state."""

    __slots__ = ("_enter", "_exit_below", "is_set")

    def __init__(self, *, enter: float, exit_below: float) -> None:
        self._enter = enter
        self._exit_below = exit_below
        self.is_set = False

    def on_value(self, value: float) -> None:
        if value > self._enter:
            self.is_set = True
        elif value < self._exit_below:
            self.is_set = False
