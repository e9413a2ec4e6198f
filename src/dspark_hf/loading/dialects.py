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
    "intermediate_size",
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
            Depth of the target, for EAGLE-3 files that leave their taps to a rule over it.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    reader = ConfigReader(raw, source, tensors)
    if dialect in OWN_LAYOUTS:
        if block_layout is not None:
            raise ValueError(
                f"{source} is in this library's own layout, which says how its blocks are laid "
                "out; block_layout is for published layouts that do not."
            )
        reader.require("backbone_config", "backbone_config")
        for key in _OWN_LAYER_FACTS:
            reader.require(key, f"backbone_config.{key}")
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
        reading = read_speculators_eagle3(reader, block_layout)
    elif dialect == SPECULATORS:
        reading = read_speculators(reader, block_layout)
    else:
        reading = read_dflash_family(reader, dialect, block_layout)
    return dataclasses.replace(
        reading, origins=reader.origins, unread=reader.unread(), warnings=reader.warnings
    )
