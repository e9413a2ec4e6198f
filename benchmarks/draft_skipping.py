"""
Draft skipping: what it gains where the drafter is weak, and what it costs where it is not.

    dspark-hf profile --target T --drafter D --threads 1 --cpu-time --max-tokens 16 -o profile.json
    python benchmarks/draft_skipping.py --target T --drafter D --profile profile.json \\
        --prompts a.jsonl b.jsonl --output skipping --cpu-time

Greedy, one row. Plain decoding, everything verified and early stop, the latter two with and without
`dspark_draft_skipping`, answer every prompt in rotating order until the minutes are used up. A
prompt is written to the output folder when all have answered it; the same command goes on from
there.

The prompts are split into thirds by the τ of everything verified. "By profile" is the speed that
the same rounds have at the profile's costs, which other work on the machine does not touch.
"""

import argparse
from pathlib import Path
from typing import Any

from load_aware import (
    check_settings,
    geometric_mean,
    interleaved_texts,
    measure_in_turn,
    warm_up,
)
from rich.console import Console
from rich.table import Table

from dspark_hf import ThroughputProfile
from dspark_hf.cli.models import Pair, load_pair

PLAIN, FULL, EARLY_STOP = "plain", "full", "early stop"
SKIPPING = ", skipping"
RULES = (PLAIN, FULL, FULL + SKIPPING, EARLY_STOP, EARLY_STOP + SKIPPING)
THIRDS = ("weakest third", "middle third", "strongest third")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--profile", type=Path, required=True, help="of `profile --drafter`")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="taken in turn")
    parser.add_argument("--output", type=Path, required=True, help="folder, continued if it exists")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="for one thread of a shared CPU")
    parser.set_defaults(rows=[1], loads=[])
    return parser.parse_args()


def rules(pair: Pair, profile: ThroughputProfile) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by rule."""
    found: dict[str, dict[str, Any]] = {PLAIN: {}}
    for name, verification in ((FULL, "full"), (EARLY_STOP, "scheduled")):
        for suffix, skips in (("", False), (SKIPPING, True)):
            found[name + suffix] = {
                "assistant_model": pair.drafter,
                "dspark_verification": verification,
                "dspark_draft_skipping": skips,
                "dspark_throughput_profile": profile.as_dict(),
            }
    return found


def measure(
    pair: Pair, args: argparse.Namespace, calls: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The calls of every prompt there is time for, none twice."""
    texts, path = interleaved_texts(args), args.output / "prompts.jsonl"

    def prepare(number: int) -> tuple[dict[str, Any], dict, dict[str, dict[str, Any]], int]:
        return {}, pair.encode(texts[number]), calls, number % len(calls)

    warm_up(pair, texts[0], calls)
    done = measure_in_turn(pair, args, path, prepare, least=len(THIRDS), most=len(texts))
    return [prompt["calls"] for prompt in done]


def accepted_length(call: dict[str, Any]) -> float:
    """τ of one answer; an answer of one token has no round and counts as one."""
    rounds = call["rounds"]
    return sum(committed for *_, committed in rounds) / len(rounds) if rounds else 1.0


def profiled_seconds(call: dict[str, Any], profile: ThroughputProfile) -> float:
    """What an answer's steps behind the prefill take at the profile's costs."""
    rounds = call["rounds"] or [[0, 0, 1]] * max(call["tokens"] - 1, 1)
    return sum(
        float(profile.step_seconds(1 + verified)) + profile.draft_seconds * (drafted > 0)
        for drafted, verified, _ in rounds
    )


def speed_table(
    title: str, prompts: list[dict[str, dict[str, Any]]], profile: ThroughputProfile
) -> Table:
    """Speed, τ and drafted rounds of every rule, prompt by prompt against plain decoding."""
    table = Table(title=f"{title}: {len(prompts)} prompts", title_justify="left")
    headings = ("rule", "x plain", "x unskipped", "worst", "best", "by profile", "τ", "drafted %")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for name in RULES:
        base = name.removesuffix(SKIPPING)
        over_plain, over_base, profiled = [], [], []
        for calls in prompts:
            pace, plain, unskipped = (
                calls[one]["tokens"] / calls[one]["seconds"] for one in (name, PLAIN, base)
            )
            over_plain.append(pace / plain)
            over_base.append(pace / unskipped)
            costs = [profiled_seconds(calls[one], profile) for one in (PLAIN, name)]
            profiled.append(costs[0] / costs[1] * calls[name]["tokens"] / calls[PLAIN]["tokens"])
        rounds = [r for calls in prompts for r in calls[name]["rounds"]]
        drafted = 100 * sum(r[0] > 0 for r in rounds) / len(rounds) if rounds else 0.0
        table.add_row(
            name,
            f"{geometric_mean(over_plain):.3f}",
            f"{geometric_mean(over_base):.3f}",
            f"{min(over_base):.3f}",
            f"{max(over_base):.3f}",
            f"{geometric_mean(profiled):.3f}",
            f"{sum(r[2] for r in rounds) / len(rounds):.2f}" if rounds else "–",
            f"{drafted:.0f}",
        )
    return table


def main() -> None:
    args = arguments()
    profile = ThroughputProfile.load(args.profile)
    pair = load_pair(args.target, args.drafter, args.dtype, args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    check_settings(args, pair)
    prompts = measure(pair, args, rules(pair, profile))
    prompts.sort(key=lambda calls: accepted_length(calls[FULL]))
    console = Console()
    for i, title in enumerate(THIRDS):
        start, end = (n * len(prompts) // len(THIRDS) for n in (i, i + 1))
        if end > start:
            console.print(speed_table(title, prompts[start:end], profile))
    console.print(speed_table("all", prompts, profile))


if __name__ == "__main__":
    main()
