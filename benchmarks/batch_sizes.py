"""
Tokens per second of batches with and without a drafter, and what bare forwards allow.

    python benchmarks/batch_sizes.py --target TARGET --drafter DRAFTER [--new-tokens 64]

At each batch size three ways take turns on the same prompts: plain decoding, the drafter, and an
oracle that pays for the drafter and then proposes the text that plain decoding found. Times are
processor seconds of one thread behind the prefill, which other work on the machine does not
stretch. A round costs `T(R, 1 + γ) + T_draft(R)` and a plain step `T(R, 1)`; the T's are timed as
bare forwards in the same run. A batch goes on until its slowest row is done, so what counts is not
τ, the mean over rows and rounds, but the *pace*, the steps of plain decoding over the rounds of the
batch: the drafter pays where the pace is above the break-even,
(T(R, 1 + γ) + T_draft(R)) / T(R, 1).
"""

import argparse
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from dspark_hf import collect_statistics
from dspark_hf.cli.models import Pair, load_pair

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "A shop sells pens at 3 dollars each. How much do 12 pens cost? Think step by step.",
    "List five countries in Africa and their capitals.",
    "Tell me a story about a lighthouse.",
    "What is a prime number?",
    "Write a haiku about the sea, and then say what it means.",
    "Give me three tips for learning to play the piano as an adult.",
)


def encode(pair: Pair, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Left-padded batch of chat prompts."""
    rows = [pair.encode(prompt)["input_ids"][0] for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def oracle(drafter: Any, texts: torch.Tensor, mask: torch.Tensor) -> Callable:
    """`drafter.draft` with the tokens replaced by those of `texts`, rows told apart by content."""
    draft, width = drafter.draft, drafter.config.block_size
    plain = [row[int(keep.argmax()) :] for row, keep in zip(texts, mask, strict=True)]

    def right(context, anchor_ids, **kwargs):
        block = draft(context, anchor_ids, **kwargs)
        tokens = torch.zeros_like(block.tokens)
        for i, length in enumerate((context.lengths + 1).tolist()):
            seen = kwargs["input_ids"][i, -length:]
            text = next((text for text in plain if torch.equal(text[:length], seen)), seen)
            known = text[length : length + width]
            tokens[i, : len(known)] = known
        return dataclasses.replace(block, tokens=tokens)

    return right


def cpu_seconds(run: Callable, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


@torch.no_grad()
def bare_forwards(pair: Pair, rows: int, context: int, repeats: int = 5) -> dict[str, float]:
    """CPU seconds of a plain step, a verification and a draft behind `context` positions."""
    gamma, config = pair.drafter.config.block_size, pair.drafter.config
    cache = DynamicCache(config=pair.target.config)
    ids = torch.randint(10, 1000, (rows, context))
    pair.target(ids, cache=cache, logits_to_keep=1)

    def step(length: int) -> None:
        pair.target(ids[:, :length], cache=cache)
        cache.crop(-length)

    held = pair.drafter.new_context(rows, target=pair.target)
    width = len(config.target_layer_ids) * config.target_hidden_size
    pair.drafter.extend(held, torch.randn(rows, context, width))
    return {
        "one": cpu_seconds(lambda: step(1), repeats),
        "verify": cpu_seconds(lambda: step(gamma + 1), repeats),
        "draft": cpu_seconds(lambda: pair.drafter.draft(held, ids[:, 0]), repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    pair = load_pair(arguments.target, arguments.drafter, arguments.dtype, threads=1)
    draft = pair.drafter.draft
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "eos_token_id": None}
    header = (
        "rows",
        "mode",
        "tok/s",
        "speed-up",
        "τ",
        "pace",
        "break-even",
        "efficiency",
        "peak MiB",
    )
    print(" | ".join(f"{name:>10}" for name in header))
    for rows in arguments.batch_sizes:
        batch = encode(pair, PROMPTS[:rows])
        cost = bare_forwards(pair, rows, batch["input_ids"].shape[1] + arguments.new_tokens // 2)
        round_cost = cost["verify"] + cost["draft"]
        text, base = None, 0.0
        for mode in ("plain", "drafter", "oracle"):
            assistant = {} if mode == "plain" else {"assistant_model": pair.drafter}
            if mode == "oracle":
                pair.drafter.draft = oracle(pair.drafter, text, batch["attention_mask"])
            ends: list[float] = []
            handle = pair.target.register_forward_hook(
                lambda *_, ends=ends: ends.append(time.process_time())
            )
            with collect_statistics() as found:
                output = pair.target.generate(**batch, **options, **assistant)
            handle.remove()
            # The first forward is the prefill, which is the same for all.
            seconds, steps = time.process_time() - ends[0], arguments.new_tokens - 1
            pair.drafter.draft = draft
            text = output if text is None else text
            speed = rows * steps / seconds
            base = base or speed
            tau = found.accepted_length if found.rounds else 1.0
            pace = steps / (len(ends) - 1)
            allowed = pace * cost["one"] / round_cost if found.rounds else 1.0
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            figures = (f"{speed:.1f}", f"{speed / base:.2f}", f"{tau:.2f}", f"{pace:.2f}")
            figures += (f"{round_cost / cost['one']:.2f}", f"{speed / base / allowed:.2f}")
            print(" | ".join(f"{x:>10}" for x in (rows, mode, *figures, f"{peak:.0f}")), flush=True)


if __name__ == "__main__":
    main()
