"""How long answers are expected to be: a moving average per category of request."""

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.scheduling.request import RouteRequest

EMA_WEIGHT = 0.1
MAX_CATEGORIES = 1024
"""Categories come from callers; the least recently learned is forgotten beyond this."""


class ExpectedOutput:
    """Learns output lengths in tokens; outlives instances and weight versions."""

    def __init__(self) -> None:
        self._mean_of: OrderedDict[str, float] = OrderedDict()
        self._mean_request_tokens = 0.0

    @property
    def mean_request_tokens(self) -> float:
        """Moving average of `request_tokens` over all requests; 0 before the first."""
        return self._mean_request_tokens

    def means(self) -> dict[str, float]:
        """Return the expected output tokens by category."""
        return dict(self._mean_of)

    def request_tokens(self, request: "RouteRequest") -> int:
        """Prompt plus expected output of `request`.

        An unknown category is expected to use all of max_new_tokens: too much for everyone alike,
        which keeps the comparison between instances right.
        """
        prompt = request.num_prompt_tokens
        if prompt is None:
            prompt = request.prompt_tokens()
        limit = request.max_new_tokens
        mean = self._mean_of.get(request.category)
        return prompt + (limit if mean is None or mean > limit else int(mean))

    def on_reserved(self, num_tokens: int) -> None:
        mean = self._mean_request_tokens
        self._mean_request_tokens = mean + EMA_WEIGHT * (num_tokens - mean) if mean else num_tokens

    def on_completed(self, category: str, num_output_tokens: int) -> None:
        """Learn from one whole answer; failures and cancellations say nothing about length."""
        mean = self._mean_of.get(category)
        if mean is None:
            self._forget_oldest()
            self._mean_of[category] = float(num_output_tokens)
        else:
            self._mean_of[category] = mean + EMA_WEIGHT * (num_output_tokens - mean)
            self._mean_of.move_to_end(category)

    def _forget_oldest(self) -> None:
        while len(self._mean_of) >= MAX_CATEGORIES:
            self._mean_of.popitem(last=False)
