"""The rounding of the released DeepSeek-V4 kernels, for comparisons with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..quantised import FP8_BLOCK, round_to_fp8

if TYPE_CHECKING:
    from ..modeling_dspark import DSparkDrafter

# The unrotated channels of a latent are stored in FP8, in groups of this size.
_LATENT_GROUP = 64


@contextmanager
def simulate_fp8(drafter: "DSparkDrafter") -> Iterator[None]:
    """
    Let a quantised DeepSeek-V4 drafter round as the released kernels do, while the context is open:
    the inputs of FP8 and FP4 projections to FP8 in groups of 128, and the unrotated channels of
    keys and values in groups of 64.

    Drafts change a little; the output of `generate` does not. The released kernels further round
    attention probabilities and the per-head query norm to bfloat16, which is not simulated.

    Raises:
        `ValueError`: the drafter was not trained in these formats.
    """
    backbone = drafter.config.backbone_config
    if backbone.model_type != "deepseek_v4" or backbone.expert_dtype != "fp4":
        raise ValueError(
            "simulate_fp8 is for DeepSeek-V4 drafters with packed FP4 experts; this one has "
            f"{backbone.model_type!r} layers with experts in "
            f"{getattr(backbone, 'expert_dtype', None) or 'floating point'}."
        )
    rotated = backbone.qk_rope_head_dim

    def round_latent(module: nn.Module, args: Any, latent: torch.Tensor) -> torch.Tensor:
        plain, rope = latent[..., :-rotated], latent[..., -rotated:]
        return torch.cat((round_to_fp8(plain, _LATENT_GROUP), rope), dim=-1)

    handles = [module.register_forward_pre_hook(_round_input) for module in _projections(drafter)]
    for layer in drafter.layers:
        handles.append(layer.self_attn.kv_norm.register_forward_hook(round_latent))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round_input(module: nn.Module, args: Any) -> Any:
    return (round_to_fp8(args[0], FP8_BLOCK), *args[1:])


def _projections(drafter: "DSparkDrafter") -> Iterator[nn.Module]:
    """Modules whose input the released kernels quantise: not the grouped output projection."""
    yield drafter.fc
    for layer in drafter.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        yield from (attention.q_a_proj, attention.q_b_proj, attention.kv_proj, attention.o_b_proj)
        shared = layer.mlp.shared_experts
        yield from (shared.gate_proj, shared.up_proj, shared.down_proj)
        yield from (experts, experts.down_input)
