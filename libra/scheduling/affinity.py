"""Which prefix cache a prompt was last sent to.

Affinity reorders candidates, it never makes one: a sticky instance that a filter removed, or that
carries more than the margin above the best candidate, is left and the prompt remaps. Coming back
takes the same margin in the other direction, so that a prompt does not swing between two.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from libra.ids import PromptId

if TYPE_CHECKING:
    from libra.ids import PolicyVersion
    from libra.scheduling.slot import Slot

MARGIN_REQUESTS = 8
"""A sticky instance may exceed the best by this many requests of the same size: about one
group of siblings, whose shared prefill is worth that much imbalance."""


class AffinityCounts(msgspec.Struct):
    """What became of the lookups since the start."""

    num_new: int = 0
    num_kept: int = 0
    num_migrated: int = 0
    """Left a live instance: it was no candidate or above the margin."""

    num_broken: int = 0
    """Pointed at a prefix cache that no longer exists."""


class PrefixAffinity:
    """A bounded LRU map of prompt to prefix cache."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._key_of: OrderedDict[PromptId, int] = OrderedDict()
        self._slot_of_key: dict[int, Slot] = {}
        self.counts = AffinityCounts()

    def __len__(self) -> int:
        return len(self._key_of)

    def attach(self, slot: "Slot") -> None:
        """Serve the cache named by `slot.prefix_key` from `slot` now."""
        self._slot_of_key[slot.prefix_key] = slot

    def detach(self, prefix_key: int) -> None:
        """Forget a cache that is gone; entries that point at it are broken when next looked up."""
        self._slot_of_key.pop(prefix_key, None)

    def peek(self, prompt_id: PromptId) -> "Slot | None":
        """Where the prompt would be kept, without counting the lookup as a use."""
        key = self._key_of.get(prompt_id)
        return None if key is None else self._slot_of_key.get(key)

    def choose(
        self,
        prompt_id: PromptId,
        best: "Slot",
        *,
        num_tokens: int,
        min_version: "PolicyVersion | None",
    ) -> "Slot":
        """`best` or the sticky instance for a request of `num_tokens`; the choice is remembered."""
        keys = self._key_of
        key = keys.get(prompt_id)
        if key is None:
            self.counts.num_new += 1
            keys[prompt_id] = best.prefix_key
            if len(keys) > self._max_entries:
                keys.popitem(last=False)
            return best
        keys.move_to_end(prompt_id)
        sticky = self._slot_of_key.get(key)
        if sticky is best or (
            sticky is not None and is_kept(sticky, best, num_tokens, min_version)
        ):
            self.counts.num_kept += 1
            return sticky
        if sticky is None:
            self.counts.num_broken += 1
        else:
            self.counts.num_migrated += 1
        keys[prompt_id] = best.prefix_key
        return best


def is_kept(
    sticky: "Slot", best: "Slot", num_tokens: int, min_version: "PolicyVersion | None"
) -> bool:
    """Tell whether `sticky` is a candidate, and above `best` by no more than the margin."""
    if sticky.blocked_by is not None or sticky.is_least_preferred > best.is_least_preferred:
        return False
    if min_version is not None and sticky.policy_version < min_version:
        return False
    one_request = (num_tokens if sticky.is_by_tokens else 1) * sticky.load_scale
    return sticky.load() <= best.load() + MARGIN_REQUESTS * one_request
