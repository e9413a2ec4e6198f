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

    Args:
        window (`int`, *optional*):
            Sliding layers see only the last `window` context rows before the anchor; `None` sees
            all.
    """

    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = False
        self.length = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Commit context rows: `keys` and `values` of shape `(R, kv_heads, T, head_dim)`."""
        self._write(keys, values)
        self.length += keys.shape[-2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the visible context followed by the block."""
        self._write(key_states, value_states)
        start = 0 if self.window is None else max(0, self.length - self.window)
        end = self.length + key_states.shape[-2]
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def get_seq_length(self) -> int:
        return self.length

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        end = self.length + keys.shape[-2]
        if not self.is_initialized or end > self.keys.shape[-2]:
            self._grow(keys, values, max(end + _MIN_SPARE_ROWS, 2 * self.length))
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values

    def _grow(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        old_keys, old_values = self.keys, self.values
        self.keys = keys.new_empty((*keys.shape[:2], capacity, keys.shape[-1]))
        self.values = values.new_empty((*values.shape[:2], capacity, values.shape[-1]))
        self.device = keys.device
        if self.is_initialized:
            self.keys[:, :, : self.length] = old_keys[:, :, : self.length]
            self.values[:, :, : self.length] = old_values[:, :, : self.length]
        self.is_initialized = True
