"""
What the loop does to one layer of the target's cache, by kind of layer.

A layer is looked at as *columns*: `(R, heads, columns, width)` tensors whose column 0 is the first
of the batch, be it text or padding. Sliding layers hold the last columns only; `first` says which
one their tensors begin with. Layers that can be read and written like that can move the rows of a
batch singly; all others can at most drop columns at the end, for all rows at once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    BaseQuantizedLayer,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, Fp8QuantizedLayer, LinearAttentionLayer)
_STATIC = (StaticLayer, StaticSlidingWindowLayer)
# A recurrent or convolution state beside keys and values.
_WITH_ATTENTION = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
)
_CONVOLUTION_AND_STATIC = (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
)


@dataclass
class Columns:
    """
    Attributes:
        tensors (`list[torch.Tensor]`): `(R, heads, columns, width)` each, of equal column count.
        first (`int`): which column of the batch the tensors begin with.
    """

    tensors: list[torch.Tensor]
    first: int


def has_recurrent_state(layer: Any) -> bool:
    """Whether the layer sums the text up in a state, which no crop takes a token out of."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and any(
        layer.is_recurrent_states_initialized.values()
    )


def overwrites(layer: Any) -> bool:
    """Whether a forward destroys what a rollback needs, so that a copy is taken before."""
    return has_recurrent_state(layer) or (
        type(layer) is StaticSlidingWindowLayer and not layer.is_croppable
    )


def is_static(layer: Any) -> bool:
    """Whether the layer's tensors are of fixed size and address."""
    return isinstance(layer, StaticLayer)


def rows_held(layer: Any) -> int | None:
    """Rows of the batch that a layer holds keys of; `None` if it holds none."""
    keys = getattr(layer, "keys", None)
    if isinstance(layer, Fp8QuantizedLayer) and layer.is_initialized:
        keys = layer._quantized_keys[0]
    return keys.shape[0] if isinstance(keys, torch.Tensor) and keys.dim() == 4 else None


def moves_rows(layer: Any) -> bool:
    """Whether the rows of a batch can be moved singly. Asked after the prefill."""
    return type(layer) in (*_PLAIN, *_STATIC, DummyLayer) and not has_recurrent_state(layer)


def can_roll_back(layer: Any) -> bool:
    """Whether rejected drafts can be taken out again. Asked before the prefill and after it."""
    kind = type(layer)
    if isinstance(layer, QuantizedLayer) or kind in (*_PLAIN, *_STATIC, *_WITH_ATTENTION):
        return True
    if kind is LinearAttentionAndStaticSlidingWindowAttentionLayer:
        # What it says of itself is about the convolution state. Its keys and values can go back
        # as long as the window is never full; a recurrent state beside them is not known to exist.
        never_full = super(LinearAttentionCacheLayerMixin, layer).is_croppable
        return never_full and not has_recurrent_state(layer)
    # A subclass that only inherits `crop` may hold more than that takes back, so the class itself
    # has to say that it can.
    says_so = not {"crop", "is_croppable"}.isdisjoint(vars(kind))
    return says_so and bool(layer.is_croppable)


def room(layer: Any, length: int) -> int | None:
    """
    Most columns that one forward may add if some of them are to be taken out again; `None` is any
    number. Fewer than one means a forward over the anchor alone, which needs no rollback.
    """
    if isinstance(layer, QuantizedLayer):
        # What the forward adds has to stay in the residual: reaching its capacity quantises all.
        held = layer.keys.shape[-2] if layer.is_initialized and layer.keys.dim() == 4 else 0
        return layer.residual_length - held - 1
    if type(layer) is StaticSlidingWindowLayer and not layer.is_croppable:
        return layer.max_cache_len
    if is_static(layer):
        return layer.max_cache_len - length
    return None


def snapshot(layer: Any) -> Any:
    """A copy of what the next forward overwrites, for `crop`, `read` and `restore`."""
    if has_recurrent_state(layer):
        states = (layer.conv_states, layer.recurrent_states)
        return tuple(
            {i: None if s is None else s.clone() for i, s in kept.items()} for kept in states
        )
    return layer.keys.clone(), layer.values.clone()


def restore(layer: Any, saved: Any) -> None:
    """Put a recurrent state back to where it was when `saved` was taken."""
    for kept, old in zip((layer.conv_states, layer.recurrent_states), saved, strict=True):
        for i, state in old.items():
            if state is not None:
                kept[i].copy_(state)


def crop(layer: Any, count: int, added: int, length: int, saved: Any = None) -> None:
    """
    Drop the last `count` columns of all rows.

    Args:
        layer: the cache layer.
        count (`int`): columns to drop, at most `added`.
        added (`int`): columns that the last forward added.
        length (`int`): columns after that forward.
        saved (*optional*): `snapshot` from before it.
    """
    if has_recurrent_state(layer):
        # The state itself is put back by `restore`; some layers hold keys and values beside it.
        if isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -count)
        elif isinstance(layer, StaticLayer):
            StaticLayer.crop(layer, -count)
    elif isinstance(layer, QuantizedLayer):
        if count:
            layer.keys, layer.values = layer.keys[..., :-count, :], layer.values[..., :-count, :]
            layer.cumulative_length -= count
    elif type(layer) is Fp8QuantizedLayer or overwrites(layer):
        columns = read(layer, added, length, saved)
        end = length - count - columns.first
        columns.tensors = [tensor[..., :end, :] for tensor in columns.tensors]
        write(layer, columns.tensors, length - count)
    elif type(layer) in _CONVOLUTION_AND_STATIC:
        # The host's own takes back the convolution state alone.
        LinearAttentionCacheLayerMixin.crop(layer, -count)
        super(LinearAttentionCacheLayerMixin, layer).crop(-count)
    else:
        layer.crop(-count)


def held(layer: Any, length: int) -> int:
    """How many columns a layer holds that held `length` before a forward that may have failed."""
    if isinstance(layer, CacheLayerMixin):
        return int(layer.get_seq_length())
    if isinstance(layer, LinearAttentionLayer) and layer.record_past:
        recorded = [
            state.shape[-1] - layer.conv_kernel_size[i]
            for i, state in layer.conv_states.items()
            if state is not None
        ]
        return length + max(recorded, default=0)
    return length


def read(layer: Any, added: int, length: int, saved: Any = None) -> Columns:
    """
    The columns that a layer holds after a forward that added `added` of them.

    Args:
        layer: a cache layer that `moves_rows`, or that overwrites its window.
        added (`int`): columns that the last forward added.
        length (`int`): columns after that forward.
        saved (*optional*): `snapshot` from before it.
    """
    if isinstance(layer, DummyLayer):
        return Columns([], 0)
    if isinstance(layer, LinearAttentionLayer):
        states = [state for state in layer.conv_states.values() if state is not None]
        return Columns([s[:, None].transpose(-1, -2) for s in states], length - states[0].shape[-1])
    if isinstance(layer, BaseQuantizedLayer):
        parts = (layer._quantized_keys[0], layer._quantized_values[0])
        return Columns([part.view(torch.uint8) for part in parts], 0)
    if overwrites(layer) and saved is not None:
        return _read_overwritten(layer, added, length, saved)
    if is_static(layer):
        # A full window has dropped the first ones.
        held = min(length, layer.max_cache_len)
        return Columns([x[..., :held, :] for x in (layer.keys, layer.values)], length - held)
    return Columns([layer.keys, layer.values], length - layer.keys.shape[-2])


def _read_overwritten(
    layer: StaticSlidingWindowLayer, added: int, length: int, saved: tuple[torch.Tensor, ...]
) -> Columns:
    """The window before the forward and behind it what the forward added."""
    before = length - added
    held = min(before, layer.max_cache_len)
    start = before if length <= layer.max_cache_len else layer.max_cache_len - added
    tensors = [
        torch.cat((old[..., :held, :], new[..., start : start + added, :]), dim=-2)
        for old, new in zip(saved, (layer.keys, layer.values), strict=True)
    ]
    return Columns(tensors, before - held)


def width(layer: Any, length: int) -> int:
    """How many of `length` columns the layer keeps."""
    if isinstance(layer, LinearAttentionLayer):
        return next(size for size in layer.conv_kernel_size.values() if size is not None)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return min(length, layer.sliding_window - 1)
    return min(length, layer.max_cache_len) if is_static(layer) else length


def write(layer: Any, tensors: list[torch.Tensor], length: int) -> None:
    """
    Make a layer hold these columns, the last of which is column `length - 1`. What is more than the
    layer keeps is dropped in front.
    """
    if isinstance(layer, DummyLayer):
        return
    keep = width(layer, length)
    tensors = [tensor[..., max(0, tensor.shape[-2] - keep) :, :] for tensor in tensors]
    if isinstance(layer, LinearAttentionLayer):
        kept = [i for i, state in layer.conv_states.items() if state is not None]
        for i, tensor in zip(kept, tensors, strict=True):
            layer.conv_states[i] = tensor[:, 0].transpose(-1, -2)
    elif isinstance(layer, BaseQuantizedLayer):
        pair = [tensor.view(layer.fp8_dtype) for tensor in tensors]
        layer._quantized_keys = (pair[0], layer._quantized_keys[1])
        layer._quantized_values = (pair[1], layer._quantized_values[1])
        layer.cumulative_length = length
    elif is_static(layer):
        # In place: compiled forwards hold on to the addresses.
        for buffer, tensor in zip((layer.keys, layer.values), tensors, strict=True):
            buffer[..., : tensor.shape[-2], :] = tensor
        layer.cumulative_length.fill_(length)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
    else:
        layer.keys, layer.values = tensors
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
