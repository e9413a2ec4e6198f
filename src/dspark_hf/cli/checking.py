"""`dspark-hf check`: is this pair lossless here?"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from ..generation.statistics import collect_statistics
from ..losslessness import first_divergence, greedy_gaps, pair_probabilities, sampling_distance
from ..scheduling.settings import everything_verified
from .models import DEFAULT_PROMPTS, Pair, load_pair, machine_facts, read_prompts

_TOP_K = 4
# A check that verifies nothing shows nothing.
_EVERYTHING = everything_verified()


def run_check(
    console: Console,
    target: str,
    drafter: str,
    prompts: Path | None,
    num_prompts: int,
    max_new_tokens: int,
    low_dtype: str,
    draws: int,
    threads: int,
) -> dict[str, Any]:
    """Float32 exactness, worst low-precision gap and sampling distance, printed and returned."""
    texts = read_prompts(prompts, num_prompts) if prompts else list(DEFAULT_PROMPTS[:num_prompts])
    pair = load_pair(target, drafter, "float32", threads)
    exact = _check_exact(console, pair, texts, max_new_tokens)
    result: dict[str, Any] = {"machine": machine_facts(pair), "float32": exact}
    result["lossless"] = exact["identical"] == exact["prompts"]
    if draws:
        result["sampling"] = _check_sampling(console, pair, texts[0], draws)
        result["lossless"] &= result["sampling"]["distance"] <= result["sampling"]["bound"]
    if low_dtype not in ("float32", "auto"):
        del pair
        low = load_pair(target, drafter, low_dtype, threads)
        result[low_dtype] = _check_gaps(console, low, texts, max_new_tokens)
    verdict = "[green]lossless[/]" if result["lossless"] else "[red]NOT lossless[/]"
    console.print(f"This pair is {verdict} here.")
    return result


def _check_exact(
    console: Console, pair: Pair, prompts: list[str], max_new_tokens: int
) -> dict[str, Any]:
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    identical, divergence = 0, None
    with collect_statistics() as statistics:
        for prompt in track(prompts, "float32, greedy", console=console, transient=True):
            inputs = pair.encode(prompt)
            plain = pair.target.generate(**inputs, **options)
            drafted = pair.target.generate(
                **inputs, **options, assistant_model=pair.drafter, **_EVERYTHING
            )
            if torch.equal(plain, drafted):
                identical += 1
            elif divergence is None:
                length = inputs["input_ids"].shape[1]
                divergence = first_divergence(pair.target, plain, drafted, length)
    console.print(
        f"float32, greedy: {identical} of {len(prompts)} texts identical to plain decoding "
        f"(τ {statistics.accepted_length:.2f}, {statistics.accepted} drafts accepted)"
    )
    if divergence is not None:
        console.print(
            f"  first divergence: new token {divergence.position}, expected "
            f"{pair.tokenizer.decode([divergence.expected])!r}, found "
            f"{pair.tokenizer.decode([divergence.found])!r}, logit gap {divergence.logit_gap:.6f}"
        )
    return {
        "prompts": len(prompts),
        "identical": identical,
        "verified": statistics.verified,
        "accepted_length": statistics.accepted_length,
        "first_divergence": None if divergence is None else asdict(divergence),
    }


def _check_gaps(
    console: Console, pair: Pair, prompts: list[str], max_new_tokens: int
) -> dict[str, Any]:
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    gaps: dict[str, list[torch.Tensor]] = {"drafter": [], "plain": []}
    for prompt in track(prompts, "low precision, greedy", console=console, transient=True):
        inputs = pair.encode(prompt)
        length = inputs["input_ids"].shape[1]
        for name, assistant in (("drafter", pair.drafter), ("plain", None)):
            extra = {"assistant_model": assistant, **_EVERYTHING} if assistant is not None else {}
            text = pair.target.generate(**inputs, **options, **extra)
            gaps[name].append(greedy_gaps(pair.target, text, length).flatten())
    worst = {name: float(torch.cat(values).max()) for name, values in gaps.items()}
    console.print(
        f"{str(pair.target.dtype).removeprefix('torch.')}, greedy: worst logit gap of an emitted "
        f"token {worst['drafter']:.3f} with the drafter, {worst['plain']:.3f} in plain decoding "
        "(near-ties: one-token and many-token forwards round differently)"
    )
    return {"worst_gap": worst["drafter"], "worst_gap_plain": worst["plain"]}


def _check_sampling(console: Console, pair: Pair, prompt: str, draws: int) -> dict[str, Any]:
    inputs = pair.encode(prompt)
    # Three tokens: there is something to draft for the second, where acceptance and residual
    # act. No stop token, so that every draw has two.
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": True,
        "top_k": _TOP_K,
        "top_p": 1.0,
    }
    options |= {"temperature": 1.0, "repetition_penalty": 1.0, "eos_token_id": None}
    drawn = []
    torch.manual_seed(0)
    for _ in track(range(draws), "float32, sampling", console=console, transient=True):
        output = pair.target.generate(
            **inputs, **options, assistant_model=pair.drafter, **_EVERYTHING
        )
        x, y = output[0, inputs["input_ids"].shape[1] :][:2].tolist()
        drawn.append((x, y))
    exact = pair_probabilities(pair.target, inputs["input_ids"], _TOP_K)
    distance, bound = sampling_distance(exact, drawn)
    console.print(
        f"float32, sampling (top-k {_TOP_K}, {draws} draws of two tokens): total variation "
        f"distance {distance:.3f}; an exact sampler stays below {bound:.3f} in 99.9 % of such runs"
    )
    return {"draws": draws, "distance": distance, "bound": bound}
