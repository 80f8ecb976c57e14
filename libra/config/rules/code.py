"""Names that stand for code: `workflow` and `reward`."""

import re
from collections.abc import Iterator

import msgspec

from libra.config.data import CODE_TIMEOUT_S
from libra.config.problems import Problem, did_you_mean
from libra.config.run import RunConfig

_CODE_NAME = re.compile(r"^[A-Za-z_]\w*(?:(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)?$", re.ASCII)


SPARE_S = 2.0
"""What a reward needs besides its tests' time."""


class ShippedNames(msgspec.Struct, frozen=True, kw_only=True):
    """What comes with Libra. The registries live above the configuration, so they are handed in."""

    workflows: tuple[str, ...]
    rewards: tuple[str, ...]


def code_names(config: RunConfig) -> Iterator[Problem]:
    """Check the form of names that stand for code."""
    for key, name in _names(config):
        if not _CODE_NAME.match(name):
            what = f"{name!r} is neither a built-in's name nor module:function"
            yield Problem(path=key, what=what)


def check_names(config: RunConfig, shipped: ShippedNames) -> tuple[Problem, ...]:
    """Find names without a module that are none of `shipped`."""
    known = {"workflow": shipped.workflows, "reward": shipped.rewards}
    return tuple(
        Problem(
            path=key,
            what=f"there is no built-in {key} {name!r}",
            hint=did_you_mean(name, known[key], limit=1)
            or f"use one of {', '.join(sorted(known[key]))}, or module:function",
        )
        for key, name in _names(config)
        if ":" not in name and _CODE_NAME.match(name) and name not in known[key]
    )


def code_reward_ends_first(config: RunConfig) -> Iterator[Problem]:
    """A slow program is a wrong answer; a reward that is killed would be no answer at all."""
    data = config.data
    timeout_s = data.reward_args.get("timeout_s", CODE_TIMEOUT_S)
    if data.reward != "code" or not isinstance(timeout_s, int | float):
        return
    if timeout_s + SPARE_S > data.reward_timeout_s:
        yield Problem(
            path="reward_timeout_s",
            what=f"{data.reward_timeout_s:g} s end the reward before its tests of {timeout_s:g} s",
            hint=f"at least {timeout_s + SPARE_S:g}, or less in reward_args.timeout_s",
        )


def _names(config: RunConfig) -> tuple[tuple[str, str], ...]:
    return ("workflow", config.data.workflow), ("reward", config.data.reward)


RULES = (code_names, code_reward_ends_first)
