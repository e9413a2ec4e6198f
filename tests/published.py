"""
Tiny checkpoints in the layouts that others publish, written from their specification.

Each takes a drafter of ours and writes the same drafter with the names, shapes and config keys of
the layout, so that what is loaded can be compared number by number.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_hf import DSparkConfig, DSparkDrafter
from tiny import make_drafter, make_target

SHARED = ("embed_tokens.weight", "lm_head.weight")
# What a config that was copied from a Qwen3.5 target carries along.
RESIDUE = {
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 2],
    "attn_output_gate": True,
    "linear_num_key_heads": 4,
    "full_attention_interval": 4,
}


def make_block_drafter(
    windows: tuple[int | None, ...] = (None, None),
    seed: int = 1,
    theta: float = 5e5,
    **options: Any,
) -> DSparkDrafter:
    """A drafter of two layers, with sliding windows, causal layers and so on as asked for."""
    later = {
        name: options.pop(name)
        for name in ("causal_layers", "sliding_window_per_slot")
        if name in options
    }
    fields = make_drafter(stored=False, **options).config.to_dict()
    body = fields["backbone_config"]
    body["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    window = next((w for w in windows if w), None)
    if window:
        kinds = ["sliding_attention" if w else "full_attention" for w in windows]
        body.update(layer_types=kinds, sliding_window=window, use_sliding_window=True)
    torch.manual_seed(seed)
    drafter = DSparkDrafter(DSparkConfig(**{**fields, **later})).eval()
    with torch.no_grad():
        # Norm weights of one would hide a norm that is applied in the wrong place or order.
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return drafter


def publish(
    folder: Path,
    drafter: DSparkDrafter,
    config: dict[str, Any],
    rename: Callable[[str], str] = lambda name: name,
    **tensors: torch.Tensor,
) -> Path:
    """Write config.json and the drafter's tensors under the names that `rename` gives them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {rename(name): value.clone() for name, value in drafter.state_dict().items()}
    save_file({**state, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({key: value for key, value in config.items() if value is not ...})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def body_keys(drafter: DSparkDrafter, **changes: Any) -> dict[str, Any]:
    """The draft layers as the flat layouts spell them: a Qwen3 config at the top level."""
    body = drafter.config.backbone_config
    keys = {
        name: getattr(body, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "hidden_act",
            "max_position_embeddings",
            "attention_bias",
            "vocab_size",
            "layer_types",
            "sliding_window",
            "use_sliding_window",
        )
    }
    return {
        **keys,
        "model_type": "qwen3",
        "num_target_layers": drafter.config.num_target_layers,
        "rope_parameters": dict(body.rope_parameters),
        "tie_word_embeddings": False,
        "dtype": "float32",
        **changes,
    }


def dflash_section(drafter: DSparkDrafter, **changes: Any) -> dict[str, Any]:
    """What every `dflash_config` holds."""
    return {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
        **changes,
    }


def head_keys(drafter: DSparkDrafter, **changes: Any) -> dict[str, Any]:
    """The two heads in DeepSpec's and SpecForge's words."""
    config = drafter.config
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        **changes,
    }


def interleaved(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """Query and key weights for rotary pairs (2i, 2i + 1)."""
    dim = drafter.config.backbone_config.head_dim
    # Row 2i of a stored head is our row i, row 2i + 1 is our row i + dim / 2.
    order = torch.stack((torch.arange(dim // 2), torch.arange(dim // 2) + dim // 2), 1).flatten()
    changed = {}
    for name, value in drafter.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = value.view(-1, dim, value.shape[-1])
            changed[name] = heads[:, order].reshape(value.shape).contiguous()
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            changed[name] = value[order].contiguous()
    return changed


def flat_names(name: str) -> str:
    """ModelOpt's names of the heads."""
    if name.startswith("markov_head."):
        return name.removeprefix("markov_head.")
    return name.replace("confidence_head.proj.", "confidence_proj.")


# -- one file of each layout, with the drafter that it holds

NO_HEADS = {"markov": None, "confidence": False}


def zlab(folder, nested=False, windows=(None, None), **changes):
    """z-lab DFlash: block_size at the top level in older files, in dflash_config in newer ones."""
    drafter = make_block_drafter(
        windows, **NO_HEADS, anchor_predicts=False, sliding_window_per_slot=True
    )
    place = {"block_size": drafter.config.block_width}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **body_keys(drafter),
        **({} if nested else place),
        "dflash_config": dflash_section(drafter, **(place if nested else {})),
        **changes,
    }
    return publish(folder, drafter, config), drafter


def specforge(folder, head="vanilla", top_level=False, old_name=False, with_markov=True):
    """SpecForge DSpark: the heads' keys inside dflash_config; very early files say logit_head."""
    drafter = make_block_drafter(markov=head)
    if not with_markov:
        fields = {**drafter.config.to_dict(), "confidence_head_with_markov": False}
        torch.manual_seed(8)
        drafter = DSparkDrafter(type(drafter.config)(**fields)).eval()
    keys = {
        **dflash_section(drafter),
        **head_keys(drafter, confidence_head_with_markov=True if with_markov else ...),
    }
    keys = {name: value for name, value in keys.items() if value is not ...}
    config = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        **body_keys(drafter),
        "block_size": drafter.config.block_size,
        **(keys if top_level else {}),
        "dflash_config": {
            **keys,
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
        },
    }

    def rename(name):
        return name.replace("markov_head.", "logit_head.") if old_name else name

    return publish(folder, drafter, config, rename), drafter


def modelopt(folder, head="vanilla", swa=None, shift_label=True, **section):
    """ModelOpt DSpark: flat tensor names; a window may apply to all layers."""
    drafter = make_block_drafter(
        (swa, swa),
        markov=head,
        anchor_predicts=bool(shift_label),
        causal_layers=[0, 1] if section.get("causal") else None,
    )
    width = drafter.config.block_width
    window = {"use_swa": True, "swa_window_size": swa} if swa else {}
    config = {
        "architectures": ["DFlashDraftModel"],
        **body_keys(drafter, layer_types=["full_attention"] * 2, use_sliding_window=False),
        "block_size": width,
        "dflash_config": dflash_section(
            drafter,
            projector_type="dspark",
            shift_label=shift_label,
            markov_rank=8,
            markov_head_type=head,
            use_confidence_head=True,
            **window,
            **section,
        ),
    }
    return publish(folder, drafter, config, flat_names), drafter


def lfm2(folder, **changes):
    """LiquidAI LFM2.5: interleaved rotary pairs, heads at the top level."""
    drafter = make_block_drafter()
    keys = head_keys(drafter, enable_confidence_head=..., confidence_head_with_markov=...)
    config = {
        "architectures": ["Lfm2DSparkDraftModel"],
        **body_keys(drafter, num_target_layers=...),
        "block_size": drafter.config.block_size,
        "dflash_config": dflash_section(drafter, num_target_layers=4),
        "rope_is_neox_style": False,
        **keys,
        **changes,
    }
    return publish(folder, drafter, config, **interleaved(drafter)), drafter


def deepspec(folder, stored=False, **changes):
    """DeepSpec keys as others use them: MiniCPM5 drops both matrices, satgeze keeps residue."""
    drafter = make_block_drafter()
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **body_keys(drafter),
        "block_size": drafter.config.block_size,
        **dflash_section(drafter),
        **head_keys(drafter),
        **changes,
    }
    extra = {}
    if stored:
        target = make_target()
        extra["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        extra["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return publish(folder, drafter, config, **extra), drafter
