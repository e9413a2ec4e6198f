"""
What `generate` returns besides the tokens: scores, logits, hidden states, attentions, one entry a
token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .statistics import Statistics


@dataclass
class DSparkDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    The host's output of decoder-only generation, with what speculation did.

    Args:
        statistics ([`Statistics`]): counts of this call.
    """

    statistics: Statistics | None = None


@dataclass
class OutputRecorder:
    """
    Collects what the generation config asks for, in the shapes that plain decoding returns.

    Attributes:
        scores, logits (`list`): per new token `(R, V)`, processed and raw; `None` if not asked for.
        hidden_states, attentions (`list`):
            Per forward of plain decoding a tuple over layers; `None` if not asked for.
    """

    scores: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None
    hidden_states: list[tuple] | None = None
    attentions: list[tuple] | None = field(default=None)

    @classmethod
    def from_config(cls, config: GenerationConfig) -> "OutputRecorder":
        """Collect only if a dict is returned, as the host does."""

        def wanted(flag: bool | None) -> list | None:
            return [] if config.return_dict_in_generate and flag else None

        return cls(
            scores=wanted(config.output_scores),
            logits=wanted(config.output_logits),
            hidden_states=wanted(config.output_hidden_states),
            attentions=wanted(config.output_attentions),
        )

    def add_prefill(self, outputs: ModelOutput, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """The first token: logits and scores `(R, V)`, states of the whole prompt."""
        self._add_token(logits, scores)
        self._add_whole(outputs)

    def add_run(self, logits: torch.Tensor, scores: torch.Tensor, count: int) -> None:
        """Logits and scores of a committed run: the first `count` of `(R, L + 1, V)`."""
        for i in range(count):
            self._add_token(logits[:, i], scores[:, i])

    def drop(self, count: int) -> None:
        """Take back the last `count` tokens."""
        for kept in (self.scores, self.logits):
            if kept is not None and count:
                del kept[-count:]

    def add_states(
        self, outputs: ModelOutput, past_length: int, submitted: int, count: int, cache: Cache
    ) -> None:
        """
        Hidden states and attentions of a committed run, cut out of the verification forward.

        Args:
            outputs (`ModelOutput`): of the target on `[anchor, drafts]`.
            past_length (`int`): positions in the cache before that forward.
            submitted (`int`): L; with nothing submitted the forward is plain decoding's own.
            count (`int`): committed tokens, hence forwards that plain decoding would have made.
            cache (`Cache`): tells which layers are sliding or of fixed width.
        """
        if submitted == 0:
            self._add_whole(outputs)
            return
        for i in range(count):
            if self.hidden_states is not None:
                self.hidden_states.append(
                    tuple(state[:, i : i + 1] for state in outputs.hidden_states)
                )
            if self.attentions is not None:
                self.attentions.append(
                    tuple(
                        None
                        if weights is None
                        else _attention_row(weights, i, past_length, cache.layers[n])
                        for n, weights in enumerate(outputs.attentions)
                    )
                )

    def scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        """What the host passes to stopping criteria."""
        return None if self.scores is None else tuple(self.scores)

    def _add_whole(self, outputs: ModelOutput) -> None:
        if self.hidden_states is not None:
            self.hidden_states.append(outputs.hidden_states)
        if self.attentions is not None:
            self.attentions.append(outputs.attentions)

    def _add_token(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)


def _attention_row(weights: torch.Tensor, i: int, past_length: int, layer: Any) -> torch.Tensor:
    """
    Attention of query i `(R, heads, 1, keys)` with the keys that one-token decoding would have
    seen.
    """
    queries, keys = weights.shape[-2:]
    row = weights[..., i : i + 1, :]
    if getattr(layer, "is_compileable", False):
        return row  # Static caches attend over their whole width in either case.
    end = keys - queries + i + 1
    width = past_length + i + 1
    if layer.is_sliding:
        width = min(width, layer.get_max_length())
    return row[..., end - width : end]
