"""
What a drafter costs that is never right: greedy decoding with every draft rejected.

    python benchmarks/never_right.py --target TARGET --drafter DRAFTER [--new-tokens 96] [--repeats
    5]

Plain decoding and decoding with wrong drafts take turns. If the loop itself costs nothing, a token
takes `T(1 + γ) + T_draft` instead of `T(1)`; the times of those bare forwards come from the same
run.
"""

import argparse
import dataclasses
import statistics

from dspark_hf.cli.benchmarking import time_forwards
from dspark_hf.cli.generating import timed
from dspark_hf.cli.models import load_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    pair = load_pair(arguments.target, arguments.drafter, "bfloat16", threads=1)
    inputs = pair.encode("Tell me a story about a lighthouse.")
    draft = pair.drafter.draft

    def wrong(*args, **kwargs):
        # The real draft is paid for; then the mask token, which no text contains, replaces it.
        block = draft(*args, **kwargs)
        mask = pair.drafter.config.mask_token_id
        return dataclasses.replace(block, tokens=block.tokens.new_full(block.tokens.shape, mask))

    pair.drafter.draft = wrong
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False, "min_new_tokens": None}
    options["eos_token_id"] = None
    seconds: dict[str, list[float]] = {"plain": [], "never right": []}
    costs = []
    for _ in range(arguments.repeats):
        for name, assistant in (("plain", None), ("never right", pair.drafter)):
            _, elapsed = timed(pair, inputs, {**options, "assistant_model": assistant})
            seconds[name].append(elapsed / arguments.new_tokens)
        context = inputs["input_ids"].shape[1] + arguments.new_tokens // 2
        costs.append(time_forwards(pair, context, pair.drafter.config.block_size))
    per_token = {name: statistics.median(values) for name, values in seconds.items()}
    forward = {
        name: statistics.median(value for cost in costs for value in cost[name])
        for name in costs[0]
    }
    extra = per_token["never right"] - per_token["plain"]
    bare = forward["target_verify"] + forward["draft"] - forward["target_one"]
    for name, value in {**per_token, **forward}.items():
        print(f"{name:>14}: {1e3 * value:7.2f} ms")
    print(
        f"a wrong drafter costs {1e3 * extra:.2f} ms a token; bare forwards cost {1e3 * bare:.2f} "
        "ms"
    )


if __name__ == "__main__":
    main()
