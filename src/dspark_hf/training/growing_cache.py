"""A key/value cache for long batched generation on one machine."""

from typing import Any

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

# Positions of room that a full buffer grows by.
_GROWTH = 256


class GrowingLayer(DynamicLayer):
    """
    The host's dynamic layer with room to grow.

    The host copies all keys and values for every token; with many rows on a CPU that costs more
    than the model. Here a buffer holds them, and rows that have finished can be dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(R, heads, T, head_dim)` and return everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, end = (key_states, value_states), self._length + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            grown = [x.new_empty((*x.shape[:2], end + _GROWTH, x.shape[-1])) for x in new]
            for buffer, old in zip(grown, self._buffers, strict=False):
                buffer[:, :, : self._length] = old[:, :, : self._length]
            self._buffers = grown
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, self._length : end] = states
        self._length = end
        self._expose()
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`."""
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._expose()

    def _expose(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)


def growing_cache(config: PretrainedConfig) -> Cache | None:
    """
    A [`GrowingLayer`] for every layer of a target whose layers all attend to everything; `None` for
    others, which need the caches that the host makes for them.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "sliding_window", None):
        return None
    return Cache(layers=[GrowingLayer() for _ in range(text.num_hidden_layers)])
