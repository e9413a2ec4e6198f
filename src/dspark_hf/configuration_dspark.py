"""`DSparkConfig`: everything that was trained into a drafter, checked when it is built."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .configuration_drafter import DrafterConfig, require_int

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
# What DeepSeek-V4 layers are made of beside the sizes that every backbone has.
_DEEPSEEK_V4_SIZES = (
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "hc_mult",
    "hc_sinkhorn_iters",
    "num_local_experts",
    "num_experts_per_tok",
    "sliding_window",
)


class DSparkConfig(DrafterConfig):
    r"""
    Configuration of a [`DSparkDrafter`].

    Trained facts have no default: a wrong guess never fails, it only halves the accepted length.

    Args:
        backbone_config (`PreTrainedConfig` or `dict`):
            Configuration of the draft layers, in the host library's own class (`qwen3`,
            `gemma4_text` or `deepseek_v4`).
        block_size (`int`):
            γ, the number of tokens drafted per round. The drafter always runs at this trained
            width.
        mask_token_id (`int`):
            Token id that fills the block behind the anchor; a row of the embedding matrix.
        target_layer_ids (`list[int]`):
            Taps: target decoder layers whose raw output is read, strictly increasing. -1 is the
            input of the first layer.
        num_target_layers (`int`, *optional*):
            Depth of the target. `None` where a published layout does not record it; the taps are
            then compared with the target's depth when the two meet.
        target_hidden_size (`int`):
            Width of the target's hidden states.
        vocab_size (`int`):
            V, width of the target's logits. Draft tokens are ids of this vocabulary.
        draft_vocab_size (`int`, *optional*):
            V_d, how many of the target's tokens can be drafted; `None` for all of them. With fewer,
            the drafter's `draft_to_target` says which ones.
        anchor_predicts (`bool`, *optional*, defaults to `True`):
            Block layout. `True`: the anchor slot predicts the first draft token and the block has γ
            slots (DSpark and DeepSpec's DFlash). `False`: the anchor slot is context only and the
            block has γ + 1 slots.
        markov_head_type (`str`, *optional*):
            `"vanilla"`, `"gated"` or `"rnn"`; `None` for a drafter without sequential stage
            (DFlash).
        markov_rank (`int`, *optional*, defaults to 0):
            Rank r of the Markov head.
        confidence_head (`bool`, *optional*, defaults to `False`):
            Whether the drafter predicts how likely each draft token is to be accepted.
        confidence_head_with_markov (`bool`, *optional*, defaults to `False`):
            Whether the confidence head also reads the Markov embedding of the previous token.
        confidence_head_bias (`bool`, *optional*, defaults to `True`):
            Whether the confidence head has a bias.
        final_logit_softcapping (`float`, *optional*):
            Cap c of `c · tanh(U / c)`, applied to the base logits before the Markov bias.
        stores_input_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the checkpoint carries its own embedding; otherwise the target's is bound.
        stores_output_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the checkpoint carries its own output head; otherwise the target's is bound.
        causal_layers (`list[int]`, *optional*):
            Draft layers in which a block slot sees earlier slots of its block only. In all others
            the slots see each other in both directions.
        sliding_window_per_slot (`bool`, *optional*, defaults to `False`):
            Where the window w of a sliding draft layer is measured from. `False`: from the anchor,
            so that every slot sees the last w context rows. `True`: from each slot, which sees
            positions closer than w to its own.
        unscaled_input_embeddings (`bool`, *optional*, defaults to `False`):
            Whether the block is embedded with the plain rows of a bound embedding, also where the
            target's own module scales what it looks up.
        bos_token_id, eos_token_id, pad_token_id (*optional*):
            The target's special tokens when the drafter was trained; compared, never used.
    """

    model_type = "dspark"
    required_facts: ClassVar[tuple[str, ...]] = ("mask_token_id", *DrafterConfig.required_facts)
    flags: ClassVar[tuple[str, ...]] = (
        *DrafterConfig.flags,
        "anchor_predicts",
        "confidence_head",
        "confidence_head_with_markov",
        "confidence_head_bias",
        "sliding_window_per_slot",
        "unscaled_input_embeddings",
    )

    def __init__(
        self,
        backbone_config: PreTrainedConfig | dict[str, Any] | None = None,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        target_hidden_size: int | None = None,
        vocab_size: int | None = None,
        draft_vocab_size: int | None = None,
        anchor_predicts: bool = True,
        markov_head_type: str | None = None,
        markov_rank: int = 0,
        confidence_head: bool = False,
        confidence_head_with_markov: bool = False,
        confidence_head_bias: bool = True,
        final_logit_softcapping: float | None = None,
        stores_input_embeddings: bool = True,
        stores_output_embeddings: bool = True,
        causal_layers: list[int] | None = None,
        sliding_window_per_slot: bool = False,
        unscaled_input_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ):
        self.mask_token_id: Any = mask_token_id
        self.anchor_predicts = anchor_predicts
        self.markov_head_type = markov_head_type
        self.markov_rank = markov_rank
        self.confidence_head = confidence_head
        self.confidence_head_with_markov = confidence_head_with_markov
        self.confidence_head_bias = confidence_head_bias
        self.causal_layers = list(causal_layers or [])
        self.sliding_window_per_slot = sliding_window_per_slot
        self.unscaled_input_embeddings = unscaled_input_embeddings
        super().__init__(
            backbone_config=backbone_config,
            block_size=block_size,
            target_layer_ids=target_layer_ids,
            num_target_layers=num_target_layers,
            target_hidden_size=target_hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            final_logit_softcapping=final_logit_softcapping,
            stores_input_embeddings=stores_input_embeddings,
            stores_output_embeddings=stores_output_embeddings,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            **kwargs,
        )

    @property
    def block_width(self) -> int:
        """
        W, the number of block slots the backbone runs: γ, or γ + 1 if the anchor slot does not
        predict.
        """
        return self.block_size if self.anchor_predicts else self.block_size + 1

    @property
    def needs_block_mask(self) -> bool:
        """Whether some draft layer hides part of its keys from some slots of the block."""
        types = getattr(self.backbone_config, "layer_types", None) or ()
        slides = "sliding_attention" in types
        return bool(self.causal_layers) or (self.sliding_window_per_slot and slides)

    def validate_drafter(self) -> None:
        """
        Check every trained fact. Raises `ValueError` naming the field, what was found and what
        fits.
        """
        super().validate_drafter()
        require_int("mask_token_id", self.mask_token_id, minimum=0)
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, but the embedding has {self.vocab_size} "
                f"rows (0 to {self.vocab_size - 1}). Check config.json: the two must come from "
                "the same training."
            )
        if self.backbone_config.model_type == "deepseek_v4":
            self._validate_deepseek_v4()
        self._validate_heads()
        self._validate_attention()

    def _validate_deepseek_v4(self) -> None:
        backbone = self.backbone_config
        for name in _DEEPSEEK_V4_SIZES:
            require_int(f"backbone_config.{name}", getattr(backbone, name), minimum=1)
        chosen, experts = backbone.num_experts_per_tok, backbone.num_local_experts
        if chosen > experts:
            raise ValueError(
                f"backbone_config.num_experts_per_tok is {chosen}, and the layers have {experts} "
                "routed experts to choose from. The two must come from the same training."
            )
        for name, expected in (("layer_types", "sliding_attention"), ("mlp_layer_types", "moe")):
            found = set(getattr(backbone, name))
            if found != {expected}:
                raise ValueError(
                    f"backbone_config.{name} has {sorted(found)}; DeepSeek-V4 draft layers are all "
                    f"{expected!r}. The list was copied from the target."
                )

    def _validate_heads(self) -> None:
        require_int("markov_rank", self.markov_rank, minimum=0)
        if self.markov_head_type is not None and self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"markov_head_type is {self.markov_head_type!r}; known types are "
                f"{', '.join(map(repr, MARKOV_HEAD_TYPES))}, or None for a drafter without Markov "
                "head."
            )
        if (self.markov_head_type is None) != (self.markov_rank == 0):
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r} and markov_rank={self.markov_rank} "
                "contradict each other: a Markov head needs both, a drafter without one has None "
                "and 0."
            )
        if self.confidence_head_with_markov and not (
            self.confidence_head and self.markov_head_type
        ):
            raise ValueError(
                "confidence_head_with_markov is set, but the drafter has "
                f"confidence_head={self.confidence_head} and "
                f"markov_head_type={self.markov_head_type!r}: that input exists only when both "
                "heads do."
            )

    def _validate_attention(self) -> None:
        layers = self.backbone_config.num_hidden_layers
        for layer in self.causal_layers:
            require_int("causal_layers", layer, minimum=0)
            if layer >= layers:
                raise ValueError(
                    f"causal_layers contains {layer}, but the drafter has {layers} layers, 0 to "
                    f"{layers - 1}."
                )
