"""
`DSparkDrafter`: the semi-autoregressive draft model (paper section 2).

Shapes: R rows, T context positions, n taps, H hidden size, W block slots, γ draft tokens, V
vocabulary, V_d draft vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel

from .backbones.block_mask import additive, block_mask
from .configuration_dspark import DSparkConfig
from .drafting import DraftBlock, DraftContext, DraftPath
from .heads import ConfidenceHead, build_markov_head
from .modeling_drafter import DrafterModel


class DSparkDrafter(DrafterModel):
    """
    A draft model for `target.generate(assistant_model=drafter)`.

    A parallel backbone runs the block `[anchor, mask, …]` once over the target's context features,
    a Markov head walks it left to right, and a confidence head says how far each token is likely to
    survive. With neither head it is a DFlash drafter. `drafter.generation_config` holds its own
    defaults for the `dspark_*` fields.
    """

    config_class = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        if config.needs_block_mask and "flash" in (config._attn_implementation or ""):
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} takes no mask, and this "
                "drafter's layers need one (causal blocks or a window for each slot). Use 'sdpa'."
            )
        for name, module in self.backbone.build_layers(config.backbone_config).items():
            self.add_module(name, module)
        for layer in self.layers:
            # Block rows see each other in both directions; the host's kernels read this flag.
            layer.self_attn.is_causal = False
        self.markov_head = build_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.post_init()

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
        embeddings, head = self._embedding_and_head(target)
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
        if mask is not None:
            mask = mask.to("cpu", torch.bool)
            if mask.shape != features.shape[:2]:
                raise ValueError(
                    f"mask has shape {tuple(mask.shape)} and features {tuple(features.shape)}; the "
                    "mask says of each row and position whether it counts, (R, T)."
                )
            mask = None if bool(mask.all()) else mask
        windows = [layer.window for layer in context.cache.layers]
        if mask is None and all(windows) and features.shape[1] > max(windows):
            # No block to come sees the rows before the window.
            context.skip(features.shape[1] - max(windows))
            features = features[:, -max(windows) :]
        projected = self._project(context, features)
        if features.shape[1] == 0:
            return
        projected = self.hidden_norm(projected)
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
        anchor_ids = anchor_ids.to(self.device)
        hidden, confidence_features = self._run_block(context, anchor_ids)
        hidden, state = self._skip_anchor_slot(hidden, anchor_ids)
        base_logits = self._base_logits(context, hidden)
        path = DraftPath(context, anchor_ids, do_sample, logits_processor, input_ids)
        embedded = []
        for k in range(self.config.block_size):
            scores = base_logits[:, k]
            if self.markov_head is not None:
                embedded.append(self.markov_head.embed(path.previous))
                bias, state = self.markov_head.step(path.previous, hidden[:, k], state)
                scores = scores + bias.float()
            path.take(self._in_target_vocabulary(scores))
        confidence = None
        if self.confidence_head is not None:
            confidence = self.confidence_head(
                confidence_features[:, -self.config.block_size :],
                torch.stack(embedded, dim=1) if embedded else None,
            )
        return DraftBlock(
            tokens=torch.stack(path.tokens, dim=1),
            logits=torch.stack(path.logits, dim=1),
            base_logits=base_logits,
            hidden_states=hidden,
            confidence_logits=confidence,
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

    def _run_block(
        self, context: DraftContext, anchor_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Backbone over `[anchor, mask, …]`: what the output head and what the confidence head read,
        `(R, W, H)` each.
        """
        block = anchor_ids.new_full(
            (anchor_ids.shape[0], self.config.block_width), self.config.mask_token_id
        )
        block[:, 0] = anchor_ids
        hidden = self._embed(context.input_embeddings, block)
        rotary = self._rotary(hidden, context.start, block.shape[1])
        for i, layer in enumerate(self.layers):
            mask = self._block_mask(i, context, hidden)
            hidden = self.backbone.run_layer(layer, hidden, rotary, context.cache, mask)
        return self.backbone.read_out(self, hidden)

    def _skip_anchor_slot(
        self, hidden: torch.Tensor, anchor_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Hidden states `(R, γ, H)` of the predicting slots, and the state that a recurrent Markov
        head has in front of them: in an infill block it has read the anchor's slot.
        """
        if self.config.anchor_predicts:
            return hidden, None
        state = None
        if self.markov_head is not None and self.config.markov_head_type == "rnn":
            _, state = self.markov_head.step(anchor_ids, hidden[:, 0], None)
        return hidden[:, 1:], state

    def _embed(self, embeddings: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        if not (self.config.unscaled_input_embeddings and hasattr(embeddings, "embed_scale")):
            return super()._embed(embeddings, token_ids)
        rows = nn.functional.embedding(token_ids.to(embeddings.weight.device), embeddings.weight)
        return rows.to(self.device, self.dtype)

    def _block_mask(
        self, layer: int, context: DraftContext, hidden: torch.Tensor
    ) -> torch.Tensor | None:
        """What the slots of a block may see in draft layer `layer`; `None` is everything."""
        causal = layer in self.config.causal_layers
        cache, width = context.cache.layers[layer], hidden.shape[1]
        per_slot = self.config.sliding_window_per_slot and cache.window is not None
        if causal or per_slot:
            lengths = cache.lengths
            if lengths is None:
                lengths = torch.tensor([cache.length], device="cpu")
            visible = block_mask(lengths, cache.first, width, cache.window, causal, per_slot)
        else:
            seen = cache.visible(width)
            if seen is None:
                return None
            if "flash" in (self.config._attn_implementation or ""):
                # FlashAttention takes out by itself what is padding.
                return seen.to(hidden.device)
            visible = seen[:, None].expand(-1, width, -1)
        return additive(visible, hidden)
