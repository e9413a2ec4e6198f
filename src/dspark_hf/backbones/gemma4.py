"""
Gemma 4 backbone: full-attention Gemma 4 layers of the host library, unmodified.

What differs from the dense family: values are the un-scaled norm of the raw key projection where
`attention_k_eq_v` holds, the rotary embedding is partial, and embeddings are scaled by √H.
"""

import torch
from torch import nn
from transformers import Cache
from transformers import initialization as init
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextConfig,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
    apply_rotary_pos_emb,
)

# Cosines and sines of the rotary embedding, (R, T, head_dim) each.
Rotary = tuple[torch.Tensor, torch.Tensor]

DECODER_LAYER = "Gemma4TextDecoderLayer"
EAGER_ONLY = False
FLOAT32_MODULES: tuple[str, ...] = ()


def build_layers(config: Gemma4TextConfig) -> dict[str, nn.Module]:
    """
    The draft layers, the final norm, the norm of the context features and the rotary embedding.
    """
    return {
        "layers": nn.ModuleList(
            Gemma4TextDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        ),
        "norm": Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "hidden_norm": Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "rotary_emb": Gemma4TextRotaryEmbedding(config),
    }


def build_input_embeddings(config: Gemma4TextConfig, vocab_size: int) -> nn.Module:
    """An embedding for checkpoints that carry their own; it scales, as the target's does."""
    scaled = Gemma4TextScaledWordEmbedding(
        vocab_size, config.hidden_size, 0, embed_scale=config.hidden_size**0.5
    )
    # The host zeroes a padding row when it initialises; a drafter has no padding.
    scaled.padding_idx = None
    return scaled


def embed(embeddings: nn.Module, token_ids: torch.Tensor, config: Gemma4TextConfig) -> torch.Tensor:
    """Block embeddings scaled by √H, whether or not the embedding module scales by itself."""
    embedded = embeddings(token_ids)
    if hasattr(embeddings, "embed_scale"):
        return embedded
    return embedded * torch.tensor(config.hidden_size**0.5, dtype=embedded.dtype, device="cpu")


def position_embeddings(rotary: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
    """Rotary cosines and sines for `position_ids` (R, T), in the dtype of `x`."""
    return rotary(x, position_ids, "full_attention")


def context_key_values(
    layer: nn.Module, features: torch.Tensor, position_embeddings: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keys and values of context rows, `(R, kv_heads, T, head_dim)` each, from projected features `(R,
    T, H)`.

    The same projections and norms as the block's, but without the layer's input norm (equation 3).
    """
    attention = layer.self_attn
    shape = (*features.shape[:-1], -1, attention.head_dim)
    raw_keys = attention.k_proj(features).view(shape)
    raw_values = raw_keys if attention.v_proj is None else attention.v_proj(features).view(shape)
    keys = apply_rotary_pos_emb(attention.k_norm(raw_keys), *position_embeddings, unsqueeze_dim=2)
    return keys.transpose(1, 2), attention.v_norm(raw_values).transpose(1, 2)


def run_layer(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Rotary,
    cache: Cache,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    One draft layer over block rows `(R, W, H)`. Without a mask they see the context and each other;
    training gives a boolean one, `(R, 1, W, keys)`, that keeps its many blocks apart.
    """
    # The layers of a drafter share no keys or values; the host asks for the place to put them all
    # the same.
    return layer(
        hidden_states,
        shared_kv_states={},
        attention_mask=attention_mask,
        position_embeddings=position_embeddings,
        cache=cache,
    )


def read_out(drafter: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What the output head reads and what the confidence head reads, `(R, W, H)` each: here the same,
    the block after the final norm.
    """
    hidden_states = drafter.norm(hidden_states)
    return hidden_states, hidden_states


def initialize_weights(module: nn.Module, std: float) -> None:
    """What the host's generic initialisation does not cover: buffers that no checkpoint stores."""
    if isinstance(module, Gemma4TextRotaryEmbedding):
        for layer_type, rope_init_fn in module.rope_init_fns.items():
            inv_freq, _ = rope_init_fn(
                module.config.per_layer_config[layer_type], layer_type=layer_type
            )
            init.copy_(getattr(module, f"{layer_type}_inv_freq"), inv_freq)
            init.copy_(getattr(module, f"{layer_type}_original_inv_freq"), inv_freq)
    elif isinstance(module, Gemma4TextScaledWordEmbedding):
        init.constant_(module.embed_scale, module.scalar_embed_scale)
    elif isinstance(module, Gemma4TextDecoderLayer):
        init.ones_(module.layer_scalar)
