"""`DrafterConfig`: the trained facts that every kind of drafter has."""

import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig

# Rotary types that are no drafter's: keys that were rotated once would go wrong.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
BACKBONES = ("qwen3", "gemma4_text", "deepseek_v4")
# Far above any drafter's (published ones have 3 to 16); a block is run whole in every round.
_MOST_DRAFT_TOKENS = 1024


class DrafterConfig(PreTrainedConfig):
    """
    What [`DSparkConfig`] and [`Eagle3Config`] share; the arguments are described there.

    Subclasses set their own fields before they call this constructor, which checks all of them.
    """

    sub_configs: ClassVar[dict[str, type]] = {"backbone_config": PreTrainedConfig}
    # Host classes that the draft layers can be built from.
    backbones: ClassVar[tuple[str, ...]] = BACKBONES
    # Facts without a default, in the order in which a missing one is reported.
    required_facts: ClassVar[tuple[str, ...]] = (
        "block_size",
        "target_layer_ids",
        "target_hidden_size",
        "vocab_size",
    )

    # Facts that are true or false.
    flags: ClassVar[tuple[str, ...]] = ("stores_input_embeddings", "stores_output_embeddings")

    def __init__(
        self,
        backbone_config: PreTrainedConfig | dict[str, Any] | None = None,
        block_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        target_hidden_size: int | None = None,
        vocab_size: int | None = None,
        draft_vocab_size: int | None = None,
        final_logit_softcapping: float | None = None,
        stores_input_embeddings: bool = True,
        stores_output_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ):
        if backbone_config is None and "hidden_size" in kwargs:
            raise ValueError(
                f"This config describes a drafter with model_type {self.model_type!r} in another "
                "library's layout: hidden_size stands where backbone_config should. Load it with "
                "dspark_hf.DSparkDrafter.from_pretrained, which reads it or says what it is."
            )
        if isinstance(backbone_config, dict):
            backbone_config = _backbone_from_dict(backbone_config, self.backbones)
        # Typed as present: `validate_drafter` refuses a drafter that lacks one of them.
        self.backbone_config: Any = backbone_config
        self.block_size: Any = block_size
        self.target_layer_ids: Any = target_layer_ids
        self.num_target_layers: Any = num_target_layers
        self.target_hidden_size: Any = target_hidden_size
        self.vocab_size: Any = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.final_logit_softcapping = final_logit_softcapping
        self.stores_input_embeddings = stores_input_embeddings
        self.stores_output_embeddings = stores_output_embeddings
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        # The drafter's embedding and head are the target's; whether the target ties them is its
        # business.
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)
        # The host builds a config without arguments to find defaults; only one that describes a
        # drafter is checked.
        if backbone_config is not None:
            self.validate_drafter()

    @property
    def hidden_size(self) -> int:
        """Width of the draft layers."""
        return self.backbone_config.hidden_size

    @property
    def num_draftable_tokens(self) -> int:
        """V_d: rows of the draft head."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def validate_drafter(self) -> None:
        """
        Check every trained fact. Raises `ValueError` naming the field, what was found and what
        fits.
        """
        for name in self.required_facts:
            if getattr(self, name) is None:
                raise ValueError(
                    f"{type(self).__name__} needs `{name}`, and it is missing. It was fixed when "
                    "the drafter was trained and cannot be guessed: take it from the checkpoint's "
                    "config.json or its author."
                )
        for name in ("block_size", "target_hidden_size", "vocab_size"):
            require_int(name, getattr(self, name), minimum=1)
        if self.block_size > _MOST_DRAFT_TOKENS:
            raise ValueError(
                f"block_size is {self.block_size}; a drafter drafts at most {_MOST_DRAFT_TOKENS} "
                "tokens per round. It must be the number that the drafter was trained with: take "
                "it from its author."
            )
        if self.num_target_layers is not None:
            require_int("num_target_layers", self.num_target_layers, minimum=1)
        if self.backbone_config.model_type not in self.backbones:
            raise ValueError(
                f"backbone_config.model_type is {self.backbone_config.model_type!r}; draft layers "
                f"can be built for {', '.join(map(repr, self.backbones))}."
            )
        for name in self.flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}.")
        self._validate_layer_sizes()
        self._validate_layer_types()
        self._validate_rotary()
        self._validate_draft_vocabulary()
        self._validate_taps()
        cap = self.final_logit_softcapping
        if cap is not None and not is_positive(cap):
            raise ValueError(f"final_logit_softcapping must be positive or None, found {cap!r}.")

    def _validate_layer_sizes(self) -> None:
        names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        if self.backbone_config.model_type in ("qwen3", "llama"):
            # Other classes keep these by layer.
            names += ["num_key_value_heads", "head_dim"]
        for name in names:
            value = getattr(self.backbone_config, name, None)
            if value is not None:
                require_int(f"backbone_config.{name}", value, minimum=1)

    def _validate_layer_types(self) -> None:
        backbone = self.backbone_config
        if backbone.model_type not in ("qwen3", "llama"):
            return
        kinds = set(getattr(backbone, "layer_types", None) or ())
        if not kinds <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"backbone_config.layer_types has {sorted(kinds)}; draft layers are full_attention "
                "or sliding_attention."
            )
        if "sliding_attention" in kinds:
            require_int("backbone_config.sliding_window", backbone.sliding_window, minimum=1)

    def _validate_rotary(self) -> None:
        rope = self.backbone_config.rope_parameters or {}
        # Some classes have a set for each type of layer.
        sets = [rope] if "rope_theta" in rope else rope.values()
        for parameters in (part for part in sets if isinstance(part, dict)):
            theta, kind = parameters.get("rope_theta"), parameters.get("rope_type")
            if theta is not None and not is_positive(theta):
                raise ValueError(
                    f"rope_theta must be a positive number, found {theta!r}. It must be the value "
                    "the drafter was trained with."
                )
            if kind in _LENGTH_DEPENDENT:
                raise ValueError(
                    f"rope_type is {kind!r}, whose frequencies depend on the length of the text; "
                    "a drafter's context is rotated once and stays as it is."
                )

    def _validate_draft_vocabulary(self) -> None:
        if self.draft_vocab_size is None:
            return
        require_int("draft_vocab_size", self.draft_vocab_size, minimum=1)
        if self.draft_vocab_size >= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and vocab_size {self.vocab_size}: a "
                "reduced draft vocabulary is smaller than the target's. Leave it out if every "
                "token can be drafted."
            )

    def _validate_taps(self) -> None:
        ids = self.target_layer_ids
        if not isinstance(ids, list | tuple) or not ids:
            raise ValueError(
                f"target_layer_ids must be a non-empty list of layer numbers, found {ids!r}."
            )
        for layer in ids:
            require_int("target_layer_ids", layer, minimum=-1)
        if list(ids) != sorted(set(ids)):
            raise ValueError(
                f"target_layer_ids must be strictly increasing, found {list(ids)}: the context "
                "projection was trained on one order of the taps."
            )
        if self.num_target_layers is not None and ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids contains {ids[-1]}, but a target of {self.num_target_layers} "
                f"layers has layers 0 to {self.num_target_layers - 1}. If the ids count hidden "
                "states (0 = embedding), subtract 1 from each."
            )


def is_positive(value: Any) -> bool:
    """Whether this is a positive finite number, and not merely something like one."""
    return isinstance(value, int | float) and value is not True and 0 < value < math.inf


def require_int(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, found {value!r}.")


def _backbone_from_dict(backbone: dict[str, Any], known: tuple[str, ...]) -> PreTrainedConfig:
    fields = dict(backbone)
    model_type = fields.pop("model_type", None)
    if model_type not in known:
        raise ValueError(
            f"backbone_config.model_type is {model_type!r}; draft layers can be built for "
            f"{', '.join(map(repr, known))}."
        )
    # Here and not above: importing the host's auto classes registers this module with them.
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)
