"""`dspark-hf demo`: the shipped drafter on a real target, with and without."""

import torch
from rich.console import Console

from ..losslessness import greedy_gaps
from .generating import run_generate, timed
from .models import SMOLLM2, Pair, load_pair, machine_facts, shipped_drafter


def run_demo(console: Console, prompt: str, max_new_tokens: int, dtype: str, threads: int) -> None:
    """Answer with the drafter, then plainly; compare texts, speeds and logits."""
    console.print(f"[bold]target[/] {SMOLLM2}, [bold]drafter[/] shipped with this package")
    pair = load_pair(SMOLLM2, shipped_drafter(), dtype, threads)
    machine = machine_facts(pair)
    console.print(
        f"{machine['processor']}, {machine['threads']} thread(s), {machine['dtype']}", style="dim"
    )
    inputs = pair.encode(prompt)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for assistant in (None, pair.drafter):  # Warm up both paths.
        timed(pair, inputs, {**options, "max_new_tokens": 4, "assistant_model": assistant})
    console.print(f"\n[bold]{prompt}[/]\n")
    drafted, _ = run_generate(console, pair, inputs, options, compare=True)
    plain, _ = timed(pair, inputs, options)
    _print_comparison(console, pair, plain, drafted, inputs["input_ids"].shape[1])


def _print_comparison(
    console: Console, pair: Pair, plain: torch.Tensor, drafted: torch.Tensor, prompt_length: int
) -> None:
    if plain.shape == drafted.shape and bool((plain == drafted).all()):
        console.print("The text is identical to plain decoding, token for token.")
        return
    worst = float(greedy_gaps(pair.target, drafted, prompt_length).max())
    dtype = str(pair.target.dtype).removeprefix("torch.")
    console.print(
        f"The text leaves plain decoding's at a near-tie of {dtype}; every token is the target's "
        f"argmax up to a logit gap of {worst:.3f}. To compare without rounding: dspark-hf demo "
        "--dtype float32"
    )
