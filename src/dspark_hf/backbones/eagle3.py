"""
The layer of an Eagle3 drafter: the host's decoder layer with an attention that is twice as wide.

A row pairs a hidden state with the embedding of the token that follows it. Both are normed and laid
side by side in front of the attention, embedding first; the residual stream carries the hidden
state alone. Attention, MLP and norms are the host's own modules, and the family's
`context_key_values` makes keys and values of context rows.

Shapes: R rows of the batch, T positions, H hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from ..configuration_eagle3 import Eagle3Config
from .dense import Rotary

DECODER_LAYERS = ("DenseEagle3Layer", "LlamaEagle3Layer", "Gemma4Eagle3Layer")


class DenseEagle3Layer(Qwen3DecoderLayer):
    """Qwen3's layer over pairs of embedding and hidden state."""

    def __init__(self, config: Eagle3Config):
        backbone = config.backbone_config
        super().__init__(backbone, 0)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = Qwen3RMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)
        _widen(self.self_attn)

    def attention_input(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What queries, keys and values are projected from: `(R, T, 2 H)`."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def forward(  # type: ignore[override]
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        position_embeddings: Rotary,
        cache: Cache,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer output `(R, T, H)`, not normed, given embeddings and hidden states `(R, T, H)`."""
        attended, _ = self.self_attn(
            self.attention_input(embedded, hidden),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
        )
        hidden = self.residual(hidden) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def residual(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the residual stream starts from."""
        return self.hidden_norm(hidden) if self.norm_before_residual else hidden


class LlamaEagle3Layer(LlamaDecoderLayer):
    """Llama's layer over pairs of embedding and hidden state: no norms of queries and keys."""

    def __init__(self, config: Eagle3Config):
        backbone = config.backbone_config
        super().__init__(backbone, 0)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)
        # Keys of context rows are normed where the family has such norms; this one has none.
        self.self_attn.k_norm = nn.Identity()
        _widen(self.self_attn)

    attention_input = DenseEagle3Layer.attention_input
    forward = DenseEagle3Layer.forward
    residual = DenseEagle3Layer.residual


class Gemma4Eagle3Layer(Gemma4TextDecoderLayer):
    """Gemma 4's full-attention layer over pairs of embedding and hidden state."""

    def __init__(self, config: Eagle3Config):
        backbone = config.backbone_config
        super().__init__(backbone, 0)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = Gemma4RMSNorm(backbone.hidden_size, eps=backbone.rms_norm_eps)
        _widen(self.self_attn)

    attention_input = DenseEagle3Layer.attention_input
    residual = DenseEagle3Layer.residual

    def forward(  # type: ignore[override]
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        position_embeddings: Rotary,
        cache: Cache,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer output `(R, T, H)`, not normed, given embeddings and hidden states `(R, T, H)`."""
        attended, _ = self.self_attn(
            self.attention_input(embedded, hidden),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            shared_kv_states={},
            cache=cache,
        )
        hidden = self.residual(hidden) + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed_forward)) * self.layer_scalar


def build_layers(config: Eagle3Config) -> dict[str, nn.Module]:
    """
    The draft layer (in a list of one), the final norm, the rotary embedding and the norms in front
    of the context projection.
    """
    backbone = config.backbone_config
    layer: Any
    norm: Any
    rotary: Any
    layer, norm, rotary = {
        "qwen3": (DenseEagle3Layer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
        "llama": (LlamaEagle3Layer, LlamaRMSNorm, LlamaRotaryEmbedding),
        "gemma4_text": (Gemma4Eagle3Layer, Gemma4RMSNorm, Gemma4TextRotaryEmbedding),
    }[backbone.model_type]
    eps, num_taps, width = (
        backbone.rms_norm_eps,
        len(config.target_layer_ids),
        config.target_hidden_size,
    )
    modules = {
        "layers": nn.ModuleList([layer(config)]),
        "norm": norm(backbone.hidden_size, eps=eps),
        "rotary_emb": rotary(backbone),
    }
    if config.feature_norm == "joint":
        modules["input_norm"] = norm(num_taps * width, eps=eps)
    elif config.feature_norm == "per_tap":
        modules["fc_norm"] = nn.ModuleList(norm(width, eps=eps) for _ in range(num_taps))
    return modules


def _widen(attention: nn.Module) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        narrow = getattr(attention, name)
        if narrow is not None:  # Gemma 4 may take its values from the keys.
            wide = nn.Linear(
                2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None
            )
            setattr(attention, name, wide)
