"""
The draft layers over many anchors at once.

The same context keys and values and the same host layers as in drafting; only the cache hands out
context and blocks together, and a mask keeps the anchors apart.
"""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..modeling_dspark import DSparkDrafter
from .anchors import many_anchor_mask


class _ContextAndBlocks(DynamicLayer):
    """Puts a layer's context in front of the block rows. Nothing in place: gradients flow."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.context = (keys, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.context
        return torch.cat((keys, key_states), dim=-2), torch.cat((values, value_states), dim=-2)


def block_hidden_states(
    drafter: DSparkDrafter,
    input_embeddings: torch.nn.Module,
    features: torch.Tensor,
    input_ids: torch.Tensor,
    is_text: torch.Tensor,
    anchors: torch.Tensor,
    is_kept: torch.Tensor,
) -> torch.Tensor:
    """
    Hidden states of the predicting slots of every anchor's block.

    Args:
        drafter ([`DSparkDrafter`]): whose layers run.
        input_embeddings (`torch.nn.Module`): the target's, or the drafter's own.
        features (`torch.Tensor` of shape `(B, S, n·H_target)`): tap outputs of all positions.
        input_ids, is_text (`torch.Tensor` of shape `(B, S)`): tokens, and false at padding.
        anchors, is_kept (`torch.Tensor` of shape `(B, A)`): from [`sample_anchors`].

    Returns:
        `torch.Tensor` of shape `(B, A, γ, H)`: after the drafter's final norm.
    """
    config, backbone = drafter.config, drafter.backbone
    if config.sliding_window_per_slot and config.needs_block_mask:
        raise ValueError(
            "This drafter measures its sliding windows from each slot (z-lab's layout), and blocks "
            "are trained with windows measured from the anchor. Set sliding_window_per_slot=False "
            "in its config to train it so from now on."
        )
    if config.backbone_config.model_type == "deepseek_v4":
        raise ValueError(
            "Drafters with DeepSeek-V4 layers are loaded and run, and not trained here: their "
            "confidence head reads another state than this objective gives it. Train a drafter "
            "with qwen3 layers for the target."
        )
    width, (num_rows, num_anchors) = config.block_width, anchors.shape
    projected = drafter.hidden_norm(drafter.fc(features.to(drafter.fc.weight.dtype)))
    positions = torch.arange(features.shape[1], device=features.device)[None]
    rotary = backbone.position_embeddings(drafter.rotary_emb, projected, positions)
    cache = Cache(
        layers=[
            _ContextAndBlocks(*backbone.context_key_values(layer, projected, rotary))
            for layer in drafter.layers
        ]
    )

    blocks = input_ids.new_full((num_rows, num_anchors, width), config.mask_token_id)
    blocks[..., 0] = input_ids.gather(1, anchors).where(is_kept, config.mask_token_id)
    slots = torch.arange(width, device=anchors.device)
    block_positions = (anchors[..., None] + slots).flatten(1)
    hidden = drafter._embed(input_embeddings, blocks.flatten(1)).to(projected.dtype)
    rotary = backbone.position_embeddings(drafter.rotary_emb, hidden, block_positions)
    masks: dict[tuple[int | None, bool], torch.Tensor] = {}
    for i, layer in enumerate(drafter.layers):
        window, causal = getattr(layer.self_attn, "sliding_window", None), i in config.causal_layers
        if (window, causal) not in masks:
            mask = many_anchor_mask(anchors, is_kept, is_text, width, window, causal)
            mask = _for_kernel(mask, config._attn_implementation, hidden.dtype)
            masks[window, causal] = mask
        hidden = backbone.run_layer(layer, hidden, rotary, cache, masks[window, causal])
    hidden = drafter.norm(hidden).view(num_rows, num_anchors, width, -1)
    return hidden if config.anchor_predicts else hidden[:, :, 1:]


def _for_kernel(mask: torch.Tensor, kernel: str | None, dtype: torch.dtype) -> torch.Tensor:
    """The mask as an attention kernel of the host reads it: eager adds what it is given."""
    if kernel == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    if kernel not in (None, "sdpa"):
        raise ValueError(
            f"The drafter's attention is {kernel!r}, which cannot keep the blocks of many anchors "
            'apart. Train with attn_implementation="sdpa" (or "eager"); any kernel can draft.'
        )
    return mask
