"""
Dense pre-norm backbones with query and key norms: Qwen3 layers of the host library, unmodified.
"""

import torch
from torch import nn
from transformers import Cache
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

# Cosines and sines of the rotary embedding, (R, T, head_dim) each.
Rotary = tuple[torch.Tensor, torch.Tensor]

DECODER_LAYER = "Qwen3DecoderLayer"


def build_layers(config: Qwen3Config) -> dict[str, nn.Module]:
    """
    The draft layers, the final norm, the norm of the context features and the rotary embedding.
    """
    return {
        "layers": nn.ModuleList(
            Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        ),
        "norm": Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "hidden_norm": Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "rotary_emb": Qwen3RotaryEmbedding(config),
    }


def build_input_embeddings(config: Qwen3Config, vocab_size: int) -> nn.Module:
    """An embedding for checkpoints that carry their own."""
    return nn.Embedding(vocab_size, config.hidden_size)


def embed(embeddings: nn.Module, token_ids: torch.Tensor, config: Qwen3Config) -> torch.Tensor:
    """Block embeddings as the drafter was trained with: the embedding's output."""
    return embeddings(token_ids)


def position_embeddings(rotary: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
    """Rotary cosines and sines for `position_ids` (R, T), in the dtype of `x`."""
    return rotary(x, position_ids)


def context_key_values(
    layer: nn.Module, features: torch.Tensor, position_embeddings: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keys and values of context rows, `(R, kv_heads, T, head_dim)` each, from projected features `(R,
    T, H)`.

    The same projections and key norm as the block's, but without the layer's input norm (equation
    3).
    """
    attention = layer.self_attn
    shape = (*features.shape[:-1], -1, attention.head_dim)
    keys = attention.k_norm(attention.k_proj(features).view(shape)).transpose(1, 2)
    values = attention.v_proj(features).view(shape).transpose(1, 2)
    cos, sin = (x.unsqueeze(1) for x in position_embeddings)
    return keys * cos + rotate_half(keys) * sin, values


def run_layer(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Rotary,
    cache: Cache,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    One draft layer over the block `(R, W, H)`. Without a mask, block rows see the context and each
    other.
    """
    return layer(
        hidden_states,
        attention_mask=attention_mask,
        position_embeddings=position_embeddings,
        cache=cache,
    )


def initialize_weights(module: nn.Module) -> None:
    """What the host's generic initialisation does not cover: nothing for this family."""
