"""
Stopping criteria inside a block: every committed token is judged as plain decoding would judge it.
"""

from collections.abc import Callable

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from .rows import Rows


class TokenwiseStopping:
    """
    Applies stopping criteria token by token to runs of committed tokens.

    Length and stop tokens are decided on the host from the tokens themselves; every other
    criterion, the user's included, is called once per length with exactly the ids and scores it
    would see without speculation. In a batch, rows reach a length at different times: a criterion
    is then called with all rows, and only the answer for those that just got there is used.

    Args:
        criteria (`StoppingCriteriaList`): as the host prepared them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self._max_length = min(
            (c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None
        )
        self.stop_ids: set[int] = set()
        self._others = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.stop_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self._others.append(criterion)

    def count(
        self, rows: Rows, runs: list[list[int]], scores: Callable[[int], tuple | None]
    ) -> tuple[list[int], list[bool]]:
        """
        How many tokens of the runs to keep.

        Args:
            rows ([`Rows`]): the texts, with the runs already put behind the active ones.
            runs (`list[list[int]]`): the run of each active row.
            scores (callable): scores of the first so many new tokens, as the host passes them.

        Returns:
            For each active row the number of tokens to keep, at least 1, and whether it is over.
        """
        starts = [rows.length(row) for row in rows.active]
        kept, over = [], []
        for start, run in zip(starts, runs, strict=True):
            is_last = [
                token in self.stop_ids
                or (self._max_length is not None and start + i + 1 >= self._max_length)
                for i, token in enumerate(run)
            ]
            over.append(any(is_last))
            kept.append(is_last.index(True) + 1 if over[-1] else len(run))
        if self._others:
            self._ask(rows, starts, kept, over, scores)
        return kept, over

    def _ask(
        self,
        rows: Rows,
        starts: list[int],
        kept: list[int],
        over: list[bool],
        scores: Callable[[int], tuple | None],
    ) -> None:
        for length in range(min(starts) + 1, max(map(sum, zip(starts, kept, strict=True))) + 1):
            asked = [i for i, start in enumerate(starts) if start < length <= start + kept[i]]
            if not asked:
                continue
            ids = rows.text(length)
            answers = torch.zeros(ids.shape[0], dtype=torch.bool, device="cpu")
            for criterion in self._others:
                answer = torch.as_tensor(criterion(ids, scores(length - rows.prompt_length)))
                answers |= answer.cpu().bool()
            for i in asked:
                if answers[rows.active[i]]:
                    kept[i], over[i] = length - starts[i], True
