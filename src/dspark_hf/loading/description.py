"""A checkpoint described without loading its weights: what `dspark-hf inspect` prints."""

import math
from typing import Any

from ..modeling_dspark import DSparkDrafter
from .checkpoint import read_facts
from .dialects import ignored_keys
from .files import num_bytes


def describe(source: str, **hub: Any) -> dict[str, Any]:
    """
    The normalised facts of a drafter checkpoint, JSON-ready.

    Only config.json and the headers of the weight files are read; on the Hub only those travel.

    Raises:
        `ValueError` or `OSError`: as [`DSparkDrafter.from_pretrained`] would.
    """
    facts = read_facts(DSparkDrafter, source, download_weights=False, **hub)
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
        "family": "dspark" if config.markov_head_type or config.confidence_head else "dflash",
        "block_size": config.block_size,
        "block_width": config.block_width,
        "anchor_predicts": config.anchor_predicts,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "vocab_size": config.vocab_size,
        "backbone": config.backbone_config.model_type,
        "num_draft_layers": config.backbone_config.num_hidden_layers,
        "markov_head": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "final_logit_softcapping": config.final_logit_softcapping,
        "bound_from_target": bound,
        "num_tensors": len(tensors),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "num_bytes": sum(num_bytes(tensor) for tensor in tensors.values()),
        "stored_dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        "files": sorted({tensor.file for tensor in tensors.values()}),
        "ignored_config_keys": ignored_keys(facts.raw_config, facts.dialect),
    }
