"""Logits processors along a drafted path: called only on texts that plain decoding could reach."""

from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# They look at the scores only, so it does not matter to them which text they are called on.
_BLIND = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def read_the_text(processors: LogitsProcessorList) -> bool:
    """Whether some processor depends on the tokens before, as constraints and penalties do."""
    return any(not isinstance(processor, _BLIND) for processor in processors)


class DraftPathProcessors(LogitsProcessorList):
    """
    The target's processors for one drafted block.

    A block is drafted to its trained width even if fewer tokens can be used, and also behind a
    drafted stop token. Constraints have no answer there, so they are not asked; those tokens are
    not submitted.

    Args:
        processors (`LogitsProcessorList`): the target's.
        committed (`int`): length of the committed text.
        limit (`int`): draft tokens that can be used.
        stop_ids (`frozenset[int]`): tokens behind which the text is over.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        committed: int,
        limit: int,
        stop_ids: frozenset[int],
    ):
        super().__init__(processors)
        self._committed = committed
        self._limit = limit
        self._stop_ids = stop_ids

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        drafted = input_ids[0, self._committed :]
        if len(drafted) >= self._limit:
            return scores
        if self._stop_ids and not self._stop_ids.isdisjoint(drafted.tolist()):
            return scores
        return super().__call__(input_ids, scores, **kwargs)
