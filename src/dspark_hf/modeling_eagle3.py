"""
`Eagle3Drafter`: the autoregressive draft model that DSpark is compared with (EAGLE-3, arXiv
2503.01840, in the single-chain form of DeepSpec).

Row i of the drafter pairs the context features of position i with the token at i + 1, sits at
rotary position i and predicts token i + 2. Rows behind the anchor have no features; they take the
output of the row before instead. Since there is one layer, a context row is needed for its keys and
values only, and the single query of the last row sees them all without a mask.

Shapes: R rows of the batch, T context positions, n taps, H hidden size, γ draft tokens, V
vocabulary, V_d draft vocabulary.
"""

from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from .backbones import eagle3
from .backbones.block_mask import additive
from .configuration_eagle3 import Eagle3Config
from .drafting import DraftBlock, DraftContext, DraftPath
from .modeling_drafter import DrafterModel


class Eagle3Context(DraftContext):
    """
    The drafting state of an Eagle3 drafter.

    Attributes:
        last_hidden (`torch.Tensor` of shape `(R, 1, H)`, *optional*):
            Projected features of each row's last committed position. Its row pairs them with the
            anchor and is run by `draft`; all rows before it are in the cache.
        last_ids (`torch.Tensor` of shape `(R, 1)`, *optional*): the token that followed it.
        has_last (`torch.Tensor` of shape `(R, 1)`, on the CPU): rows that hold any position.
    """

    def __init__(self, batch_size: int, *args: Any):
        super().__init__(batch_size, *args)
        self.last_hidden: torch.Tensor | None = None
        self.last_ids: torch.Tensor | None = None
        self.has_last = torch.zeros(batch_size, 1, dtype=torch.bool, device="cpu")

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order."""
        super().select(rows)
        self.has_last = self.has_last[rows]
        if self.last_hidden is not None and self.last_ids is not None:
            self.last_hidden, self.last_ids = self.last_hidden[rows], self.last_ids[rows]


class Eagle3Drafter(DrafterModel):
    """
    An autoregressive draft model for `target.generate(assistant_model=drafter)`.

    One decoder layer over pairs of the target's features and the following tokens, run once per
    draft token. `drafter.generation_config` holds its own defaults for the `dspark_*` fields.
    """

    config_class = Eagle3Config
    config: Eagle3Config
    is_autoregressive = True

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        for name, module in eagle3.build_layers(config).items():
            self.add_module(name, module)
        self.post_init()

    def _norm_features(self, features: torch.Tensor) -> torch.Tensor:
        if self.config.feature_norm == "joint":
            return self.input_norm(features)
        if self.config.feature_norm == "per_tap":
            taps = features.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, taps, strict=True)
            return torch.cat([norm(tap) for norm, tap in pairs], dim=-1)
        return features

    # -- drafting

    def new_context(
        self,
        batch_size: int,
        start_position: int | torch.Tensor = 0,
        target: PreTrainedModel | None = None,
    ) -> Eagle3Context:
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
        return Eagle3Context(batch_size, [None], embeddings, head, start_position)

    @torch.no_grad()
    def extend(
        self,
        context: Eagle3Context,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        """
        Add the next T committed positions of every row to the context.

        Args:
            context ([`Eagle3Context`]): changed in place.
            features (`torch.Tensor` of shape `(R, T, n·H_target)`):
                Tap outputs of those positions, concatenated in the order of
                `config.target_layer_ids`.
            token_ids (`torch.Tensor` of shape `(R, T)`):
                The token that follows each of those positions; the last one is the anchor of the
                next block.
            mask (`torch.Tensor` of shape `(R, T)`, *optional*):
                Which entries are committed positions of their row, where rows commit different
                numbers of them or are padded. All by default.
        """
        hidden = self._project(context, features)
        for name, given in (("token_ids", token_ids), ("mask", mask)):
            if given is not None and given.shape != features.shape[:2]:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)} and features have "
                    f"{tuple(features.shape)}; every row and position needs an entry of it, (R, T)."
                )
        if features.shape[1] == 0:
            return
        new = torch.ones(token_ids.shape, dtype=torch.bool, device="cpu")
        if mask is not None:
            new = mask.cpu().bool()
        start = context.lengths - context.has_last[:, 0].long()
        context.lengths = context.lengths + new.sum(dim=1)
        if context.last_hidden is not None and context.last_ids is not None:
            # The row that was drafted from last time: its token is committed now.
            hidden = torch.cat((context.last_hidden, hidden), dim=1)
            token_ids = torch.cat((context.last_ids.to(token_ids.device), token_ids), dim=1)
            new = torch.cat((context.has_last, new), dim=1)
        # Of each row, all but its last position are complete.
        numbers = torch.arange(1, new.shape[1] + 1, device="cpu")
        last = (new * numbers).argmax(dim=1, keepdim=True)
        context.has_last = new.any(dim=1, keepdim=True)
        at = last.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        context.last_hidden = hidden.gather(1, at)
        context.last_ids = token_ids.gather(1, last.to(token_ids.device))
        positions = start[:, None] + (new.cumsum(dim=1) - 1).clamp(min=0)
        new = new.scatter(1, last, False)
        self._append(context, token_ids, hidden, positions, new)

    def _append(
        self,
        context: Eagle3Context,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Keys and values of those rows `(R, T)` of which the mask says that they are complete."""
        width = int((mask * torch.arange(1, mask.shape[1] + 1, device="cpu")).max())
        if width == 0:
            return
        mask, token_ids, hidden = mask[:, :width], token_ids[:, :width], hidden[:, :width]
        embedded = self._embed(context.input_embeddings, token_ids)
        rotary = self.backbone.position_embeddings(
            self.rotary_emb, embedded, positions[:, :width].to(embedded.device)
        )
        layer = self.layers[0]
        pairs = layer.attention_input(embedded, hidden)
        keys, values = self.backbone.context_key_values(layer, pairs, rotary)
        context.cache.layers[0].append(keys, values, None if bool(mask.all()) else mask)

    @torch.no_grad()
    def draft(
        self,
        context: Eagle3Context,
        anchor_ids: torch.Tensor,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> DraftBlock:
        """
        Draft tokens behind the anchor, one by one: γ of them, or `context.limit` if that is less.
        The context is read, not changed.

        Args:
            context ([`Eagle3Context`]): every committed position before the anchor.
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
        if not bool(context.has_last.all()) or context.last_hidden is None:
            raise ValueError(
                "The context of a row is empty, and an Eagle3 drafter drafts from the features of "
                "the position before the anchor. Call drafter.extend first."
            )
        limit = self.config.block_size if context.limit is None else context.limit
        path = DraftPath(
            context, anchor_ids.to(self.device), do_sample, logits_processor, input_ids
        )
        hidden, base_logits, states = context.last_hidden, [], []
        rows = context.cache.layers[0]
        num_rows, visible = rows.length, rows.visible(0)
        try:
            for k in range(min(limit, self.config.block_size)):
                hidden = self._run_row(context, path.previous, hidden, k, visible)
                # The row stays visible to the ones behind it, until the block is drafted.
                rows.length += 1
                states.append(self.norm(hidden))
                if self.config.recycles_normed_output:
                    hidden = states[-1]
                base_logits.append(self._base_logits(context, states[-1])[:, 0])
                path.take(self._in_target_vocabulary(base_logits[-1]))
        finally:
            rows.length = num_rows
        return DraftBlock(
            tokens=torch.stack(path.tokens, dim=1),
            logits=torch.stack(path.logits, dim=1),
            base_logits=torch.stack(base_logits, dim=1),
            hidden_states=torch.cat(states, dim=1),
        )

    def forward(
        self,
        context_features: torch.Tensor,
        token_ids: torch.Tensor,
        **kwargs: Any,
    ) -> DraftBlock:
        """
        Draft one block from scratch.

        Args:
            context_features (`torch.Tensor` of shape `(R, T, n·H_target)`):
                features of all T positions before the anchor.
            token_ids (`torch.Tensor` of shape `(R, T)`):
                the token that follows each of them; the last one is the anchor.
        """
        context = self.new_context(batch_size=token_ids.shape[0])
        self.extend(context, context_features, token_ids)
        return self.draft(context, token_ids[:, -1], **kwargs)

    def _run_row(
        self,
        context: Eagle3Context,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: int,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Layer output `(R, 1, H)` of the row of one draft step: tokens `(R,)` paired with hidden
        states `(R, 1, H)`. `visible` `(R, keys)` is what rows of different lengths see of the
        context; drafted rows see all drafted rows before them.
        """
        embedded = self._embed(context.input_embeddings, token_ids[:, None])
        rotary = self._rotary(embedded, context.start - 1 + step, 1)
        mask = None
        if visible is not None:
            drafted = torch.ones(len(visible), step + 1, dtype=torch.bool, device="cpu")
            mask = torch.cat((visible, drafted), dim=1)
            # FlashAttention takes out what is padding; the other kernels add a mask.
            is_flash = "flash" in (self.config._attn_implementation or "")
            mask = mask.to(self.device) if is_flash else additive(mask[:, None], embedded)
        return self.layers[0](embedded, hidden, rotary, context.cache, mask)
