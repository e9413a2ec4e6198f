"""DeepSpec Eagle3 checkpoints in our normal form."""

from ..configuration_eagle3 import Eagle3Config
from .deepspec import common_facts, deepspec_body
from .detection import deepspec_eagle3_backbone
from .reading import ConfigReader, Reading

_TRAINING_KEYS = ("draft_num_hidden_layers", "step_loss_decay", "target_model_name_or_path")


def read_eagle3(reader: ConfigReader, layout: str | None) -> Reading:
    """
    The drafter that a DeepSpec Eagle3 checkpoint describes.

    Embedding and head are decided by the presence of their tensors.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    if layout is not None:
        raise ValueError(
            f"{reader.source} is an Eagle3 drafter, which drafts token by token and has no blocks; "
            "leave block_layout out."
        )
    reader.ignore(*_TRAINING_KEYS)
    block_size = reader.require("block_size", "ttt_length")
    taps = reader.require("target_layer_ids", "target_layer_ids")
    depth = reader.require("num_target_layers", "num_target_layers")
    vocab_size = reader.require("vocab_size", "vocab_size")
    size = reader.get("draft_vocab_size", "draft_vocab_size")
    if size not in (None, vocab_size):
        raise ValueError(
            f"{reader.source}: DeepSpec Eagle3 drafters draft every token of their target, but "
            f"draft_vocab_size is {size} and vocab_size {vocab_size}. The config.json was edited "
            "or belongs to another checkpoint."
        )
    backbone = str(deepspec_eagle3_backbone(reader.raw))
    body = deepspec_body(reader, backbone)
    cap = reader.get("final_logit_softcapping", "final_logit_softcapping")
    config = Eagle3Config(
        backbone_config=body,
        block_size=block_size,
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=body["hidden_size"],
        vocab_size=vocab_size,
        final_logit_softcapping=cap if backbone == "gemma4_text" else None,
        architectures=["Eagle3Drafter"],
        **common_facts(reader),
    )
    return Reading(config)
