"""
`dspark-hf bench`: plain decoding, prompt look-up and the drafter on the same prompts.

The three take turns prompt by prompt, in rotating order, so that drift of the machine cancels.
*Loop efficiency* is the measured speed-up divided by what bare forwards allow,
`τ · T(1) / (T(1 + ℓ) + T_draft)`, with the T's timed beside each prompt, behind a context of its
mean length: 1 means that the loop itself costs nothing.
"""

import itertools
import statistics as stats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from ..evaluation.provenance import drafter_facts
from ..generation.statistics import Statistics, collect_statistics
from ..generation.v4_cache import make_rewindable
from ..losslessness import greedy_gaps
from .generating import timed
from .models import Pair, load_pair, machine_facts, read_prompts

_LOOKUP_TOKENS = 8
_REPEATS = 5
MODES = ("plain", "lookup", "drafter")


def run_bench(
    target: str,
    drafter: str,
    prompts: list[Path],
    num_prompts: int,
    max_new_tokens: int,
    dtype: str,
    temperature: float,
    threshold: float | None,
    threads: int,
) -> dict[str, Any]:
    """Run every prompt of every set in every mode. Returns figures per set and in total."""
    texts = {path.stem: read_prompts(path, num_prompts) for path in prompts}
    pair = load_pair(target, drafter, dtype, threads)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    extra: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
        "drafter": {"assistant_model": pair.drafter},
    }
    if threshold is not None:
        extra["drafter"]["dspark_confidence_threshold"] = threshold
    modes = _modes(pair.target)
    for mode in modes:  # Warm up every path before anything is timed.
        timed(pair, pair.encode("Hello"), {**options, **extra[mode], "max_new_tokens": 8})
    rows, pooled = [], _Tally(modes)
    with Progress(transient=True) as progress:
        task = progress.add_task("bench", total=sum(map(len, texts.values())) * len(modes))
        for name, prompts_of_set in texts.items():
            tally = _Tally(modes)
            for number, prompt in enumerate(prompts_of_set):
                inputs = pair.encode(prompt)
                for turn in range(len(modes)):
                    mode = modes[(number + turn) % len(modes)]
                    tally.run(pair, inputs, mode, {**options, **extra[mode]})
                    progress.advance(task)
            rows.append(tally.figures(name))
            pooled.merge(tally)
    return {
        "target": target,
        "drafter": drafter,
        "drafters": [drafter_facts(drafter, pair.drafter)],
        "machine": machine_facts(pair),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "thinking": False,
        "confidence_threshold": threshold,
        "prompt_lookup_num_tokens": _LOOKUP_TOKENS,
        "sets": rows,
        "total": pooled.figures("all"),
    }


def _modes(target: PreTrainedModel) -> tuple[str, ...]:
    """The host refuses prompt look-up for targets whose cache it cannot roll back."""
    return tuple(mode for mode in MODES if mode != "lookup" or not target._is_stateful)


class _Tally:
    """Tokens, seconds and acceptance of one set."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        self.tokens = dict.fromkeys(modes, 0)
        self.seconds = dict.fromkeys(modes, 0.0)
        self.prompt_lengths: list[int] = []
        self.statistics = Statistics()
        self.gaps: list[float] = []
        self.bigrams: list[float] = []
        self.forwards: dict[str, list[float]] = {}

    def run(
        self, pair: Pair, inputs: dict[str, torch.Tensor], mode: str, options: dict[str, Any]
    ) -> None:
        with collect_statistics() as statistics:
            output, seconds = timed(pair, inputs, options)
        length = inputs["input_ids"].shape[1]
        new = output[0, length:].tolist()
        self.tokens[mode] += len(new)
        self.seconds[mode] += seconds
        if mode == "drafter":
            self.statistics.merge(statistics)
            self.prompt_lengths.append(length)
            pairs = list(itertools.pairwise(new))
            self.bigrams.append(len(set(pairs)) / max(len(pairs), 1))
            # Beside the run they are compared with, so that a slow moment of the machine hits both.
            context, verified = length + len(new) // 2, statistics.verified / statistics.rounds
            self._add_forwards(time_forwards(pair, context, round(verified)))
            if not options["do_sample"]:
                self.gaps.append(float(greedy_gaps(pair.target, output, length).max()))

    def merge(self, other: "_Tally") -> None:
        for mode in self.tokens:
            self.tokens[mode] += other.tokens[mode]
            self.seconds[mode] += other.seconds[mode]
        self.prompt_lengths += other.prompt_lengths
        self.statistics.merge(other.statistics)
        self.gaps += other.gaps
        self.bigrams += other.bigrams
        self._add_forwards(other.forwards)

    def _add_forwards(self, seconds: dict[str, list[float]]) -> None:
        for name, values in seconds.items():
            self.forwards[name] = self.forwards.get(name, []) + values

    def figures(self, name: str) -> dict[str, Any]:
        speed = {mode: tokens / self.seconds[mode] for mode, tokens in self.tokens.items()}
        tau = self.statistics.accepted_length
        costs = {name: stats.median(values) for name, values in self.forwards.items()}
        ideal = tau * costs["target_one"] / (costs["target_verify"] + costs["draft"])
        speedup = speed["drafter"] / speed["plain"]
        return {
            "name": name,
            "num_prompts": len(self.prompt_lengths),
            "accepted_length": tau,
            "conditional_acceptance": self.statistics.conditional_acceptance,
            "mean_verified": self.statistics.verified / max(self.statistics.rounds, 1),
            "plain_tokens_per_second": speed["plain"],
            "lookup_speedup": speed["lookup"] / speed["plain"] if "lookup" in speed else None,
            "drafter_speedup": speedup,
            "ideal_speedup": ideal,
            "loop_efficiency": speedup / ideal,
            "worst_gap": max(self.gaps) if self.gaps else None,
            "distinct_2": stats.mean(self.bigrams),
            "seconds": dict(self.seconds),
            "forward_seconds": costs,
        }


@torch.no_grad()
def time_forwards(pair: Pair, context_length: int, num_verified: int) -> dict[str, list[float]]:
    """
    Seconds of bare forwards behind `context_length` positions: the target on one token and on
    `1 + num_verified`, and the drafter on one block, context update included. Interleaved.
    """
    from transformers import DynamicCache

    device = pair.target.device
    vocabulary = pair.drafter.config.vocab_size
    ids = torch.randint(vocabulary, (1, context_length), device=device)
    cache = DynamicCache(config=pair.target.config.get_text_config(decoder=True))
    pair.target(ids, cache=cache, logits_to_keep=1)
    make_rewindable(cache)
    cache.activate_past_recording()
    drafter: Any = pair.drafter
    context = drafter.new_context(1, target=pair.target)
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    features = torch.randn(1, context_length, width, device=device, dtype=pair.target.dtype)

    def extend(length: int) -> None:
        following = {"token_ids": ids[:, :length]} if drafter.is_autoregressive else {}
        drafter.extend(context, features[:, :length], **following)

    extend(context_length)

    def target_forward(length: int) -> Callable[[], None]:
        def run() -> None:
            pair.target(ids[:, :length], cache=cache)
            cache.crop(-length)

        return run

    def draft() -> None:
        extend(1)
        drafter.draft(context, ids[:, 0])

    runs = {
        "target_one": target_forward(1),
        "target_verify": target_forward(1 + num_verified),
        "draft": draft,
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_REPEATS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return seconds
