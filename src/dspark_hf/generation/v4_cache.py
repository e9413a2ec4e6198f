"""
A cache of the host's DeepSeek-V4 that can be rolled back exactly.

The host's own layers say that they can be cropped, but they trim the window at once and never take
rejected positions out of their compressors. The layers here record what a forward adds until `crop`
says how much of it stays. Their tensors are replaced and never written into, so that remembering
the state before a forward costs no copy.

R rows, T positions, m positions per compressed entry (the compression rate).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4HCACache,
)

# What a compressor keeps, each a dict with one entry per compressor.
_COMPRESSOR_STATES = (
    "buffer_kv",
    "buffer_gate",
    "compressed_kv",
    "entry_count",
    "overlap_kv",
    "overlap_gate",
)


def has_rewindable_cache(target: PreTrainedModel) -> bool:
    """
    Whether a target that the host calls stateful is one whose cache this module can roll back.
    """
    return target.config.get_text_config(decoder=True).model_type == "deepseek_v4"


@contextmanager
def rewindable(cache: Any) -> Iterator[None]:
    """
    Let the DeepSeek-V4 layers of a cache be rolled back while the context is open.

    Afterwards the cache holds its own layers again, with the state that was reached; other caches
    are left alone.
    """
    own = list(getattr(cache, "layers", []))
    make_rewindable(cache)
    try:
        yield
    finally:
        for i, layer in enumerate(own):
            if type(layer) in _REWINDABLE:
                cache.layers[i].hand_back(layer)
                cache.layers[i] = layer


def make_rewindable(cache: Any) -> None:
    """As `rewindable`, for good: for a cache of one's own."""
    for i, layer in enumerate(getattr(cache, "layers", [])):
        if type(layer) in _REWINDABLE:
            cache.layers[i] = _REWINDABLE[type(layer)](layer)


@dataclass
class _Journal:
    """
    The state before the first forward since the last crop, and what was added since.

    Attributes:
        length (`int`): positions before.
        states (`dict`): shallow copies of the compressors' states before.
        rows (`dict`): per compressor, the (keys and values, gates) `(R, T, …)` of every forward.
        windows (`dict`):
            per compressor, the (keys and values, gates) `(R, windows, m, …)` that were compressed.
    """

    length: int
    states: dict[str, dict[str, Any]]
    rows: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    windows: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)


class RewindableHCALayer(DeepseekV4HCACache):
    """
    A heavily compressed layer that can be rolled back, with the state of the host's layer it
    replaces.

    Between `activate_past_recording` and the end, everything since the last `crop` can be taken
    back: several rows together, by the same number of positions.
    """

    # Else the host would build its own caches from this class.
    _layer_type = None
    is_croppable = True

    def __init__(self, layer: DeepseekV4HCACache):
        self.keys: Any = None
        self._take_over(layer)
        self._journal: _Journal | None = None

    def _take_over(self, layer: DeepseekV4HCACache) -> None:
        self.__dict__.update(layer.__dict__)
        for name in _COMPRESSOR_STATES:
            if hasattr(layer, name):
                setattr(self, name, copy.copy(getattr(layer, name)))

    def hand_back(self, layer: DeepseekV4HCACache) -> None:
        """Give the state that was reached to the layer that this one replaced."""
        if self._journal is not None:
            self.crop(0)
        state = {name: value for name, value in self.__dict__.items() if name != "_journal"}
        layer.__dict__.update(state)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the host's, but keys are not trimmed to the window before `crop`."""
        if not self.record_past:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._begin()
        self.cumulative_length += key_states.shape[-2]
        self.keys = self.values = torch.cat((self.keys, key_states), dim=-2)
        visible = self.keys[:, :, -(self.sliding_window - 1 + key_states.shape[-2]) :]
        return visible, visible

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As the host's; the rows are remembered."""
        if self.record_past:
            self._begin().rows.setdefault(name, []).append((kv, gate))
        return super().store_compression_weights(name, kv, gate)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Take back the last positions, given as a negative number, and settle the others.

        Raises:
            `ValueError`: a positive number.
            `RuntimeError`: more positions than were recorded since the last crop.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of positions to remove as a negative number, got "
                f"{tokens_to_remove}."
            )
        journal, removed = self._journal, -tokens_to_remove
        recorded = 0 if journal is None else self.cumulative_length - journal.length
        if removed > recorded:
            raise RuntimeError(
                f"{removed} positions cannot be taken back: {recorded} were recorded since the "
                "last crop. Call activate_past_recording before the forward."
            )
        if not self.is_initialized:
            return
        kept = self.keys.shape[-2] - removed
        first = max(kept - self.sliding_window + 1, 0)
        self.keys = self.values = self.keys[:, :, first:kept]
        self.cumulative_length -= removed
        if journal is not None and removed:
            for name in self.entry_count:
                self._restore(name, journal, recorded - removed)
        self._journal = None

    def reset(self) -> None:
        """As the host's; there is nothing left to take back."""
        super().reset()
        self._journal = None

    def _begin(self) -> _Journal:
        if self._journal is None:
            states = {
                name: copy.copy(getattr(self, name))
                for name in _COMPRESSOR_STATES
                if hasattr(self, name)
            }
            self._journal = _Journal(self.cumulative_length, states)
        return self._journal

    def _restore(self, name: str, journal: _Journal, num_kept: int) -> None:
        """The state of one compressor after the first `num_kept` recorded positions."""
        before = {state: journal.states[state][name] for state in journal.states}
        rows = [tuple(before[state] for state in ("buffer_kv", "buffer_gate"))]
        rows += journal.rows.get(name, [])
        if num_kept == 0 or len(rows) == 1:
            for state, value in before.items():
                getattr(self, state)[name] = value
            return
        num_buffered = 0 if before["buffer_kv"] is None else before["buffer_kv"].shape[1]
        length = num_buffered + num_kept
        num_windows = length // self.compress_rate
        for state, part in (("buffer_kv", 0), ("buffer_gate", 1)):
            whole = torch.cat([row[part] for row in rows if row[part] is not None], dim=1)
            getattr(self, state)[name] = whole[:, num_windows * self.compress_rate : length]
        self.entry_count[name] = before["entry_count"] + num_windows
        compressed = self.compressed_kv[name]
        self.compressed_kv[name] = compressed[:, : self.entry_count[name]]
        self._restore_overlap(name, journal, num_windows)

    def _restore_overlap(self, name: str, journal: _Journal, num_windows: int) -> None:
        """Windows of this layer do not overlap."""


class RewindableCSALayer(RewindableHCALayer, DeepseekV4CSACache):
    """The same for a compressed sparse layer: two compressors, whose windows overlap."""

    _layer_type = None
    is_croppable = True

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As the host's; the first series of every window is remembered."""
        if self.record_past:
            series = (chunk_kv[..., :head_dim], chunk_gate[..., :head_dim])
            self._begin().windows.setdefault(name, []).append(series)
        return super().update_overlap_state(name, chunk_kv, chunk_gate, head_dim)

    def _restore_overlap(self, name: str, journal: _Journal, num_windows: int) -> None:
        for state, part in (("overlap_kv", 0), ("overlap_gate", 1)):
            value = journal.states[state][name]
            if num_windows:
                windows = torch.cat([window[part] for window in journal.windows[name]], dim=1)
                value = windows[:, num_windows - 1].clone()
            getattr(self, state)[name] = value


_REWINDABLE: dict[type, type[RewindableHCALayer]] = {
    DeepseekV4HCACache: RewindableHCALayer,
    DeepseekV4CSACache: RewindableCSALayer,
}
