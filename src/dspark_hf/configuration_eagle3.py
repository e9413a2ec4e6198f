"""`Eagle3Config`: everything that was trained into an Eagle3 drafter, checked when it is built."""

from typing import Any

from transformers import PreTrainedConfig

from .configuration_drafter import DrafterConfig


class Eagle3Config(DrafterConfig):
    r"""
    Configuration of an [`Eagle3Drafter`].

    Trained facts have no default: a wrong guess never fails, it only halves the accepted length.

    Args:
        backbone_config (`PreTrainedConfig` or `dict`):
            Configuration of the one draft layer, in the host library's own class (`qwen3`,
            `gemma4_text` or `llama`). The layer attends to all positions.
        block_size (`int`):
            γ, the number of tokens drafted per round: the length that training unrolled
            (`ttt_length`).
        target_layer_ids (`list[int]`):
            Taps: target decoder layers whose raw output is read, strictly increasing. -1 is the
            input of the first layer.
        num_target_layers (`int`, *optional*):
            Depth of the target. `None` where a published layout does not record it.
        target_hidden_size (`int`):
            Width of the target's hidden states.
        vocab_size (`int`):
            V, width of the target's logits. Draft tokens are ids of this vocabulary.
        draft_vocab_size (`int`, *optional*):
            V_d, how many of the target's tokens can be drafted; `None` for all of them. With fewer,
            the drafter's `draft_to_target` says which ones.
        final_logit_softcapping (`float`, *optional*):
            Cap c of `c · tanh(U / c)`, applied to the logits.
        stores_input_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the checkpoint carries its own embedding; otherwise the target's is bound.
        stores_output_embeddings (`bool`, *optional*, defaults to `True`):
            Whether the checkpoint carries its own output head; otherwise the target's is bound.
        feature_norm (`str`, *optional*):
            Norm in front of the context projection: `"joint"` over all taps side by side,
            `"per_tap"` over each of them, `None` for none.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the residual stream starts from the normed hidden state.
        recycles_normed_output (`bool`, *optional*, defaults to `False`):
            Whether the row behind a drafted token takes the layer's output after the final norm,
            and not before it.
        bos_token_id, eos_token_id, pad_token_id (*optional*):
            The target's special tokens when the drafter was trained; compared, never used.
    """

    model_type = "dspark_eagle3"
    # Drafts one token after the other, so no slot of a block waits for its token.
    mask_token_id = None
    backbones = (*DrafterConfig.backbones, "llama")
    flags = (*DrafterConfig.flags, "norm_before_residual", "recycles_normed_output")

    # The host makes a constructor of its own for config classes that define none.
    def __init__(
        self,
        backbone_config: PreTrainedConfig | dict[str, Any] | None = None,
        feature_norm: str | None = None,
        norm_before_residual: bool = False,
        recycles_normed_output: bool = False,
        **kwargs: Any,
    ):
        self.feature_norm = feature_norm
        self.norm_before_residual = norm_before_residual
        self.recycles_normed_output = recycles_normed_output
        super().__init__(backbone_config, **kwargs)

    def validate_drafter(self) -> None:
        """
        Check every trained fact. Raises `ValueError` naming the field, what was found and what
        fits.
        """
        super().validate_drafter()
        if self.backbone_config.model_type == "deepseek_v4":
            raise ValueError(
                "backbone_config.model_type is 'deepseek_v4'; Eagle3 layers are built for 'qwen3' "
                "and 'gemma4_text'. Drafters of DeepSeek-V4 are DSpark drafters (DSparkConfig)."
            )
        self._validate_layer()
        if self.feature_norm not in (None, "joint", "per_tap"):
            raise ValueError(
                f"feature_norm is {self.feature_norm!r}; it can be 'joint', 'per_tap' or None."
            )

    def _validate_layer(self) -> None:
        depth = self.backbone_config.num_hidden_layers
        if depth != 1:
            raise ValueError(
                f"backbone_config.num_hidden_layers is {depth}; an Eagle3 drafter has 1 layer: its "
                "context is one row of keys and values per position, which deeper layers would "
                "have to recompute."
            )
        layer_types = getattr(self.backbone_config, "layer_types", None) or ["full_attention"]
        if layer_types[0] != "full_attention":
            raise ValueError(
                f"backbone_config.layer_types is {layer_types}; the layer of an Eagle3 drafter "
                "attends to all positions (full_attention)."
            )
