"""
Every rule of verification on the same prompts, in turn, and what each verifies under load.

    python benchmarks/load_aware.py --target T --drafter D --profile profile.json --prompts p.jsonl

Times are taken without load. Under load the real loop decides how much to verify, and the profile
says what such steps cost, because no other work is really running. The temperatures are the
drafter's own (`dspark-hf calibrate --save-into`).
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dspark_hf import RoundRecord, ThroughputProfile, collect_statistics
from dspark_hf.cli.models import Pair, load_pair, read_prompts

OPTIONS = {"do_sample": True, "temperature": 1.0, "top_k": 0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="prompts per call")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--fixed", type=int, default=3, help="the fixed length to compare with")
    parser.add_argument("--threshold", type=float, default=0.3)
    parser.add_argument("--loads", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="for one thread of a shared CPU")
    return parser.parse_args()


def rules(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    scheduled = {
        "dspark_verification": "scheduled",
        "dspark_throughput_profile": str(args.profile),
    }
    return {
        "full": {"dspark_verification": "full"},
        f"fixed ℓ = {args.fixed}": {
            "dspark_verification": "full",
            "num_assistant_tokens": args.fixed,
        },
        f"threshold {args.threshold:g}": {"dspark_confidence_threshold": args.threshold},
        "early stop": scheduled,
        "lagged": scheduled | {"dspark_scheduler": "lagged"},
        "early stop, skipping": scheduled | {"dspark_draft_skipping": True},
    }


def batches(pair: Pair, args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    texts = read_prompts(args.prompts, args.num_prompts)
    if args.rows == 1:
        return [pair.encode(text) for text in texts]
    pair.tokenizer.padding_side = "left"
    template = pair.tokenizer.apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in texts]
    parts = (chats[i : i + args.rows] for i in range(0, len(chats), args.rows))
    encoded = [
        template(
            part, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        for part in parts
    ]
    return [{name: e[name] for name in ("input_ids", "attention_mask")} for e in encoded]


def timed(pair: Pair, inputs: dict, clock: Any, **options: Any) -> tuple[float, int, list]:
    """Seconds, new tokens and rounds of one call."""
    rounds: list[RoundRecord] = []
    started = clock()
    with collect_statistics(on_round=rounds.append) as statistics:
        output = pair.target.generate(**inputs, **OPTIONS, **options)
    seconds = clock() - started
    length = inputs["input_ids"].shape[1]
    return seconds, statistics.new_tokens or output[:, length:].numel(), rounds


def modelled(profile: ThroughputProfile, rounds: list[RoundRecord], load: int) -> float:
    """Tokens per second of everything in the steps of one row, over plain decoding."""
    seconds = progress = 0.0
    for record in rounds:
        seconds += float(profile.step_seconds(load + 1 + record.num_verified))
        seconds += profile.draft_seconds * bool(record.num_drafted)
        progress += len(record.tokens) + load
    return progress / seconds * float(profile.step_seconds(load + 1)) / (load + 1)


def main() -> None:
    args = arguments()
    pair = load_pair(args.target, args.drafter, args.dtype, args.threads)
    profile = ThroughputProfile.load(args.profile)
    clock = time.process_time if args.cpu_time else time.perf_counter
    modes: dict[str, dict[str, Any]] = {"plain": {}}
    modes |= {name: {"assistant_model": pair.drafter, **rule} for name, rule in rules(args).items()}
    spent, made = defaultdict(float), defaultdict(int)
    kept: dict[tuple[str, int], list[RoundRecord]] = defaultdict(list)
    for number, inputs in enumerate(batches(pair, args)):
        names = list(modes)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            torch.manual_seed(number)
            for load in (0, *(args.loads if name != "plain" and args.rows == 1 else ())):
                options = modes[name] | ({"dspark_load": load} if load else {})
                options["max_new_tokens"] = args.max_new_tokens
                seconds, tokens, rounds = timed(pair, inputs, clock, **options)
                kept[name, load] += rounds
                if load == 0:
                    spent[name] += seconds
                    made[name] += tokens
    table = Table(title=f"{args.rows} row(s), {args.num_prompts} prompts, {pair.target.dtype}")
    for heading in ("rule", "x plain", "τ", "verified"):
        table.add_column(heading)
    loads = [] if args.rows > 1 else args.loads
    for load in loads:
        table.add_column(f"load {load}: verified, x plain")
    for name in modes:
        rounds = kept[name, 0]
        row = [name, f"{made[name] / spent[name] * spent['plain'] / made['plain']:.2f}"]
        if rounds:
            row.append(f"{sum(len(r.tokens) for r in rounds) / len(rounds):.2f}")
            row.append(f"{sum(r.num_verified for r in rounds) / len(rounds):.2f}")
            for load in loads:
                under = kept[name, load]
                verified = sum(r.num_verified for r in under) / len(under)
                row.append(f"{verified:.2f}, {modelled(profile, under, load):.2f}")
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
