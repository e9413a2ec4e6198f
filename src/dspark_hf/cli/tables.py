"""Results as tables for a terminal."""

import math
from typing import Any

from rich.table import Table

_LABELS = {
    "dialect": "layout of the files",
    "block_size": "γ, drafted tokens",
    "block_width": "block slots",
    "anchor_predicts": "anchor slot predicts",
    "target_layer_ids": "taps",
    "num_target_layers": "target depth",
    "target_hidden_size": "target hidden size",
    "vocab_size": "vocabulary",
    "bound_from_target": "taken from the target",
    "num_parameters": "parameters stored",
    "num_bytes": "size",
    "num_bytes_in_memory": "size in memory",
    "ignored_config_keys": "config keys not read",
}


def description_table(description: dict[str, Any]) -> Table:
    """What `inspect` found."""
    table = Table(title=description["source"], show_header=False, title_justify="left")
    for name, value in description.items():
        if name == "source":
            continue
        if name in ("num_bytes", "num_bytes_in_memory"):
            shown = f"{value / 1e6:,.1f} MB"
        elif name == "num_parameters":
            shown = f"{value:,}"
        elif isinstance(value, dict):
            shown = "\n".join(f"{key}: {item}" for key, item in value.items()) or "nothing"
        elif isinstance(value, list):
            shown = ", ".join(map(str, value)) or "nothing"
        else:
            shown = "nothing" if value is None else str(value)
        table.add_row(_LABELS.get(name, name.replace("_", " ")), shown)
    return table


def bench_table(result: dict[str, Any]) -> Table:
    """One line a set: τ, speeds, ratios."""
    machine = result["machine"]
    table = Table(
        title=(
            f"{machine['processor']}, {machine['threads']} thread(s), {machine['dtype']}, "
            f"{result['max_new_tokens']} new tokens, temperature {result['temperature']:g}"
        ),
        title_justify="left",
    )
    for heading in (
        "set",
        "prompts",
        "τ",
        "plain tok/s",
        "look-up ×",
        "drafter ×",
        "loop eff.",
        "gap",
    ):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for row in [*result["sets"], result["total"]]:
        table.add_row(
            row["name"],
            str(row["num_prompts"]),
            f"{row['accepted_length']:.2f}",
            f"{row['plain_tokens_per_second']:.1f}",
            "–" if row["lookup_speedup"] is None else f"{row['lookup_speedup']:.2f}",
            f"{row['drafter_speedup']:.2f}",
            f"{row['loop_efficiency']:.2f}",
            "–" if row["worst_gap"] is None else f"{row['worst_gap']:.3f}",
        )
    return table


def evaluation_tables(results: dict[str, Any]) -> list[Table]:
    """Per temperature, a line per set: τ and speed-up of every drafter."""
    tables = []
    for temperature in dict.fromkeys(result["temperature"] for result in results["results"]):
        here = [r for r in results["results"] if r["temperature"] == temperature]
        table = Table(title=f"temperature {temperature:g}", title_justify="left")
        table.add_column("set")
        table.add_column("prompts", justify="right")
        for result in here:
            table.add_column(f"τ {result['drafter']}", justify="right")
            table.add_column("× plain", justify="right")
        prompts = str(sum(figures["num_prompts"] for figures in here[0]["sets"]))
        rows = [
            (figures["name"], str(figures["num_prompts"]), [r["sets"][i] for r in here])
            for i, figures in enumerate(here[0]["sets"])
        ]
        rows.append(("macro", prompts, [result["macro"] for result in here]))
        for name, count, cells in rows:
            pairs = ((c["accepted_length"], c["speedup"]) for c in cells)
            table.add_row(
                name,
                count,
                *("–" if math.isnan(x) else f"{x:.2f}" for pair in pairs for x in pair),
                end_section=name == rows[-2][0],
            )
        tables.append(table)
    return tables
