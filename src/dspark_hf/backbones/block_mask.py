"""Which keys a block slot sees, for draft layers where that is not simply all of them."""

import torch


def block_mask(
    lengths: torch.Tensor, first: int, width: int, window: int | None, causal: bool, per_slot: bool
) -> torch.Tensor:
    """
    Visibility of the keys that one draft layer holds: context columns, then the block.

    Slot k of a row sits k positions behind the row's last context position. The block stands behind
    the longest row, so shorter ones have columns in between that are nobody's.

    Args:
        lengths (`torch.Tensor` of shape `(R,)`): context positions of each row.
        first (`int`): context column of the first key; K keys follow, the last W of them the block.
        width (`int`): W, block slots.
        window (`int`, *optional*): the layer's sliding window; `None` for full attention.
        causal (`bool`): whether a slot sees earlier slots of its block only.
        per_slot (`bool`):
            Measure the window from each slot: it sees what is closer than `window` to it. Otherwise
            it is measured from the anchor: every slot sees the last `window` context positions and
            its whole block.

    Returns:
        `torch.Tensor` of shape `(R, W, K)`: `True` where slot and key may meet.
    """
    longest = int(lengths.max())
    columns = torch.arange(first, longest + width, device="cpu")[None]
    is_block = columns >= longest
    # Position of a key relative to the anchor of its row: below zero in the context.
    key = torch.where(is_block, columns - longest, columns - lengths[:, None])[:, None]
    visible = is_block[:, None] | (key < 0)
    slot = torch.arange(width, device="cpu")[:, None]
    if causal:
        visible = visible & (key <= slot)
    if window is not None:
        near = (slot - key).abs() < window if per_slot else key >= -window
        visible = visible & near
    return visible.expand(-1, width, -1)


def additive(visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A visibility `(R, W, K)` as the host's eager and sdpa kernels take it: `(R, 1, W, K)`, 0 or
    the lowest number, in the dtype and on the device of `like`."""
    mask = torch.zeros(visible.shape, dtype=like.dtype, device="cpu")
    mask.masked_fill_(~visible, torch.finfo(like.dtype).min)
    return mask[:, None].to(like.device)
