"""
DeepSeek-V4 backbone: sliding-window DeepSeek-V4 layers of the host library, unmodified.

Hidden states of a block are `(R, W, S, H)`, S residual streams. What differs from the dense family:
key and value are one latent, rotated on its trailing channels with the plain rotary embedding; the
layers carry the streams from end to end; a hyper-connection head collapses them, and the confidence
head reads what it yields *before* the final norm.
"""

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers import initialization as init
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4Experts,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    DeepseekV4TopKRouter,
    apply_rotary_pos_emb,
)

from .packed_experts import PackedExperts

# Cosines and sines of the rotary embedding, (R, T, rotated channels / 2) each.
Rotary = tuple[torch.Tensor, torch.Tensor]

DECODER_LAYER = "DeepseekV4DecoderLayer"
# The kernels besides the eager one leave out the attention sinks.
EAGER_ONLY = True
FLOAT32_MODULES = tuple(DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict)

# The draft layers have ratio 0, and those rotate without YaRN.
_ROPE = "main"


def build_layers(config: PreTrainedConfig) -> dict[str, nn.Module]:
    """
    The draft layers, the stream head, the final norm, the norm of the context features and the
    rotary embedding. With `config.expert_dtype == "fp4"` the routed experts stay packed in memory.
    """
    config._experts_implementation = "eager"
    layers = nn.ModuleList(
        DeepseekV4DecoderLayer(config, i) for i in range(config.num_hidden_layers)
    )
    if is_packed(config):
        for layer in layers:
            layer.mlp.experts = PackedExperts(config)
    return {
        "layers": layers,
        "hc_head": DeepseekV4HyperHead(config),
        "norm": DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "hidden_norm": DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "rotary_emb": DeepseekV4RotaryEmbedding(config),
    }


def is_packed(config: PreTrainedConfig) -> bool:
    """Whether the routed experts are kept as FP4 codes."""
    return getattr(config, "expert_dtype", None) == "fp4"


def build_input_embeddings(config: PreTrainedConfig, vocab_size: int) -> nn.Module:
    """An embedding for checkpoints that carry their own."""
    return nn.Embedding(vocab_size, config.hidden_size)


def embed(embeddings: nn.Module, token_ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Block embeddings, repeated over the streams: `(R, W)` to `(R, W, S, H)`."""
    embedded = embeddings(token_ids)
    return embedded.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()


def position_embeddings(rotary: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
    """
    Rotary cosines and sines for `position_ids` (R, T), in float32 whatever `x` is: rounded to
    bfloat16 they would be off by 0.002 at long contexts.
    """
    return rotary(x.float(), position_ids, layer_type=_ROPE)


def context_key_values(
    layer: nn.Module, features: torch.Tensor, position_embeddings: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keys and values of context rows, `(R, 1, T, head_dim)` each and the same, from projected
    features `(R, T, H)`.

    The same projection and norm as the block's, without the layer's input norm and streams
    (equation 3).
    """
    attention = layer.self_attn
    latent = attention.kv_norm(attention.kv_proj(features)).unsqueeze(1)
    latent = apply_rotary_pos_emb(latent, *position_embeddings)
    return latent, latent


def run_layer(
    layer: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Rotary,
    cache: Cache,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    One draft layer over block rows `(R, W, S, H)`. Without a mask they see the context and each
    other; one to be added to the scores, `(R, 1, W, keys)`, keeps rows apart.
    """
    return layer(
        hidden_states,
        attention_mask=attention_mask,
        position_embeddings={_ROPE: position_embeddings},
        position_ids=None,
        cache=cache,
    )


def read_out(drafter: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What the output head reads and what the confidence head reads, `(R, W, H)` each: the collapsed
    streams after and before the final norm.
    """
    collapsed = drafter.hc_head(hidden_states)
    return drafter.norm(collapsed), collapsed


def initialize_weights(module: nn.Module, std: float) -> None:
    """What the host's generic initialisation does not cover: parameters outside plain layers."""
    if isinstance(module, DeepseekV4TopKRouter):
        init.normal_(module.weight, mean=0.0, std=std)
        init.zeros_(module.e_score_correction_bias)
    elif isinstance(module, DeepseekV4Experts):
        init.normal_(module.gate_up_proj, mean=0.0, std=std)
        init.normal_(module.down_proj, mean=0.0, std=std)
    elif isinstance(module, PackedExperts):
        for tensor in module.parameters():
            init.zeros_(tensor)
    elif isinstance(module, DeepseekV4Attention):
        init.zeros_(module.sinks)
    elif isinstance(module, DeepseekV4HyperConnection):
        init.normal_(module.fn, mean=0.0, std=std)
        init.zeros_(module.base)
        init.ones_(module.scale)
    elif isinstance(module, DeepseekV4HyperHead):
        init.normal_(module.hc_fn, mean=0.0, std=std)
        init.zeros_(module.hc_base)
        init.ones_(module.hc_scale)
    elif isinstance(module, DeepseekV4RotaryEmbedding):
        for name in module.layer_types:
            inv_freq, _ = module.compute_default_rope_parameters(module.config, layer_type=name)
            init.copy_(getattr(module, f"{name}_inv_freq"), inv_freq)
            init.copy_(getattr(module, f"{name}_original_inv_freq"), inv_freq)
