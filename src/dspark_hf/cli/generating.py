"""`dspark-hf generate`: text as it comes, drafts in colour, one line of figures."""

from typing import Any

import torch
from rich.console import Console
from transformers.generation.streamers import BaseStreamer

from ..evaluation.running import timed_generate
from ..generation.statistics import RoundRecord, Statistics, collect_statistics
from .models import Pair

DRAFTED_STYLE = "green"


class ColouredText(BaseStreamer):
    """
    Prints tokens as they are committed: accepted draft tokens in colour, the target's own plain.

    A streamer sees tokens but not where they come from, so it prints only the first one, which
    comes from the prefill; the rest arrive as rounds.
    """

    def __init__(self, console: Console, tokenizer: Any):
        self.console = console
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = 0
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self._print(int(value), drafted=False)

    def end(self) -> None:
        self.console.print()

    def on_round(self, record: RoundRecord) -> None:
        for i, token in enumerate(record.tokens):
            self._print(token, drafted=i < record.num_accepted)

    def _print(self, token: int, drafted: bool) -> None:
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        # A character can span several tokens; its first ones decode to the replacement character.
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        style = DRAFTED_STYLE if drafted else None
        self.console.print(
            text[self._printed :],
            style=style,
            end="",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        self._printed = len(text)


def timed(
    pair: Pair, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """Output of `generate` and the seconds it took."""
    return timed_generate(pair.target, inputs, options)


def run_generate(
    console: Console,
    pair: Pair,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    compare: bool,
) -> tuple[torch.Tensor, Statistics]:
    """Generate with the drafter, print, and return the output and its statistics."""
    streamer = ColouredText(console, pair.tokenizer)
    drafted = {**options, "assistant_model": pair.drafter}
    with collect_statistics(on_round=streamer.on_round) as statistics:
        output, seconds = timed(pair, inputs, {**drafted, "streamer": streamer})
    summary = (
        f"τ {statistics.accepted_length:.2f} over {statistics.rounds} rounds, "
        f"{statistics.new_tokens / seconds:.1f} tokens/s"
    )
    if compare:
        names = ("num_assistant_tokens", "dspark_confidence_threshold")
        plain_options = {k: v for k, v in options.items() if k not in names}
        plain, plain_seconds = timed(pair, inputs, plain_options)
        plain_tokens = plain.shape[1] - inputs["input_ids"].shape[1]
        ratio = (statistics.new_tokens / seconds) / (plain_tokens / plain_seconds)
        summary += f", {ratio:.2f}x plain ({plain_tokens / plain_seconds:.1f} tokens/s)"
    console.print(summary, style="bold", highlight=False)
    return output, statistics
