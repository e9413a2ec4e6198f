"""
Anchors, labels and the many-anchor attention mask (paper section 6).

Shapes: B sequences, S positions, A anchors per sequence, W block slots, G predicting slots (γ).
Everything here takes tensors and returns tensors.
"""

import torch


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draw anchors of every sequence by itself, uniformly and without replacement.

    A position can be an anchor if it and its successor are supervised. Drawn from PyTorch's global
    generator of the CPU, so that a resumed run draws what the uninterrupted one would have.

    Args:
        loss_mask (`torch.Tensor` of shape `(B, S)`): true where the target wrote the token.
        num_anchors (`int`): most anchors per sequence.

    Returns:
        Anchor positions `(B, A)` in ascending order and `(B, A)` whether each is a real one; short
        sequences fill up with position 0. A is at most `num_anchors`.
    """
    successor = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))
    is_candidate = (loss_mask & successor).cpu()
    order = torch.rand(is_candidate.shape).masked_fill_(~is_candidate, -1.0)
    most = max(1, min(num_anchors, int(is_candidate.sum(dim=1).max())))
    scores, positions = order.topk(most, dim=1)
    beyond = loss_mask.shape[1]
    positions = positions.masked_fill(scores < 0, beyond).sort(dim=1).values
    is_kept = positions < beyond
    device = loss_mask.device
    return positions.masked_fill(~is_kept, 0).to(device), is_kept.to(device)


def block_targets(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    is_kept: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    What each slot should predict and what stands before it.

    Supervision of a block ends at its first slot whose label is outside of the sequence or not
    supervised: no drafted token behind it could be accepted.

    Args:
        input_ids, loss_mask (`torch.Tensor` of shape `(B, S)`): tokens and whether to learn them.
        anchors, is_kept (`torch.Tensor` of shape `(B, A)`): from [`sample_anchors`].
        block_size (`int`): γ.

    Returns:
        `(B, A, G)` each: labels, previous tokens (teacher forcing), whether a slot is supervised.
    """
    slots = torch.arange(block_size, device=anchors.device)
    before = anchors[..., None] + slots
    last = input_ids.shape[1] - 1
    flat = (before + 1).clamp(max=last).flatten(1)
    shape = before.shape
    labels = input_ids.gather(1, flat).view(shape)
    is_learned = loss_mask.gather(1, flat).view(shape) & (before < last) & is_kept[..., None]
    previous = input_ids.gather(1, before.clamp(max=last).flatten(1)).view(shape)
    return labels, previous, is_learned.long().cumprod(dim=-1).bool()


def decay_weights(is_supervised: torch.Tensor, decay: float) -> torch.Tensor:
    """
    Weights `w_k = exp(-k / decay)` of slots k = 0, 1, …, zero where nothing is supervised.

    The paper writes the block size for the constant; the released drafters were trained with 4.0.
    """
    slots = torch.arange(is_supervised.shape[-1], device=is_supervised.device)
    return is_supervised * torch.exp(-slots / decay)


def many_anchor_mask(
    anchors: torch.Tensor,
    is_kept: torch.Tensor,
    is_text: torch.Tensor,
    block_width: int,
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """
    Which keys the block rows of all anchors of a sequence see, when they run as one row of queries.

    A block sees the context strictly before its anchor (the anchor's own features do not exist when
    drafting) and its own slots, in both directions unless `causal`, and nothing of other blocks.

    Args:
        anchors, is_kept (`torch.Tensor` of shape `(B, A)`): from [`sample_anchors`].
        is_text (`torch.Tensor` of shape `(B, S)`): false at padding.
        block_width (`int`): W.
        window (`int`, *optional*): sliding layers see `window` positions before the anchor.
        causal (`bool`, *optional*, defaults to `False`): slots see earlier slots of their block.

    Returns:
        `torch.Tensor` of shape `(B, 1, A·W, S + A·W)`: true where a query sees a key.
    """
    positions = torch.arange(is_text.shape[1], device=anchors.device)
    sees_context = (positions < anchors[..., None]) & is_text[:, None] & is_kept[..., None]
    if window is not None:
        sees_context &= positions >= anchors[..., None] - window
    sees_context = sees_context.repeat_interleave(block_width, dim=1)
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_width)
    own_block = block[:, None] == block
    if causal:
        slot = torch.arange(len(block), device=anchors.device) % block_width
        own_block = own_block & (slot[:, None] >= slot)
    sees_block = own_block.expand(anchors.shape[0], -1, -1)
    return torch.cat((sees_context, sees_block), dim=-1)[:, None]
