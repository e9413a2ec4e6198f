"""
`DSparkDrafter`: the semi-autoregressive draft model (paper section 2).

Shapes: R rows, T context positions, n taps, H hidden size, W block slots, γ draft tokens, V
vocabulary.
"""

import copy
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .backbones import dense, gemma4, get_backbone
from .configuration_dspark import DSparkConfig
from .drafting import DraftBlock, DraftContext, probabilities, sample
from .heads import ConfidenceHead, build_markov_head
from .loading import checkpoint
from .loading.saving import save_atomically

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# Arguments of the host's `save_pretrained` that speak of the upload and not of the files.
_PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class DSparkPreTrainedModel(PreTrainedModel):
    """What every DSpark model shares with the host's loading and saving."""

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "context_features"
    # What `generate` and pipelines recognise a drafter by.
    is_dspark_drafter = True
    _no_split_modules: ClassVar[list[str]] = [dense.DECODER_LAYER, gemma4.DECODER_LAYER]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        get_backbone(self.config.backbone_config.model_type).initialize_weights(module)


class DSparkDrafter(DSparkPreTrainedModel):
    """
    A draft model for `target.generate(assistant_model=drafter)`.

    A parallel backbone runs the block `[anchor, mask, …]` once over the target's context features,
    a Markov head walks it left to right, and a confidence head says how far each token is likely to
    survive. With neither head it is a DFlash drafter. `drafter.generation_config` holds its own
    defaults for the `dspark_*` fields.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        backbone = config.backbone_config
        # The draft layers read their own config; the host settles the attention kernel on the outer
        # one.
        backbone._attn_implementation = config._attn_implementation
        self.embed_tokens = (
            self.backbone.build_input_embeddings(backbone, config.vocab_size)
            if config.stores_input_embeddings
            else None
        )
        self.lm_head = (
            nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.stores_output_embeddings
            else None
        )
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        for name, module in self.backbone.build_layers(backbone).items():
            self.add_module(name, module)
        for layer in self.layers:
            # Block rows see each other in both directions; the host's kernels read this flag.
            layer.self_attn.is_causal = False
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        # Modules of the target. In a tuple, so that they are not part of this model's parameters.
        self._bound: tuple[nn.Module | None, nn.Module | None] = (None, None)
        self.generation_config = GenerationConfig()
        self.post_init()

    @property
    def backbone(self) -> ModuleType:
        """The family's functions. Looked up each time: a module in an attribute stops deepcopy."""
        return get_backbone(self.config.backbone_config.model_type)

    # -- embedding and head

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens if self.embed_tokens is not None else self._bound[0]

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head if self.lm_head is not None else self._bound[1]

    def bind(
        self,
        target: PreTrainedModel | None = None,
        *,
        input_embeddings: nn.Module | None = None,
        output_embeddings: nn.Module | None = None,
    ) -> "DSparkDrafter":
        """
        Share the embedding and the head of a target, given as a model or as modules.

        `generate` does this by itself, call by call, for a drafter whose checkpoint carries
        neither. A copy that the checkpoint does carry is given up only if it equals the target's
        bit for bit.

        Raises:
            `ValueError`: the drafter's own copy differs from what is to be bound, or that has
            another shape than the drafter was trained with.
        """
        if target is not None:
            input_embeddings = input_embeddings or target.get_input_embeddings()
            output_embeddings = output_embeddings or target.get_output_embeddings()
        shares_input = input_embeddings is not None and self.embed_tokens is not None
        shares_output = output_embeddings is not None and self.lm_head is not None
        if shares_input:
            _check_identical("embedding", self.embed_tokens, input_embeddings)
        if shares_output:
            _check_identical("output head", self.lm_head, output_embeddings)
        self._check_shape("embedding", input_embeddings)
        self._check_shape("output head", output_embeddings)
        # Both are checked before one is given up; the config may be shared with another drafter.
        if shares_input or shares_output:
            self.config = copy.deepcopy(self.config)
        if shares_input:
            self.embed_tokens = None
            self.config.stores_input_embeddings = False
        if shares_output:
            self.lm_head = None
            self.config.stores_output_embeddings = False
        self._bound = (input_embeddings or self._bound[0], output_embeddings or self._bound[1])
        return self

    def _check_shape(self, name: str, module: nn.Module | None) -> None:
        weight = getattr(module, "weight", None)
        expected = (self.config.vocab_size, self.config.hidden_size)
        # A quantised weight has a shape of its own.
        if weight is None or not weight.is_floating_point() or tuple(weight.shape) == expected:
            return
        rows, width = weight.shape
        # Some targets keep spare rows in their embedding; logits have none.
        if name == "embedding" and rows > expected[0] and width == expected[1]:
            return
        raise ValueError(
            f"The {name} to be bound has shape {tuple(weight.shape)}; this drafter needs "
            f"{expected}. It was made for another target."
        )

    def set_input_embeddings(self, value: nn.Module) -> NoReturn:
        """The embedding is a trained fact. Raises `TypeError`."""
        raise TypeError(
            "A drafter's embedding is not replaced; use drafter.bind(...) to share one."
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> NoReturn:
        """The output head is a trained fact. Raises `TypeError`."""
        raise TypeError("A drafter's head is not replaced; use drafter.bind(...) to share one.")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """The vocabulary is a trained fact of every head. Raises `TypeError`."""
        raise TypeError(
            "A drafter's vocabulary cannot be resized: its heads were trained for its target's. "
            "Train a drafter for the resized target."
        )

    # -- drafting

    def new_context(
        self,
        batch_size: int,
        start_position: int | torch.Tensor = 0,
        target: PreTrainedModel | None = None,
    ) -> DraftContext:
        """
        An empty drafting state.

        Args:
            batch_size (`int`): R.
            start_position (`int` or `torch.Tensor` of shape `(R,)`, *optional*, defaults to 0):
                Position of the first row that will be added; what lies before stays unknown to the
                drafter.
            target (`PreTrainedModel`, *optional*):
                Where to take the embedding and the head from, for this context, if the drafter has
                none.
        """
        embeddings, head = self.get_input_embeddings(), self.get_output_embeddings()
        if target is not None:
            embeddings = embeddings if embeddings is not None else target.get_input_embeddings()
            head = head if head is not None else target.get_output_embeddings()
        for name, module in (("an embedding", embeddings), ("an output head", head)):
            if module is None:
                raise ValueError(
                    f"This drafter's checkpoint carries no copy of {name} of its target. Call "
                    "drafter.bind(target) first, or pass it to "
                    "target.generate(assistant_model=drafter)."
                )
        windows = [getattr(layer.self_attn, "sliding_window", None) for layer in self.layers]
        return DraftContext(batch_size, windows, embeddings, head, start_position)

    @torch.no_grad()
    def extend(
        self, context: DraftContext, features: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """
        Add the next T committed positions of every row to the context.

        Args:
            context ([`DraftContext`]): changed in place.
            features (`torch.Tensor` of shape `(R, T, n·H_target)`):
                Tap outputs of those positions, concatenated in the order of
                `config.target_layer_ids`.
            mask (`torch.Tensor` of shape `(R, T)`, *optional*):
                Which entries are committed positions of their row, where rows commit different
                numbers of them or are padded. All by default.
        """
        rows, width = len(context.lengths), self.fc.in_features
        if features.dim() != 3 or features.shape[0] != rows or features.shape[2] != width:
            raise ValueError(
                f"features have shape {tuple(features.shape)}; this context needs ({rows}, T, "
                f"{width}): {len(self.config.target_layer_ids)} taps of width "
                f"{self.config.target_hidden_size}."
            )
        if mask is not None:
            mask = mask.to("cpu", torch.bool)
            if mask.shape != features.shape[:2]:
                raise ValueError(
                    f"mask has shape {tuple(mask.shape)} and features {tuple(features.shape)}; the "
                    "mask says of each row and position whether it counts, (R, T)."
                )
            mask = None if bool(mask.all()) else mask
        if features.shape[1] == 0:
            return
        features = features.to(self.device, self.dtype)
        projected = self.hidden_norm(self.fc(features))
        if mask is None:
            rotary = self._rotary(projected, context.start, features.shape[1])
        else:
            # Each entry counts the ones of its row before it; what is no position gets any.
            positions = context.lengths[:, None] + (mask.cumsum(dim=1) - 1).clamp(min=0)
            rotary = self.backbone.position_embeddings(
                self.rotary_emb, projected, positions.to(projected.device)
            )
        context.append(
            [self.backbone.context_key_values(layer, projected, rotary) for layer in self.layers],
            mask,
        )

    @torch.no_grad()
    def draft(
        self,
        context: DraftContext,
        anchor_ids: torch.Tensor,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> DraftBlock:
        """
        Draft one block behind the anchor. The context is read, not changed.

        Args:
            context ([`DraftContext`]): every committed position before the anchor.
            anchor_ids (`torch.Tensor` of shape `(R,)`):
                last committed tokens, at position `context.lengths`.
            do_sample (`bool`, *optional*, defaults to `False`):
                sample the tokens, or take the argmax.
            logits_processor (`LogitsProcessorList`, *optional*):
                Applied at each position along the drafted path, as the target side will.
            input_ids (`torch.Tensor` of shape `(R, length)`, *optional*):
                All committed tokens up to the anchor; what the processors see in front of the
                drafted path.
        """
        hidden = self._run_block(context, anchor_ids.to(self.device))
        base_logits = self._base_logits(context, hidden)
        path = anchor_ids[:, None] if input_ids is None else input_ids
        path = path.to(self.device)
        previous, state = anchor_ids.to(self.device), None
        tokens, logits, embedded = [], [], []
        for k in range(self.config.block_size):
            scores = base_logits[:, k]
            if self.markov_head is not None:
                embedded.append(self.markov_head.embed(previous))
                bias, state = self.markov_head.step(previous, hidden[:, k], state)
                scores = scores + bias.float()
            if not context.is_checked:
                _refuse_nan(scores, base_logits)
                context.is_checked = True
            if logits_processor:
                # Processors may write in place.
                scores = logits_processor(path, scores.clone())
            previous = sample(probabilities(scores)) if do_sample else scores.argmax(dim=-1)
            path = torch.cat((path, previous[:, None]), dim=-1) if logits_processor else path
            tokens.append(previous)
            logits.append(scores)
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence_head(
                hidden, torch.stack(embedded, dim=1) if embedded else None
            )
        return DraftBlock(
            torch.stack(tokens, dim=1), torch.stack(logits, dim=1), base_logits, hidden, confidence
        )

    def forward(
        self, context_features: torch.Tensor, anchor_ids: torch.Tensor, **kwargs: Any
    ) -> DraftBlock:
        """
        Draft one block from scratch: features `(R, T, n·H_target)` of all T positions before the
        anchor.
        """
        context = self.new_context(batch_size=anchor_ids.shape[0])
        self.extend(context, context_features)
        return self.draft(context, anchor_ids, **kwargs)

    def _run_block(self, context: DraftContext, anchor_ids: torch.Tensor) -> torch.Tensor:
        """Backbone over `[anchor, mask, …]`: hidden states `(R, γ, H)` of the predicting slots."""
        block = anchor_ids.new_full(
            (anchor_ids.shape[0], self.config.block_width), self.config.mask_token_id
        )
        block[:, 0] = anchor_ids
        block = block.to(_device_of(context.input_embeddings, block.device))
        hidden = self.backbone.embed(context.input_embeddings, block, self.config.backbone_config)
        hidden = hidden.to(self.device, self.dtype)
        rotary = self._rotary(hidden, context.start, block.shape[1])
        for layer, held in zip(self.layers, context.cache.layers, strict=True):
            mask = self._row_mask(held.visible(block.shape[1]), hidden)
            hidden = self.backbone.run_layer(layer, hidden, rotary, context.cache, mask)
        hidden = self.norm(hidden)
        return hidden if self.config.anchor_predicts else hidden[:, 1:]

    def _row_mask(self, visible: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | None:
        """
        Visibility `(R, keys)` of contexts of different lengths as the attention kernel wants it:
        additive `(R, 1, W, keys)`, or as it is for FlashAttention, which takes out what is padding.
        """
        if visible is None:
            return None
        if "flash" in (self.config._attn_implementation or ""):
            return visible.to(hidden.device)
        mask = torch.zeros(visible.shape, dtype=hidden.dtype)
        mask.masked_fill_(~visible, torch.finfo(hidden.dtype).min)
        return mask.to(hidden.device)[:, None, None].expand(-1, 1, hidden.shape[1], -1)

    def _base_logits(self, context: DraftContext, hidden: torch.Tensor) -> torch.Tensor:
        head = context.output_embeddings
        weight = getattr(head, "weight", hidden)
        # A bound head may live in another dtype or on another device; a quantised one takes what it
        # is given.
        dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
        logits = head(hidden.to(_device_of(head, hidden.device), dtype)).to(self.device)
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits.float()

    def _rotary(
        self, x: torch.Tensor, start: int | torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `length` positions from `start` on: one number, or one for each row `(R,)`."""
        start = start if isinstance(start, int) else start.to(x.device)[:, None]
        position_ids = torch.atleast_2d(torch.arange(length, device=x.device) + start)
        return self.backbone.position_embeddings(self.rotary_emb, x, position_ids)

    # -- generate

    def custom_generate(self, streamer: "BaseStreamer | None" = None) -> Callable:
        """
        The decoding loop as a callable for the host's official extension point:
        `target.generate(**inputs, custom_generate=drafter.custom_generate())`.

        Args:
            streamer (`BaseStreamer`, *optional*):
                The host does not hand its `streamer` argument to a callable, so it is given here.
        """
        from .generation.decoding import make_custom_generate

        return make_custom_generate(self, streamer)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        A drafter proposes tokens for a target; it does not generate by itself. Raises `TypeError`.
        """
        raise TypeError(
            "A DSpark drafter does not generate on its own. Load its target and call "
            "target.generate(..., assistant_model=drafter)."
        )

    # -- loading and saving

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> Any:
        """
        Load a drafter from a Hub id or a folder, in this library's layout or a published one.

        Takes the host's arguments (`revision`, `token`, `cache_dir`, `local_files_only`,
        `subfolder`, `dtype`, `device_map`, …). Only safetensors are read and no code of a
        repository is run.

        Raises:
            `ValueError`: unknown or contradictory layout, missing config keys, missing, unexpected,
            misshapen or truncated tensors; each names what was found and what to do.
            `OSError`: the repository, a file of it or the cache cannot be reached.
        """
        return checkpoint.load_drafter(
            cls, super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs
        )

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """
        Write config, generation config and safetensors in this library's layout.

        Files appear in `save_directory` only once all of them are complete, so a full disk leaves
        nothing half-written.
        """
        hub = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        with save_atomically(save_directory) as temporary:
            super().save_pretrained(temporary, **kwargs)
            self.generation_config.save_pretrained(temporary)
        if push_to_hub:
            hub.setdefault("repo_id", os.path.basename(os.path.abspath(save_directory)))
            self.push_to_hub(**hub)


def _refuse_nan(*logits: torch.Tensor) -> None:
    # Once per context: it waits for the device, and a drafter that is broken is so from the start.
    if any(bool(torch.isnan(part).any()) for part in logits):
        raise ValueError(
            "The drafter's logits contain NaN. Its weights or its dtype do not fit this target: "
            "load it with the target's dtype, and check the checkpoint with `dspark-hf inspect`."
        )


def _device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module's weight lives; offloaded weights (meta) are fetched by their own hooks."""
    weight = getattr(module, "weight", None)
    return default if weight is None or weight.device.type == "meta" else weight.device


def _check_identical(name: str, own: nn.Module, other: nn.Module) -> None:
    own_weight, other_weight = own.weight, getattr(other, "weight", None)
    if (
        other_weight is None
        or own_weight.shape != other_weight.shape
        or own_weight.dtype != other_weight.dtype
    ):
        found = (
            "no plain weight"
            if other_weight is None
            else f"{tuple(other_weight.shape)} {other_weight.dtype}"
        )
        raise ValueError(
            f"The drafter carries its own {name} ({tuple(own_weight.shape)} {own_weight.dtype}) "
            f"and the target's is another ({found}). Do not bind it: the drafter was trained with "
            "its own copy and uses it."
        )
    if not torch.equal(own_weight, other_weight.to(own_weight.device)):
        raise ValueError(
            f"The drafter carries its own {name}, and the target's has other values. Do not bind "
            "it: the drafter was trained with its own copy and uses it."
        )
