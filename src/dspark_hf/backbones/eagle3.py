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
    Gemma4TextConfig,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from .dense import Rotary

DECODER_LAYERS = ("DenseEagle3Layer", "Gemma4Eagle3Layer")


class DenseEagle3Layer(Qwen3DecoderLayer):
    """Qwen3's layer over pairs of embedding and hidden state."""

    def __init__(self, config: Qwen3Config):
        super().__init__(config, 0)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Gemma4Eagle3Layer(Gemma4TextDecoderLayer):
    """Gemma 4's full-attention layer over pairs of embedding and hidden state."""

    def __init__(self, config: Gemma4TextConfig):
        super().__init__(config, 0)
        self.hidden_norm = Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        _widen(self.self_attn)

    attention_input = DenseEagle3Layer.attention_input

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
        hidden = hidden + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed_forward)) * self.layer_scalar


def build_layers(config: Any) -> dict[str, nn.Module]:
    """The draft layer (in a list of one), the final norm and the rotary embedding."""
    if config.model_type == "gemma4_text":
        return {
            "layers": nn.ModuleList([Gemma4Eagle3Layer(config)]),
            "norm": Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            "rotary_emb": Gemma4TextRotaryEmbedding(config),
        }
    return {
        "layers": nn.ModuleList([DenseEagle3Layer(config)]),
        "norm": Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
        "rotary_emb": Qwen3RotaryEmbedding(config),
    }


def _widen(attention: nn.Module) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        narrow = getattr(attention, name)
        if narrow is not None:  # Gemma 4 may take its values from the keys.
            wide = nn.Linear(
                2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None
            )
            setattr(attention, name, wide)
