"""Rules that span several options: small pure functions from a RunConfig to problems.

Each one looks at values only, so that a configuration written out in full and read again is judged
the same. `check_rules` runs all of them; `check_warnings` finds what is allowed but odd.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from libra.config.problems import Problem
from libra.config.rules import (
    batch,
    code,
    exclusive,
    nodes,
    parallelism,
    planning,
    rollout,
    scheduling,
)
from libra.config.run import RunConfig

Rule: TypeAlias = Callable[[RunConfig], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    *batch.RULES,
    *parallelism.RULES,
    *rollout.RULES,
    *code.RULES,
    *scheduling.RULES,
    *planning.RULES,
    *nodes.RULES,
    *exclusive.RULES,
)
WARNINGS: tuple[Rule, ...] = (
    *batch.WARNINGS,
    *rollout.WARNINGS,
    *scheduling.WARNINGS,
    *planning.WARNINGS,
    *nodes.WARNINGS,
    *exclusive.WARNINGS,
)


def check_rules(config: RunConfig) -> tuple[Problem, ...]:
    """Every rule that `config` breaks."""
    return tuple(problem for rule in RULES for problem in rule(config))


def check_warnings(config: RunConfig) -> tuple[Problem, ...]:
    """Find what works but is probably not meant."""
    return tuple(problem for rule in WARNINGS for problem in rule(config))
