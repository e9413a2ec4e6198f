"""Which keys a block slot sees, for draft layers where that is not simply all of them."""

import torch


def block_mask(
    num_context: int, width: int, window: int | None, causal: bool, per_slot: bool
) -> torch.Tensor:
    """
    Visibility of the keys that one draft layer holds: context rows, then the block.

    The context rows are the last `num_context` positions before the anchor; slot k sits k positions
    behind the anchor.

    Args:
        num_context (`int`): C, context rows held by the layer; its cache keeps `window` of them.
        width (`int`): W, block slots.
        window (`int`, *optional*): the layer's sliding window; `None` for full attention.
        causal (`bool`): whether a slot sees earlier slots of its block only.
        per_slot (`bool`):
            Measure the window from each slot: it sees what is closer than `window` to it. Otherwise
            it is measured from the anchor and the block is seen whole.

    Returns:
        `torch.Tensor` of shape `(W, C + W)`: `True` where slot and key may meet.
    """
    slots = torch.arange(width)[:, None]
    keys = torch.arange(-num_context, width)[None, :]
    visible = keys <= slots if causal else torch.ones(width, num_context + width, dtype=torch.bool)
    if window is not None and per_slot:
        visible = visible & ((slots - keys).abs() < window)
    return visible


def additive(visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A visibility `(W, K)` as the host's eager and sdpa kernels take it: `(1, 1, W, K)`, 0 or
    the lowest number, in the dtype and on the device of `like`."""
    mask = torch.zeros(visible.shape, dtype=like.dtype)
    mask.masked_fill_(~visible, torch.finfo(like.dtype).min)
    return mask[None, None].to(like.device)
