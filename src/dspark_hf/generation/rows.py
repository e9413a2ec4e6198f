"""The texts of a batch as plain decoding would hold them: prompt, new tokens, padding behind."""

import torch
from transformers import GenerationConfig

_SPARE_COLUMNS = 64


class Rows:
    """
    R texts that grow at their own pace. Column j of a row is what plain decoding has there, so the
    first j columns are what it would show to processors and criteria at that step: rows that are
    further than that are cut, rows that are not there yet or have finished are padded.

    Args:
        input_ids (`torch.Tensor` of shape `(R, P)`): the prompts.
        pad_token_id (`int`): what stands behind the end of a text.

    Attributes:
        counts (`list[int]`): new tokens of each row.
        active (`list[int]`): rows that have not finished.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int):
        self.prompt_length = input_ids.shape[1]
        self.counts = [0] * input_ids.shape[0]
        self.active = list(range(len(self.counts)))
        self.pad_token_id = pad_token_id
        self._ids = input_ids

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def length(self, row: int) -> int:
        """Prompt and new tokens of a row."""
        return self.prompt_length + self.counts[row]

    def text(self, length: int) -> torch.Tensor:
        """The first `length` columns of all rows: `(R, length)`."""
        self._reserve(length)
        return self._ids[:, :length]

    def anchored(self, rows: list[int]) -> torch.Tensor:
        """
        Texts of `rows`, each ending in the last column with its last token: `(rows, longest)`.
        """
        lengths = [self.length(row) for row in rows]
        longest = max(lengths)
        if len(set(lengths)) == 1:
            ids = self._ids[:, :longest]
            return ids if len(rows) == len(self.counts) else ids[rows]
        shifts = torch.tensor([longest - length for length in lengths], device=self.device)
        source = torch.arange(longest, device=self.device)[None] - shifts[:, None]
        ids = self._ids[rows].gather(1, source.clamp(min=0))
        return ids.masked_fill(source < 0, self.pad_token_id)

    def followed_by(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """
        All rows, with the first `counts` of `tokens` `(active rows, n)` behind the active ones.
        """
        self._reserve(max(self.counts) + self.prompt_length + tokens.shape[1])
        ids = self._ids.clone()
        self._put(ids, tokens, counts)
        return ids

    def put(self, tokens: torch.Tensor, counts: list[int]) -> None:
        """
        Write the first `counts` of `tokens` `(active rows, n)` behind the active rows, for `keep`
        to make them part of the texts.
        """
        self._reserve(max(self.counts) + self.prompt_length + tokens.shape[1])
        self._put(self._ids, tokens, counts)

    def keep(self, kept: list[int], over: list[bool]) -> None:
        """Commit the first `kept` of what was put behind each active row; drop those that are
        over."""
        for row, count in zip(self.active, kept, strict=True):
            self.counts[row] += count
            self._ids[row, self.length(row) :] = self.pad_token_id
        self.active = [row for row, ends in zip(self.active, over, strict=True) if not ends]

    def sequences(self) -> torch.Tensor:
        """What `generate` returns: `(R, P + most new tokens)`."""
        return self._ids[:, : self.prompt_length + max(self.counts)].clone()

    def _put(self, ids: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> None:
        tokens = tokens.to(ids.device)
        for i, (row, count) in enumerate(zip(self.active, counts, strict=True)):
            length = self.length(row)
            ids[row, length : length + count] = tokens[i, :count]

    def _reserve(self, columns: int) -> None:
        missing = columns - self._ids.shape[1]
        if missing > 0:
            more = self._ids.new_full(
                (self._ids.shape[0], missing + _SPARE_COLUMNS), self.pad_token_id
            )
            self._ids = torch.cat((self._ids, more), dim=1)


def pad_token_id(config: GenerationConfig) -> int:
    """What stands behind the end of a text; without a stop token nothing does."""
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)
