"""A checkpoint described without loading its weights: what `dspark-hf inspect` prints."""

import math
from typing import Any

from ..auto import drafter_class
from ..configuration_drafter import DrafterConfig
from ..configuration_dspark import DSparkConfig
from . import deepseek_v4
from .checkpoint import meta_state, read_facts
from .dialects import ignored_keys
from .files import num_bytes, read_config


def describe(source: str, **hub: Any) -> dict[str, Any]:
    """
    The normalised facts of a drafter checkpoint, JSON-ready.

    Only config.json and the headers of the weight files are read; on the Hub only those travel.

    Raises:
        `ValueError` or `OSError`: as [`DSparkDrafter.from_pretrained`] would.
    """
    cls = drafter_class(read_config(source, **hub))
    facts = read_facts(cls, source, download_weights=False, **hub)
    config, tensors = facts.config, facts.tensors
    bound = []
    if not config.stores_input_embeddings:
        bound.append("embedding")
    if not config.stores_output_embeddings:
        bound.append("output head")
    return {
        "source": source,
        "dialect": facts.dialect,
        "architecture": (facts.raw_config.get("architectures") or [None])[0],
        "family": _family(config),
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "backbone": config.backbone_config.model_type,
        "num_draft_layers": config.backbone_config.num_hidden_layers,
        **(_block_facts(config) if isinstance(config, DSparkConfig) else {}),
        "final_logit_softcapping": config.final_logit_softcapping,
        "bound_from_target": bound,
        "num_tensors": len(tensors),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "num_bytes": sum(num_bytes(tensor) for tensor in tensors.values()),
        "stored_dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        "files": sorted({tensor.file for tensor in tensors.values()}),
        "ignored_config_keys": ignored_keys(facts.raw_config, facts.dialect),
        **(
            deepseek_v4.storage_facts(meta_state(cls, config), config, tensors)
            if facts.dialect == deepseek_v4.DEEPSEEK_V4
            else {}
        ),
    }


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
    }
