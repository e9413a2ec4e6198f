"""The drafter's key/value cache: committed context stays, block rows are scratch."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

# Room for a block behind the context, and the growth of short contexts, without copying every
# round.
_MIN_SPARE_ROWS = 256


class ContextLayer(DynamicLayer):
    """
    Cache layer of one draft layer.

    `append` commits context rows. `update`, which the host's attention calls with the block's keys
    and values, writes them behind the context and returns both, without committing them: the next
    block overwrites them, so nothing has to be cropped after a round. Rows live in a buffer that
    grows by doubling.

    The rows of a batch start in the first column and may be of different lengths; the block stands
    behind the longest, and `visible` says what a shorter one has to overlook.

    Args:
        window (`int`, *optional*):
            Sliding layers see only the last `window` context rows before the anchor; `None` sees
            all.

    Attributes:
        lengths (`torch.Tensor` of shape `(R,)`, on the CPU, *optional*): context rows of each row.
        length (`int`): the longest.
    """

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = False
        self.lengths: torch.Tensor | None = None
        self.length = 0
        self._shortest = 0

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """
        Commit context rows.

        Args:
            keys, values (`torch.Tensor` of shape `(R, kv_heads, T, head_dim)`): what to add.
            mask (`torch.Tensor` of shape `(R, T)`, on the CPU, *optional*):
                which of the T entries belong to a row; all by default.
        """
        rows, added = keys.shape[0], keys.shape[-2]
        lengths = self.lengths
        if lengths is None:
            lengths = torch.zeros(rows, dtype=torch.long, device="cpu")
        if mask is None and self._shortest == self.length:
            self._write(keys, values)
            self._set_lengths(lengths + added)
            return
        if mask is None:
            mask = torch.ones(rows, added, dtype=torch.bool, device="cpu")
        self._reserve(keys, values, self.length + added)
        row, entry = mask.nonzero(as_tuple=True)
        column = (lengths[:, None] + mask.cumsum(dim=1) - 1)[row, entry]
        row, entry, column = (index.to(keys.device) for index in (row, entry, column))
        self.keys[row, :, column] = keys[row, :, entry]
        self.values[row, :, column] = values[row, :, entry]
        self._set_lengths(lengths + mask.sum(dim=1))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the visible context followed by the block."""
        self._write(key_states, value_states)
        start, end = self.first, self.length + key_states.shape[-2]
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def visible(self, width: int) -> torch.Tensor | None:
        """
        Which of the keys that `update` returns for a block of `width` each row may see: `(R, keys)`
        on the CPU, or `None` if all rows may see all of them.
        """
        if self.lengths is None or self._shortest == self.length:
            return None
        column = torch.arange(self.first, self.length + width, device="cpu")[None]
        visible = column < self.lengths[:, None]
        if self.window is not None:
            visible &= column >= self.lengths[:, None] - self.window
        return visible | (column >= self.length)

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch."""
        if self.lengths is None:
            return
        self.keys, self.values = self.keys[rows], self.values[rows]
        self._set_lengths(self.lengths[rows])

    def get_seq_length(self) -> int:
        return self.length

    @property
    def first(self) -> int:
        """Context column of the first key that a block sees."""
        return 0 if self.window is None else max(0, self._shortest - self.window)

    def _set_lengths(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths
        self.length, self._shortest = int(lengths.max()), int(lengths.min())

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.length + keys.shape[-2]
        self._reserve(keys, values, end)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        if self.is_initialized and end <= self.keys.shape[-2]:
            return
        capacity = max(end + _MIN_SPARE_ROWS, 2 * self.length)
        old_keys, old_values = self.keys, self.values
        # Zeros, because a mask turns what a short row leaves unwritten into 0 times it.
        self.keys = keys.new_zeros((*keys.shape[:2], capacity, keys.shape[-1]))
        self.values = values.new_zeros((*values.shape[:2], capacity, values.shape[-1]))
        self.device = keys.device
        if self.is_initialized:
            self.keys[:, :, : self.length] = old_keys[:, :, : self.length]
            self.values[:, :, : self.length] = old_values[:, :, : self.length]
        self.is_initialized = True
