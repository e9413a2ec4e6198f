"""
`DrafterModel`: what every kind of drafter has, whatever stands between its context and its logits.

Shapes: R rows, T context positions, n taps, H hidden size, V vocabulary, V_d draft vocabulary.
"""

import copy
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from .backbones import deepseek_v4, dense, eagle3, gemma4, get_backbone
from .configuration_drafter import DrafterConfig
from .drafting import DraftContext
from .loading import checkpoint
from .loading.saving import save_atomically

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# Arguments of the host's `save_pretrained` that speak of the upload and not of the files.
_PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class DrafterModel(PreTrainedModel):
    """
    Base of [`DSparkDrafter`] and [`Eagle3Drafter`]: embedding and head (own or the target's),
    context projection, loading and saving.
    """

    config: DrafterConfig
    base_model_prefix = ""
    main_input_name = "context_features"
    # What `generate` and pipelines recognise a drafter by.
    is_dspark_drafter = True
    # Whether it drafts token by token: context rows are then paired with the tokens that follow
    # them, and a block may be cut short.
    is_autoregressive = False
    _no_split_modules: ClassVar[list[str]] = [
        dense.DECODER_LAYER,
        gemma4.DECODER_LAYER,
        deepseek_v4.DECODER_LAYER,
        *eagle3.DECODER_LAYERS,
    ]
    # Membership list of a reduced vocabulary in published layouts, where the map says the same, and
    # the map of a full one, which moves nothing.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = ["^t2d$", "^d2t$"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DrafterConfig):
        family = get_backbone(config.backbone_config.model_type)
        if family.EAGER_ONLY:
            # Before the host chooses a kernel.
            self._supports_sdpa = self._supports_flash_attn = False
        super().__init__(config)
        self._keep_in_fp32_modules_strict = set(family.FLOAT32_MODULES)
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
            nn.Linear(config.hidden_size, config.num_draftable_tokens, bias=False)
            if config.stores_output_embeddings
            else None
        )
        if config.draft_vocab_size is not None:
            # Target ids (V_d,) of the rows of the head.
            self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size))
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        # Modules of the target. In a tuple, so that they are not part of this model's parameters.
        self._bound: tuple[nn.Module | None, nn.Module | None] = (None, None)
        self.generation_config = GenerationConfig()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = getattr(self.config, "initializer_range", 0.02)
        self.backbone.initialize_weights(module, std)

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
    ) -> Self:
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

    # -- parts of drafting

    def _embedding_and_head(self, target: PreTrainedModel | None) -> tuple[nn.Module, nn.Module]:
        """What a context drafts with: own modules, bound ones, or those of `target`."""
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
        if self.lm_head is None and self.config.draft_vocab_size is not None:
            head = _head_rows(head, self.draft_to_target)
        return embeddings, head

    def _project(self, context: DraftContext, features: torch.Tensor) -> torch.Tensor:
        """Context features `(R, T, n·H_target)` projected to `(R, T, H)`."""
        rows, width = len(context.lengths), self.fc.in_features
        if features.dim() != 3 or features.shape[0] != rows or features.shape[2] != width:
            raise ValueError(
                f"features have shape {tuple(features.shape)}; this context needs ({rows}, T, "
                f"{width}): {len(self.config.target_layer_ids)} taps of width "
                f"{self.config.target_hidden_size}."
            )
        return self.fc(self._norm_features(features.to(self.device, self.dtype)))

    def _norm_features(self, features: torch.Tensor) -> torch.Tensor:
        """What stands between the taps and their projection; nothing, unless a kind has a norm."""
        return features

    def _embed(self, embeddings: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `(R, T, H)` as the draft layers take them, of token ids `(R, T)`."""
        token_ids = token_ids.to(_device_of(embeddings, token_ids.device))
        embedded = self.backbone.embed(embeddings, token_ids, self.config.backbone_config)
        return embedded.to(self.device, self.dtype)

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

    def _in_target_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Draft logits `(R, V_d)` as `(R, V)`; tokens that are never drafted have -inf."""
        if self.config.draft_vocab_size is None:
            return scores
        full = scores.new_full((scores.shape[0], self.config.vocab_size), -torch.inf)
        full[:, self.draft_to_target] = scores
        return full

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
    ) -> Self:
        """
        Load a drafter from a Hub id or a folder, in this library's layout or a published one.

        Takes the host's arguments (`revision`, `token`, `cache_dir`, `local_files_only`,
        `subfolder`, `dtype`, `device_map`, …) and two for published layouts that leave a fact out:
        `block_layout` (`"anchor_first"` or `"infill"`), which overrides what the checkpoint says,
        and `num_target_layers`, from which some EAGLE-3 files take their taps. Only safetensors are
        read and no code of a repository is run.

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


def _device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module's weight lives; offloaded weights (meta) are fetched by their own hooks."""
    weight = getattr(module, "weight", None)
    return default if weight is None or weight.device.type == "meta" else weight.device


def _head_rows(head: nn.Module, token_ids: torch.Tensor) -> nn.Module:
    """The output head of a target, cut down to the tokens that can be drafted."""
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"The drafter drafts {len(token_ids)} of the target's tokens with the target's own "
            f"head, and this head ({type(head).__name__}) has no plain weight without bias to take "
            "the rows from. Load the target with an unquantised head."
        )
    rows = nn.Linear(weight.shape[1], len(token_ids), bias=False, device="meta")
    rows.weight = nn.Parameter(weight[token_ids.to(weight.device)], requires_grad=False)
    return rows


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
