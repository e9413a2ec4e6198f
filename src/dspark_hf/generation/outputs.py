"""
What `generate` returns besides the tokens: scores, logits, hidden states, attentions, one entry a
token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, GenerationConfig
from transformers.cache_utils import StaticLayer
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


class OutputRecorder:
    """
    Collects what the generation config asks for, in the shapes that plain decoding returns.

    Rows of a batch come to a token at different times, so everything is kept by row and put
    together at the end. Behind the end of a row that stopped early plain decoding returns what the
    target says about padding; here those entries are zero.

    Args:
        config (`GenerationConfig`): what is wanted; only if a dict is returned, as the host does.
        num_rows (`int`): R.
    """

    def __init__(self, config: GenerationConfig, num_rows: int):
        def wanted(flag: bool | None) -> list[list] | None:
            return (
                [[] for _ in range(num_rows)] if config.return_dict_in_generate and flag else None
            )

        asked = config.output_hidden_states
        # A list names entries of `hidden_states`; the host returns `None` in the other places.
        self._places = None if asked is None or isinstance(asked, bool) else _as_list(asked)
        self._scores = wanted(config.output_scores)
        self._logits = wanted(config.output_logits)
        self._hidden_states = wanted(bool(asked))
        self._attentions = wanted(config.output_attentions)
        self._prefill: ModelOutput | None = None

    def add_prefill(self, outputs: ModelOutput, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """The first token: logits and scores `(R, V)`, states of the whole prompt."""
        for row in range(logits.shape[0]):
            self.add_run(row, logits[row : row + 1], scores[row : row + 1])
        if self._hidden_states is not None or self._attentions is not None:
            self._prefill = outputs

    def add_run(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Logits and scores `(n, V)` of a committed run of one row."""
        for kept, new in ((self._scores, scores), (self._logits, logits)):
            if kept is not None:
                # A copy: the next compiled forward may overwrite what this one returned.
                kept[row].extend(new.clone())

    def drop(self, row: int, count: int) -> None:
        """Take back the last `count` tokens of a row."""
        for kept in (self._scores, self._logits):
            if kept is not None and count:
                del kept[row][-count:]

    def add_states(
        self,
        row: int,
        outputs: ModelOutput,
        entry: int,
        past: int,
        lag: int,
        num_drafts: int,
        count: int,
        cache: Cache,
    ) -> None:
        """
        Hidden states and attentions of a committed run, cut out of the verification forward.

        Args:
            row (`int`): which row of the batch.
            outputs (`ModelOutput`): of the target on `[anchor, drafts]`.
            entry (`int`): which row of that forward.
            past (`int`): columns in the cache before that forward.
            lag (`int`): how many of them plain decoding would not have.
            num_drafts (`int`): L.
            count (`int`): committed tokens, hence forwards that plain decoding would have made.
            cache (`Cache`): tells which layers are sliding or of fixed width.
        """
        # A forward of one token is plain decoding's own, even one that reads the text again.
        whole = count == 1 and lag == 0 and num_drafts == 0
        for i in range(count):
            if self._hidden_states is not None:
                columns = slice(None) if whole else slice(i, i + 1)
                self._hidden_states[row].append(
                    tuple(
                        state if state is None else state[entry, columns]
                        for state in self._asked(outputs.hidden_states)
                    )
                )
            if self._attentions is not None:
                self._attentions[row].append(
                    tuple(
                        weights
                        if weights is None
                        else weights[entry]
                        if whole
                        else _attention_row(weights[entry], i, past, lag, cache.layers[n])
                        for n, weights in enumerate(outputs.attentions)
                    )
                )

    def _asked(self, states: tuple) -> tuple:
        """Those of the `hidden_states` of a forward that the caller asked for."""
        if self._places is None:
            return states
        count = len(states)
        asked = {place % count for place in self._places if -count <= place < count}
        return tuple(state if i in asked else None for i, state in enumerate(states))

    def scores(self, count: int | None = None) -> tuple[torch.Tensor, ...] | None:
        """Scores `(R, V)` of the first `count` new tokens, all by default."""
        return _steps(self._scores, count)

    def as_dict(self) -> dict[str, Any]:
        """What the host's output class takes."""
        hidden_states, attentions = _steps(self._hidden_states), _steps(self._attentions)
        if self._prefill is not None:
            if hidden_states is not None:
                hidden_states = (self._asked(self._prefill.hidden_states), *hidden_states)
            if attentions is not None:
                attentions = (self._prefill.attentions, *attentions)
        return {
            "scores": self.scores(),
            "logits": _steps(self._logits),
            "hidden_states": hidden_states,
            "attentions": attentions,
        }


def _as_list(places: int | list[int]) -> list[int]:
    return [places] if isinstance(places, int) else list(places)


def _steps(kept: list[list] | None, count: int | None = None) -> tuple | None:
    """What each row has at each step, put together to batches."""
    if kept is None:
        return None
    count = max(map(len, kept)) if count is None else count
    return tuple(
        _together([row[i] if i < len(row) else None for row in kept]) for i in range(count)
    )


def _together(parts: list) -> Any:
    example = next(part for part in parts if part is not None)
    if isinstance(example, tuple):
        return tuple(
            None
            if example[n] is None
            else _together([None if part is None else part[n] for part in parts])
            for n in range(len(example))
        )
    return torch.stack([torch.zeros_like(example) if part is None else part for part in parts])


def _attention_row(weights: torch.Tensor, i: int, past: int, lag: int, layer: Any) -> torch.Tensor:
    """
    Attention `(heads, 1, keys)` of query i of one row `(heads, queries, keys)` with the keys that
    one-token decoding would have seen.
    """
    queries, keys = weights.shape[-2:]
    row = weights[..., i : i + 1, :]
    own = past - lag + i + 1
    entries = row[..., :0]
    if hasattr(layer, "entry_count"):
        # DeepSeek-V4 has its compressed entries behind the keys: one for each window that is full.
        keys -= layer.entry_count["compressor"]
        entries = row[..., keys : keys + own // layer.compress_rate]
    if isinstance(layer, StaticLayer):
        # These attend over their whole width, the columns in use first.
        end = past + i + 1 if past + queries <= keys else keys - queries + i + 1
        own = min(own, layer.max_cache_len)
        return torch.nn.functional.pad(row[..., end - own : end], (0, layer.max_cache_len - own))
    if getattr(layer, "is_compileable", False):
        return row  # Keeps nothing of its own, so there is nothing to cut.
    end = keys - queries + i + 1
    own = min(own, layer.get_max_length()) if layer.is_sliding else own
    return torch.cat((row[..., end - own : end], entries), dim=-1)
