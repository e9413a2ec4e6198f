"""A checkpoint described without loading its weights: what `dspark-hf inspect` prints."""

from typing import Any

from ..auto import drafter_class_of
from ..configuration_drafter import DrafterConfig
from ..configuration_dspark import DSparkConfig
from . import deepseek_v4
from .checkpoint import CheckpointFacts, meta_state, read_facts
from .detection import DEEPSEEK_V4, OWN_LAYOUTS, architecture_of
from .files import num_bytes

# What a fact of the description was read as; of several, the first that was read.
_READ_AS = {
    "backbone": ("model_type",),
    "block_size": ("block_size", "block_width"),
    "block_width": ("block_width", "block_size"),
    "causal_layers": ("causal_layers", "causal"),
    "hidden_states_indices": ("target_layer_ids",),
    "interleaved_rotary": ("interleaved_rotary",),
    "markov_head": ("markov_head_type",),
    "num_draft_layers": ("num_draft_layers", "num_hidden_layers"),
    "rope": ("rope", "rope_parameters"),
    "target_hidden_size": ("target_hidden_size", "hidden_size"),
    "windows": ("sliding_window", "layer_types"),
    "window_measured_from": ("sliding_window_per_slot",),
}
# What is said of the files and not of the drafter.
_NO_FACTS = ("source", "dialect", "architecture")


def describe(
    source: str,
    block_layout: str | None = None,
    num_target_layers: int | None = None,
    **hub: Any,
) -> dict[str, Any]:
    """
    The normalised facts of a drafter checkpoint, JSON-ready.

    Only config.json and the headers of the weight files are read; on the Hub only those travel.
    `origins` says for each fact which key of config.json it came from; an entry that starts with
    `=` followed from the layout or the tensors. `warnings` names contradictions and silences.

    Args:
        source (`str`): folder or Hub id.
        block_layout (`str`, *optional*):
            `"anchor_first"` or `"infill"`, over what the checkpoint says.
        num_target_layers (`int`, *optional*):
            Depth of the target, for EAGLE-3 files that leave their taps to a rule over it.

    Raises:
        `ValueError` or `OSError`: as [`DSparkDrafter.from_pretrained`] would.
    """
    cls = drafter_class_of(source, **hub)
    told: dict[str, Any] = {
        "block_layout": block_layout,
        "num_target_layers": num_target_layers,
    }
    facts = read_facts(cls, source, download_weights=False, **told, **hub)
    config, tensors, reading = facts.config, facts.tensors, facts.reading
    bound = []
    if not config.stores_input_embeddings:
        bound.append("embedding")
    if not config.stores_output_embeddings:
        bound.append("output head")
    is_v4 = config.backbone_config.model_type == DEEPSEEK_V4
    described = {
        "source": source,
        "dialect": facts.dialect,
        "architecture": architecture_of(facts.raw_config),
        "family": _family(config),
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "hidden_states_indices": [layer + 1 for layer in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "backbone": config.backbone_config.model_type,
        "num_draft_layers": config.backbone_config.num_hidden_layers,
        "rope": _rotary(config),
        # Those of DeepSeek-V4 are so in the host as well; what others store is put in order.
        "interleaved_rotary": reading.interleaved_rotary or is_v4,
        **(_block_facts(config) if isinstance(config, DSparkConfig) else _row_facts(config)),
        "final_logit_softcapping": config.final_logit_softcapping,
        "bound_from_target": bound,
        "draft_sampling": "greedy" if reading.greedy_drafts else "sample",
    }
    return {
        **described,
        "num_tensors": len(tensors),
        "num_parameters": deepseek_v4.num_parameters(tensors),
        "num_bytes": sum(num_bytes(tensor) for tensor in tensors.values()),
        "stored_dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        **(
            {"num_bytes_in_memory": deepseek_v4.bytes_in_memory(meta_state(cls, config))}
            if is_v4
            else {}
        ),
        "files": (
            deepseek_v4.planned_files(tensors)
            if facts.dialect == DEEPSEEK_V4
            else sorted({tensor.file for tensor in tensors.values()})
        ),
        "renamed_tensors": reading.renames,
        "ignored_tensors": sorted(reading.unneeded),
        "ignored_config_keys": reading.unread,
        "origins": _origins(facts, [name for name in described if name not in _NO_FACTS]),
        "warnings": reading.warnings,
    }


def _origins(facts: CheckpointFacts, names: list[str]) -> dict[str, str]:
    """Where every fact comes from: a key of config.json, or after a `=` what it follows from."""
    origins, by_layout = dict(facts.reading.origins), f"= the {facts.dialect} layout"
    if facts.dialect in OWN_LAYOUTS:
        body = {f"backbone_config.{key}": key for key in facts.raw_config["backbone_config"]}
        origins = {key: path for path, key in body.items()}
        origins |= {key: key for key in facts.raw_config}
        by_layout = "= neutral default of the layout"
    matrices = ("stores_input_embeddings", "stores_output_embeddings")
    bound = [origins[name].removeprefix("= ") for name in matrices if name in origins]
    derived = {
        "family": "= the heads" if isinstance(facts.config, DSparkConfig) else by_layout,
        "bound_from_target": f"= {'; '.join(bound)}" if bound else by_layout,
        "confidence_head_bias": "= the tensors",
    }
    for name in names:
        found = (origins[read] for read in _READ_AS.get(name, (name,)) if read in origins)
        origins[name] = derived.get(name) or next(found, by_layout)
    return origins


def _family(config: DrafterConfig) -> str:
    if not isinstance(config, DSparkConfig):
        return "eagle3"
    return "dspark" if config.markov_head_type or config.confidence_head else "dflash"


def _block_facts(config: DSparkConfig) -> dict[str, Any]:
    """What only drafters of whole blocks have."""
    return {
        "block_width": config.block_width,
        "anchor_predicts": config.anchor_predicts,
        "mask_token_id": config.mask_token_id,
        "markov_head": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "confidence_head_bias": config.confidence_head and config.confidence_head_bias,
        "windows": _windows(config),
        "window_measured_from": "slot" if config.sliding_window_per_slot else "anchor",
        "causal_layers": config.causal_layers,
        "unscaled_input_embeddings": config.unscaled_input_embeddings,
    }


def _row_facts(config: Any) -> dict[str, Any]:
    """What only drafters of one token after the other have."""
    names = ("feature_norm", "norm_before_residual", "recycles_normed_output")
    return {name: getattr(config, name) for name in names}


def _windows(config: DSparkConfig) -> list[int | None]:
    """Sliding window of every draft layer, `None` for full attention."""
    backbone = config.backbone_config
    if backbone.model_type == "deepseek_v4":
        return [backbone.sliding_window] * backbone.num_hidden_layers
    if backbone.model_type != "qwen3":
        return [None] * backbone.num_hidden_layers
    return [
        backbone.sliding_window if kind == "sliding_attention" else None
        for kind in backbone.layer_types
    ]


def _rotary(config: DrafterConfig) -> dict[str, Any]:
    rope = dict(config.backbone_config.rope_parameters)
    own = next((name for name in ("full_attention", "main") if name in rope), None)
    return rope if own is None else rope[own]
