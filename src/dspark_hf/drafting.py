"""What passes between a drafter and a decoding loop: the drafting context and the drafted block."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Cache, LogitsProcessorList

from .backbones.context_cache import ContextLayer


@dataclass
class DraftBlock:
    """
    One drafted block. R rows, γ draft tokens, V vocabulary, V_d draft vocabulary, H hidden size.

    Attributes:
        tokens (`torch.Tensor` of shape `(R, γ)`): the draft tokens.
        logits (`torch.Tensor` of shape `(R, γ, V)`):
            Float32 logits that each token was drawn from: Markov bias added, logits processors
            applied. When tokens were sampled, the softmax of these is q. Tokens outside of a
            reduced draft vocabulary have -inf.
        base_logits (`torch.Tensor` of shape `(R, γ, V_d)`):
            logits of the parallel stage, before the Markov bias; of an autoregressive drafter,
            before the logits processors.
        hidden_states (`torch.Tensor` of shape `(R, γ, H)`): backbone output after the final norm.
        confidence_logits (`torch.Tensor` of shape `(R, γ)`, *optional*):
            Logit of the probability that token k survives given that all earlier ones do; `None`
            without a confidence head.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    base_logits: torch.Tensor
    hidden_states: torch.Tensor
    confidence_logits: torch.Tensor | None = None


class DraftContext:
    """
    The drafter's memory of what the target has committed: one key/value cache layer per draft
    layer.

    Attributes:
        lengths (`torch.Tensor` of shape `(R,)`, on the CPU):
            Committed positions per row. The next anchor sits at this position.
        cache (`Cache`): keys and values of the context, per draft layer.
        input_embeddings, output_embeddings (`nn.Module`):
            The embedding and the head that this context drafts with.
        limit (`int`, *optional*):
            Draft tokens of the next block that can be of use, at least 1. A drafter that goes token
            by token drafts no more; one that runs whole blocks takes no notice.
        is_checked (`bool`): whether the first logits drafted from it were found to be numbers.
    """

    def __init__(
        self,
        batch_size: int,
        windows: list[int | None],
        input_embeddings: nn.Module,
        output_embeddings: nn.Module,
        start_position: int | torch.Tensor = 0,
    ):
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device="cpu") + start_position
        self.cache = Cache(layers=[ContextLayer(window) for window in windows])
        self.input_embeddings = input_embeddings
        self.output_embeddings = output_embeddings
        self.limit: int | None = None
        self.is_checked = False

    @property
    def position(self) -> int:
        """The position that the next context row takes, in the first row of the batch."""
        return int(self.lengths[0])

    @property
    def start(self) -> int | torch.Tensor:
        """The position that comes next: one number, or `(R,)` where rows differ."""
        return self.position if bool((self.lengths == self.position).all()) else self.lengths

    def skip(self, num_positions: int | torch.Tensor) -> None:
        """Pass over committed positions, of all rows or `(R,)`, that the drafter will not look
        at."""
        self.lengths = self.lengths + num_positions

    def append(
        self, keys_values: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None = None
    ) -> None:
        """
        Commit rows, given keys and values for each draft layer.

        Args:
            keys_values (`list`): `(R, kv_heads, T, head_dim)` keys and values.
            mask (`torch.Tensor` of shape `(R, T)`, on the CPU, *optional*):
                which of the T entries belong to a row; all by default.
        """
        for layer, (keys, values) in zip(self.cache.layers, keys_values, strict=True):
            layer.append(keys, values, mask)
        added = keys_values[0][0].shape[-2] if mask is None else mask.sum(dim=1)
        self.lengths = self.lengths + added

    def select(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order."""
        self.lengths = self.lengths[rows]
        for layer in self.cache.layers:
            layer.select(rows)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """
    Float32 softmax over the vocabulary.

    The one place where logits become the probabilities that tokens are drawn from and that
    acceptance ratios are made of. Two places would disagree in the last bits, and the output
    distribution with them.
    """
    return torch.softmax(logits.float(), dim=-1)


def sample(probs: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from probabilities `(R, V)`; returns `(R,)`."""
    return torch.multinomial(probs, num_samples=1).squeeze(-1)


class DraftPath:
    """
    The left-to-right half of drafting: scores in, one token per row at a time out.

    Args:
        context ([`DraftContext`]): its first scores are looked at for NaN.
        anchor_ids (`torch.Tensor` of shape `(R,)`): last committed tokens.
        do_sample (`bool`): sample the tokens, or take the argmax.
        logits_processor (`LogitsProcessorList`, *optional*):
            applied at each position along the drafted path, as the target side will.
        input_ids (`torch.Tensor` of shape `(R, length)`, *optional*):
            all committed tokens up to the anchor; what the processors see in front of the path.

    Attributes:
        previous (`torch.Tensor` of shape `(R,)`): the last token of the path, at first the anchor.
        tokens, logits (`list[torch.Tensor]`):
            `(R,)` tokens taken and the `(R, V)` scores that they were taken from.
    """

    def __init__(
        self,
        context: DraftContext,
        anchor_ids: torch.Tensor,
        do_sample: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        input_ids: torch.Tensor | None = None,
    ):
        self.previous = anchor_ids
        self.tokens: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._context = context
        self._do_sample = do_sample
        self._processors = logits_processor or None
        self._text = anchor_ids[:, None] if input_ids is None else input_ids.to(anchor_ids.device)

    def take(self, scores: torch.Tensor) -> torch.Tensor:
        """
        The next token of each row `(R,)`, from scores `(R, V)`.

        Raises:
            `ValueError`: the first scores of a context contain NaN.
        """
        if not self._context.is_checked:
            # Once per context: it waits for the device, and a drafter that is broken is so from the
            # start.
            if bool(torch.isnan(scores).any()):
                raise ValueError(
                    "The drafter's logits contain NaN. Its weights or its dtype do not fit this "
                    "target: load it with the target's dtype, and check the checkpoint with "
                    "`dspark-hf inspect`."
                )
            self._context.is_checked = True
        if self._processors:
            # Processors may write in place.
            scores = self._processors(self._text, scores.clone())
        self.previous = sample(probabilities(scores)) if self._do_sample else scores.argmax(dim=-1)
        if self._processors:
            self._text = torch.cat((self._text, self.previous[:, None]), dim=-1)
        self.tokens.append(self.previous)
        self.logits.append(scores)
        return self.previous
