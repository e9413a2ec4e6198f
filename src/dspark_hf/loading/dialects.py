"""From any published layout to the normal form."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from .deepspec import read_deepspec
from .detection import (
    CHAIN_EAGLE3,
    DEEPSPEC,
    DEEPSPEC_EAGLE3,
    OWN_LAYOUTS,
    SPECULATORS,
    SPECULATORS_EAGLE3,
)
from .dflash import read_dflash_family
from .eagle3 import read_chain_eagle3, read_eagle3
from .files import TensorInfo
from .reading import ConfigReader, Reading, check_depth
from .speculators import read_speculators, read_speculators_eagle3

# The host's classes have defaults for these, which are no drafter's.
_OWN_LAYER_FACTS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "rope_parameters",
)


def read_dialect(
    raw: dict[str, Any],
    dialect: str,
    source: str,
    tensors: Mapping[str, TensorInfo],
    block_layout: str | None = None,
    num_target_layers: int | None = None,
) -> Reading:
    """
    The checkpoint's facts in the normal form.

    Embedding, head and confidence bias are decided by the presence of their tensors, in every
    dialect.

    Args:
        raw (`dict`): config.json as it is.
        dialect (`str`): what `detect_dialect` said.
        source (`str`): repository or folder, for messages.
        tensors (mapping of `str` to [`TensorInfo`]): the stored tensors.
        block_layout (`str`, *optional*):
            `"anchor_first"` or `"infill"`, over what the checkpoint says.
        num_target_layers (`int`, *optional*):
            Depth of the target, where the layout does not record it; some EAGLE-3 files leave their
            taps to a rule over it.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    reader = ConfigReader(raw, source, tensors)
    if dialect in OWN_LAYOUTS:
        refuse_stated(source, dialect, block_layout, num_target_layers)
        reader.require("backbone_config", "backbone_config")
        for key in _OWN_LAYER_FACTS:
            reader.require(key, f"backbone_config.{key}")
        # The width of one expert, where the layers are mixtures of them.
        reader.require(
            "intermediate_size",
            "backbone_config.intermediate_size",
            "backbone_config.moe_intermediate_size",
        )
        check_depth(reader, raw["backbone_config"]["num_hidden_layers"])
        own = DSparkConfig if dialect == DSparkConfig.model_type else Eagle3Config
        return Reading(own.from_dict(raw))
    if dialect == DEEPSPEC:
        reading = read_deepspec(reader, block_layout)
    elif dialect == DEEPSPEC_EAGLE3:
        reading = read_eagle3(reader, block_layout)
    elif dialect == CHAIN_EAGLE3:
        reading = read_chain_eagle3(reader, block_layout, num_target_layers)
    elif dialect == SPECULATORS_EAGLE3:
        reading = read_speculators_eagle3(reader, block_layout, num_target_layers)
    elif dialect == SPECULATORS:
        reading = read_speculators(reader, block_layout)
    else:
        reading = read_dflash_family(reader, dialect, block_layout)
    _settle_depth(reading, num_target_layers, source)
    return dataclasses.replace(
        reading,
        interleaved_rotary=_has_interleaved_rotary(reader, reading),
        origins=reader.origins,
        unread=reader.unread(),
        warnings=reader.warnings,
    )


def _has_interleaved_rotary(reader: ConfigReader, reading: Reading) -> bool:
    """Whether queries and keys are stored for rotary pairs (2i, 2i + 1): a key of LiquidAI's."""
    key = "rope_is_neox_style"
    places = (key, f"dflash_config.{key}", f"transformer_layer_config.{key}")
    is_interleaved = reader.flag("interleaved_rotary", *places) is False
    kind = reading.config.backbone_config.model_type
    if is_interleaved and kind != "qwen3":
        raise ValueError(
            f"{reader.source}: config.json says {key} = False, and interleaved rotary pairs are "
            f"read of Qwen3 draft layers only, not of {kind} ones. Ask the author for a file with "
            "the halves side by side."
        )
    return is_interleaved


def refuse_stated(source: str, dialect: str, *told: Any) -> None:
    """Raise `ValueError` where a caller gives facts that the layout states by itself."""
    if any(value is not None for value in told):
        raise ValueError(
            f"{source} is in the {dialect} layout, which states its facts; block_layout and "
            "num_target_layers are for published layouts that leave them out."
        )


def _settle_depth(reading: Reading, told: int | None, source: str) -> None:
    """Take the target's depth from the caller where the layout does not record it."""
    stated = reading.config.num_target_layers
    if told is None or told == stated:
        return
    if stated is not None:
        raise ValueError(
            f"{source}: num_target_layers={told} was given, and config.json says {stated}. Leave "
            "it out; it is for layouts that do not record the target's depth."
        )
    reading.config.num_target_layers = told
    reading.config.validate_drafter()
