"""Eagle3 checkpoints in our normal form: this library's layout and DeepSpec's."""

from collections.abc import Collection
from typing import Any

from ..configuration_eagle3 import Eagle3Config
from .dialects import EAGLE3, deepspec_backbone, deepspec_eagle3_backbone, require_keys

_REQUIRED_DRAFTER_KEYS = ("ttt_length", "target_layer_ids", "num_target_layers", "vocab_size")


def normalise_eagle3(
    raw: dict[str, Any], dialect: str, source: str, tensor_names: Collection[str]
) -> Eagle3Config:
    """
    The checkpoint's facts as an [`Eagle3Config`].

    Embedding and head are decided by the presence of their tensors.

    Raises:
        `ValueError`: a required key is missing, or keys contradict each other.
    """
    if dialect == EAGLE3:
        require_keys(raw, ("backbone_config",), source)
        return Eagle3Config.from_dict(raw)
    require_keys(raw, _REQUIRED_DRAFTER_KEYS, source)
    size = raw.get("draft_vocab_size")
    if size not in (None, raw["vocab_size"]):
        raise ValueError(
            f"{source}: DeepSpec Eagle3 drafters draft every token of their target, but "
            f"draft_vocab_size is {size} and vocab_size {raw['vocab_size']}. The config.json was "
            "edited or belongs to another checkpoint."
        )
    backbone: Any = deepspec_eagle3_backbone(raw)
    return Eagle3Config(
        backbone_config=deepspec_backbone(raw, backbone, source),
        block_size=raw["ttt_length"],
        target_layer_ids=raw["target_layer_ids"],
        num_target_layers=raw["num_target_layers"],
        target_hidden_size=raw["hidden_size"],
        vocab_size=raw["vocab_size"],
        final_logit_softcapping=raw.get("final_logit_softcapping")
        if backbone == "gemma4_text"
        else None,
        stores_input_embeddings="embed_tokens.weight" in tensor_names,
        stores_output_embeddings="lm_head.weight" in tensor_names,
        architectures=["Eagle3Drafter"],
        dtype=raw.get("dtype", raw.get("torch_dtype")),
        **{key: raw.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
