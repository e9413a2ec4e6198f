"""
Stopping criteria inside a block: every committed token is judged as plain decoding would judge it.
"""

from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class TokenwiseStopping:
    """
    Applies stopping criteria token by token to a run of committed tokens.

    Length and stop tokens are decided on the host from the tokens themselves; every other
    criterion, the user's included, is called once per committed token with exactly the ids and
    scores it would see without speculation.

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
        self, input_ids: torch.Tensor, run: torch.Tensor, tokens: list[int], scores: tuple | None
    ) -> tuple[int, bool]:
        """
        How many tokens of a run to keep.

        Args:
            input_ids (`torch.Tensor` of shape `(1, length)`): committed tokens before the run.
            run (`torch.Tensor` of shape `(1, n)`): the run, on the device.
            tokens (`list[int]`): the run, on the host.
            scores (`tuple`, *optional*): scores of all generated tokens up to the end of the run.

        Returns:
            Number of tokens to keep, at least 1, and whether generation is over.
        """
        length = input_ids.shape[1]
        ids: Any = torch.cat((input_ids, run), dim=1) if self._others else None
        before = 0 if scores is None else len(scores) - len(tokens)
        for i, token in enumerate(tokens):
            is_done = token in self.stop_ids or (
                self._max_length is not None and length + i + 1 >= self._max_length
            )
            for criterion in self._others:
                seen = None if scores is None else scores[: before + i + 1]
                is_done |= bool(torch.as_tensor(criterion(ids[:, : length + i + 1], seen)).all())
            if is_done:
                return i + 1, True
        return len(tokens), False
