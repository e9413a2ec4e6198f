"""Routed experts that stay packed in memory: only those that a block selects are decoded."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..quantised import FP4_GROUP, dequantise_fp4


class PackedExperts(nn.Module):
    """
    FP4 experts in place of the host's `DeepseekV4Experts`: the same call and the same result.

    E experts of width I over hidden size H, as bytes: `gate_up_proj` (E, 2I, H / 2) with scales
    (E, 2I, H / 32), `down_proj` (E, H, I / 2) with scales (E, H, I / 32). A block of 5 tokens with
    6 experts each decodes at most 30 of them; decoding all would take four times the memory.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        experts, width, hidden = (
            config.num_local_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        if hidden % FP4_GROUP or width % FP4_GROUP:
            raise ValueError(
                f"FP4 experts have one scale for each {FP4_GROUP} columns, but hidden_size is "
                f"{hidden} and moe_intermediate_size is {width}. Set expert_dtype to None for "
                "experts that are not packed."
            )
        self.gate_up_proj = _bytes(experts, 2 * width, hidden // 2)
        self.gate_up_scale = _bytes(experts, 2 * width, hidden // FP4_GROUP)
        self.down_proj = _bytes(experts, hidden, width // 2)
        self.down_scale = _bytes(experts, hidden, width // FP4_GROUP)
        # Passes on what goes into the down projections; a place for hooks.
        self.down_input = nn.Identity()
        self.act_fn = ACT2FN[config.hidden_act]
        self.limit = config.swiglu_limit

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(T, H)`): tokens.
            top_k_index, top_k_weights (`torch.Tensor` of shape `(T, K)`):
                selected experts of every token and their weights.
        """
        dtype = hidden_states.dtype
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == expert)
            gate_up = dequantise_fp4(self.gate_up_proj[expert], self.gate_up_scale[expert], dtype)
            gate, up = F.linear(hidden_states[token], gate_up).float().chunk(2, dim=-1)
            activated = self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
            # The reference weighs an expert before its down projection.
            activated = (activated * top_k_weights[token, choice, None].float()).to(dtype)
            activated = self.down_input(activated)
            down = dequantise_fp4(self.down_proj[expert], self.down_scale[expert], dtype)
            total.index_add_(0, token, F.linear(activated, down).float())
        return total.to(dtype)


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
