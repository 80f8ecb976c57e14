"""What is wrong with a configuration, as values, and the error that carries all of them."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import msgspec

from libra.errors import ConfigError


class Place(msgspec.Struct, frozen=True):
    """Where a value was written."""

    source: str
    """A file as the user named it, `-o KEY=VALUE`, or `environment NAME`."""

    line: int | None = None
    """From 1; None where the source is one line."""

    directory: str = ""
    """What relative paths written there are relative to."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. As an error it stops the program, as a warning it is shown."""

    path: str
    """Dotted path of the option; empty for the file as a whole."""

    what: str
    """What is wrong, with the values involved."""

    hint: str = ""
    """What to do: nearest valid values, or the name that was probably meant."""

    place: Place | None = None
    """None for a value nobody wrote: the default."""

    related: tuple[str, ...] = ()
    """Dotted paths of the other options a cross-field rule looked at."""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        name = f"{self.path}: " if self.path else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{name}{self.what}{hint}"


class ConfigProblemsError(ConfigError):
    """The configuration cannot be used; `problems` holds every reason, in file order."""

    def __init__(self, problems: Sequence[Problem], *, subject: str) -> None:
        self.problems = tuple(problems)
        self.subject = subject
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{subject}: {count} in the configuration\n{lines}")


def one_of(values: Iterable[int]) -> str:
    """`4 or 8`: the sizes to choose from in a hint."""
    return " or ".join(str(value) for value in values)


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """`did you mean a, b?` for the closest names, or an empty string."""
    close = get_close_matches(name, list(known), n=limit, cutoff=0.6)
    return f"did you mean {', '.join(close)}?" if close else ""
