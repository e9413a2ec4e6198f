"""Logits processors along a drafted path: called only on texts that plain decoding could reach."""

from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .rows import Rows

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


class PathProcessors:
    """
    Scores along drafted paths, each position judged on the text that plain decoding has there.

    A processor that reads the text is called with all rows of the batch cut or padded to the length
    of the row in question, so that it finds every row in its place; answers for other rows are not
    used. In a batch whose rows are at the same length that is one call a position, as in plain
    decoding; otherwise one for each length.

    Args:
        processors (`LogitsProcessorList`): the target's.
        rows ([`Rows`]): the texts.
    """

    def __init__(self, processors: LogitsProcessorList, rows: Rows):
        self._processors = processors
        self._rows = rows
        self.read_the_text = any(not isinstance(processor, _BLIND) for processor in processors)

    def __bool__(self) -> bool:
        return bool(self._processors)

    def scores(
        self, ids: torch.Tensor, logits: torch.Tensor, offset: int, asked: list[bool]
    ) -> torch.Tensor:
        """
        Processed scores of one position of every active row.

        Args:
            ids (`torch.Tensor` of shape `(R, length)`): all rows, drafts behind the active ones.
            logits (`torch.Tensor` of shape `(active rows, V)`): not changed.
            offset (`int`): how many drafts lie before the position.
            asked (`list[bool]`): rows whose score matters; the others keep their logits.
        """
        if not self.read_the_text:
            return self._processors(ids[self._rows.active, :1], logits.clone())
        scores = logits.clone()
        by_length: dict[int, list[int]] = {}
        for i, row in enumerate(self._rows.active):
            if asked[i]:
                by_length.setdefault(self._rows.length(row) + offset, []).append(i)
        for length, entries in by_length.items():
            scores[entries] = self._at_length(ids[:, :length], scores[entries], entries)
        return scores

    def _at_length(
        self, ids: torch.Tensor, scores: torch.Tensor, entries: list[int]
    ) -> torch.Tensor:
        rows = [self._rows.active[i] for i in entries]
        for processor in self._processors:
            if isinstance(processor, _BLIND):
                scores = processor(ids[rows], scores)
            elif isinstance(processor, PrefixConstrainedLogitsProcessor):
                scores = torch.cat(
                    [
                        _of_row(processor, row)(ids[row : row + 1], scores[i : i + 1])
                        for i, row in enumerate(rows)
                    ]
                )
            elif len(rows) == ids.shape[0]:
                scores = processor(ids, scores)
            else:
                full = scores.new_zeros(ids.shape[0], scores.shape[1])
                full[rows] = scores
                scores = processor(ids, full)[rows]
        return scores


def _of_row(
    processor: PrefixConstrainedLogitsProcessor, row: int
) -> PrefixConstrainedLogitsProcessor:
    # Has an answer for texts that can be reached only, so it is not asked about padded rows.
    allowed = processor._prefix_allowed_tokens_fn
    batch = row // processor._num_beams
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(batch, ids), 1)


class DraftPathProcessors(LogitsProcessorList):
    """
    The target's processors for one drafted block, as the drafter calls them.

    A block is drafted to its trained width even if fewer tokens can be used, and also behind a
    drafted stop token. Constraints have no answer there, so they are not asked; those tokens are
    not submitted.

    Args:
        processors ([`PathProcessors`]): the target's.
        rows ([`Rows`]): the texts.
        committed (`int`): length of the texts that the drafter was given.
        limits (`list[int]`): draft tokens that can be used, of each active row.
        stop_ids (`frozenset[int]`): tokens behind which the text is over.
    """

    def __init__(
        self,
        processors: PathProcessors,
        rows: Rows,
        committed: int,
        limits: list[int],
        stop_ids: frozenset[int],
    ):
        super().__init__([processors])
        self._rows = rows
        self._committed = committed
        self._limits = limits
        self._stop_ids = stop_ids

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        drafted = input_ids[:, self._committed :]
        offset = drafted.shape[1]
        texts = drafted.tolist() if self._stop_ids else [[] for _ in self._limits]
        asked = [
            offset < limit and self._stop_ids.isdisjoint(text)
            for limit, text in zip(self._limits, texts, strict=True)
        ]
        if not any(asked):
            return scores
        counts = [offset if reached else 0 for reached in asked]
        ids = self._rows.followed_by(drafted, counts).to(scores.device)
        return self[0].scores(ids, scores, offset, asked)
