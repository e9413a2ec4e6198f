"""
Every rule of verification on the same batches, in turn: speed, and what is verified under load.

    dspark-hf profile --target T --drafter D --threads 1 --cpu-time --max-tokens 96 -o profile.json
    dspark-hf calibrate --target T --drafter D --prompts p.jsonl --temperature 0 --batch-size 8 \\
        --offsets -o calibration.json --records rounds.safetensors --save-into D-calibrated
    python benchmarks/load_aware.py --target T --drafter D-calibrated --profile profile.json \\
        --records rounds.safetensors --prompts p.jsonl --output load-aware --cpu-time

Decoding is greedy, so that all rules write the same text and only their time differs. The best
fixed length and the best threshold are found by replaying the recorded rounds. Time is kept without
load. Under load the real loop decides how much to verify, and the profile says what such steps
cost, because no other work is really running.

The parts take turns, one batch each, until the minutes are used up. Every batch is written to the
output folder when all rules have answered it; the same command goes on from there.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dspark_hf import RoundRecord, ThroughputProfile, collect_statistics
from dspark_hf.cli.models import Pair, load_pair, machine_facts, read_prompts
from dspark_hf.cli.plots import plot_verified, plotting
from dspark_hf.evaluation.provenance import drafter_facts, fingerprint
from dspark_hf.scheduling.acceptance import AcceptanceRecords
from dspark_hf.scheduling.recommendation import compare_policies

LOADS = "loads"
PLAIN, FULL, FIXED, THRESHOLD, EARLY_STOP, LAGGED = (
    "plain",
    "full",
    "best fixed",
    "best threshold",
    "early stop",
    "lagged",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True, help="of `calibrate --records`")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="taken in turn")
    parser.add_argument("--output", type=Path, required=True, help="folder, continued if it exists")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8], help="batch sizes")
    parser.add_argument("--loads", type=int, nargs="*", default=[4, 8, 16, 32, 64])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="for one thread of a shared CPU")
    args = parser.parse_args()
    if args.loads and 1 not in args.rows:
        parser.error("--loads are looked at with one row; add 1 to --rows, or give no --loads")
    return args


def rules(
    pair: Pair, profile: ThroughputProfile, records: AcceptanceRecords, rows: int
) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by rule; the calibration is the drafter's own."""
    config = pair.drafter.generation_config
    _, fixed, threshold, *_ = compare_policies(
        records,
        profile,
        config.dspark_sts_temperatures,
        config.dspark_confidence_offsets,
        rows=rows,
    )
    scheduled = {
        "dspark_verification": "scheduled",
        "dspark_throughput_profile": profile.as_dict(),
    }
    drafting = {
        FULL: {"dspark_verification": "full"},
        FIXED: {"dspark_verification": "full", **fixed.options},
        THRESHOLD: threshold.options,
        EARLY_STOP: scheduled,
        LAGGED: scheduled | {"dspark_scheduler": "lagged"},
    }
    return {PLAIN: {}} | {
        name: {"assistant_model": pair.drafter, **rule} for name, rule in drafting.items()
    }


def run(pair: Pair, inputs: dict, clock: Callable[[], float], options: dict) -> dict[str, Any]:
    """One call: seconds, new tokens of all rows, and its rounds."""
    rounds: list[RoundRecord] = []
    started = clock()
    with collect_statistics(on_round=rounds.append):
        output = pair.target.generate(**inputs, do_sample=False, **options)
    seconds = clock() - started
    new = output[:, inputs["input_ids"].shape[1] :]
    is_end = torch.isin(new, torch.tensor(stop_ids(pair))).long()
    # A row is over with its first stop token; what follows is padding.
    tokens = int((is_end.cumsum(dim=1) - is_end == 0).sum())
    return {
        "seconds": seconds,
        "tokens": tokens,
        "rounds": [[r.num_drafted, r.num_verified, len(r.tokens)] for r in rounds],
    }


def stop_ids(pair: Pair) -> list[int]:
    ids = pair.target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def interleaved_texts(args: argparse.Namespace) -> list[str]:
    """The prompts of all files in turn."""
    return [text for turn in zip(*map(read_prompts, args.prompts), strict=False) for text in turn]


def measure_in_turn(
    pair: Pair,
    args: argparse.Namespace,
    path: Path,
    prepare: Callable[[int], tuple[dict[str, Any], dict, dict[str, dict[str, Any]], int]],
    least: int,
    most: float = math.inf,
) -> list[dict[str, Any]]:
    """
    All batches there are, those of earlier calls at `path` included, and those there is time for.

    `prepare(number)` gives what is to be noted of a batch, its inputs, the calls by name, and the
    place of the call that begins.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    done = [json.loads(line) for line in lines]
    spent = sum(batch["wall_seconds"] for batch in done)
    clock = time.process_time if args.cpu_time else time.perf_counter
    while len(done) < most and (spent < 60 * args.minutes or len(done) < least):
        facts, inputs, calls, first = prepare(len(done))
        names = [*calls][first:] + [*calls][:first]
        started = time.perf_counter()
        found = {
            name: run(pair, inputs, clock, calls[name] | {"max_new_tokens": args.max_new_tokens})
            for name in names
        }
        done.append(facts | {"wall_seconds": time.perf_counter() - started, "calls": found})
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1]) + "\n")
        spent += done[-1]["wall_seconds"]
    return done


def warm_up(pair: Pair, text: str, calls: dict[str, dict[str, Any]]) -> None:
    """A few tokens of every call, so that the first one measured does not pay for all."""
    for options in calls.values():
        run(pair, pair.encode_batch([text]), time.perf_counter, options | {"max_new_tokens": 4})


def measure(
    pair: Pair, args: argparse.Namespace, all_rules: dict[int, dict[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Batches of every size, and of one row under every load, in turn."""
    texts = interleaved_texts(args)
    parts: list[int | str] = [*args.rows, LOADS] if args.loads else [*args.rows]

    def prepare(number: int) -> tuple[dict[str, Any], dict, dict[str, dict[str, Any]], int]:
        part, turn = parts[number % len(parts)], number // len(parts)
        rows = 1 if part == LOADS else int(part)
        calls = all_rules[rows]
        if part == LOADS:
            calls = {
                f"{name} {load}": all_rules[1][name] | {"dspark_load": load}
                for load in args.loads
                for name in (EARLY_STOP, LAGGED)
            }
        batch = [texts[(turn * rows + i) % len(texts)] for i in range(rows)]
        return {"part": part}, pair.encode_batch(batch), calls, turn % len(calls)

    warm_up(pair, texts[0], all_rules[1])
    return measure_in_turn(pair, args, args.output / "batches.jsonl", prepare, least=len(parts))


def speed_table(done: list[dict[str, Any]], rows: int) -> Table:
    """Speed, τ and verified tokens of every rule, batch by batch against plain and full."""
    batches = [batch["calls"] for batch in done if batch["part"] == rows]
    table = Table(title=f"{rows} row(s), {len(batches)} batches", title_justify="left")
    for heading in ("rule", "tok/s", "x plain", "x full", "worst", "best", "τ", "verified"):
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for name in batches[0]:
        pace = [calls[name]["tokens"] / calls[name]["seconds"] for calls in batches]
        ratios = {
            base: [
                mine * calls[base]["seconds"] / calls[base]["tokens"]
                for mine, calls in zip(pace, batches, strict=True)
            ]
            for base in (PLAIN, FULL)
        }
        rounds = [r for calls in batches for r in calls[name]["rounds"]]
        table.add_row(
            name,
            f"{geometric_mean(pace):.1f}",
            f"{geometric_mean(ratios[PLAIN]):.3f}",
            f"{geometric_mean(ratios[FULL]):.3f}",
            f"{min(ratios[FULL]):.3f}",
            f"{max(ratios[FULL]):.3f}",
            *(f"{sum(r[i] for r in rounds) / len(rounds):.2f}" if rounds else "–" for i in (2, 1)),
        )
    return table


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def under_load(
    done: list[dict[str, Any]], profile: ThroughputProfile, loads: list[int]
) -> dict[str, list[tuple[float, float]]]:
    """By rule and load: mean verified tokens, and modelled speed of all work over plain steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for load in (0, *loads):
        for name in (FULL, FIXED, THRESHOLD, EARLY_STOP, LAGGED):
            # Only the schedulers look at the load; the others' rounds are the same under any.
            looks = load and name in (EARLY_STOP, LAGGED)
            part, key = (LOADS, f"{name} {load}") if looks else (1, name)
            rounds = [r for b in done if b["part"] == part for r in b["calls"][key]["rounds"]]
            seconds = sum(
                float(profile.step_seconds(load + 1 + verified))
                + profile.draft_seconds * (drafted > 0)
                for drafted, verified, _ in rounds
            )
            progress = sum(committed + load for *_, committed in rounds)
            plain = (1 + load) / float(profile.step_seconds(1 + load))
            verified = sum(verified for _, verified, _ in rounds) / len(rounds)
            found.setdefault(name, []).append((verified, progress / seconds / plain))
    return found


def check_settings(args: argparse.Namespace, pair: Pair) -> None:
    """One folder holds results of one setting."""
    settings = {
        "target": fingerprint(pair.target),
        "drafter": drafter_facts("drafter", pair.drafter)["id"],
        "machine": machine_facts(pair),
        "profile": json.loads(args.profile.read_text(encoding="utf-8")),
        "prompts": [path.name for path in args.prompts],
        **{name: getattr(args, name) for name in ("rows", "loads", "max_new_tokens", "cpu_time")},
    }
    path = args.output / "settings.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != settings:
        raise SystemExit(f"{args.output} holds results of other settings. Use another --output.")
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = arguments()
    plotting()
    profile, records = ThroughputProfile.load(args.profile), AcceptanceRecords.load(args.records)
    if (records.facts or {}).get("do_sample"):
        raise SystemExit(
            "These rounds were sampled. Record greedy ones: calibrate --temperature 0."
        )
    pair = load_pair(args.target, args.drafter, args.dtype, args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    check_settings(args, pair)
    all_rules = {rows: rules(pair, profile, records, rows) for rows in {1, *args.rows}}
    done = measure(pair, args, all_rules)
    console = Console()
    for rows in args.rows:
        console.print(speed_table(done, rows))
    if args.loads:
        loads = [0, *args.loads]
        by_rule = under_load(done, profile, args.loads)
        table = Table(title="1 row under load: verified tokens, x plain", title_justify="left")
        for heading in ("rule", *map(str, loads)):
            table.add_column(heading)
        for name, cells in by_rule.items():
            table.add_row(name, *(f"{verified:.2f}, {speed:.3f}" for verified, speed in cells))
        console.print(table)
        plot_verified(loads, by_rule, args.output / "loads.png")
        console.print(f"written: {args.output / 'loads.png'}")


if __name__ == "__main__":
    main()
