"""
Acceptance by slot of several training runs, on their held-out answers.

    python benchmarks/slot_acceptance.py runs/smollm2/compare-* --output slots.png

Reads the `training_result.json` of each run. The figures are exact expectations at temperature 1
under teacher forcing: the chance that draft token k is accepted given that all before it were.
"""

import argparse
import json
from pathlib import Path

from dspark_hf.cli.plots import plotting

MARKERS = "osD^vP"


def main() -> None:
    """Draw one line per run and print expected τ."""
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of `dspark-hf train`")
    parser.add_argument("--output", type=Path, required=True, help="PNG, PDF or SVG")
    arguments = parser.parse_args()
    plt = plotting()
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for i, run in enumerate(arguments.runs):
        result = json.loads((run / "training_result.json").read_text(encoding="utf-8"))
        evaluation, rates = result["evaluation"], []
        while f"eval_acceptance_{len(rates) + 1}" in evaluation:
            rates.append(100 * evaluation[f"eval_acceptance_{len(rates) + 1}"])
        tau = evaluation["eval_expected_tau"]
        label = f"{run.name.removeprefix('compare-')}, expected τ {tau:.3f}"
        slots = range(1, len(rates) + 1)
        axes.plot(slots, rates, marker=MARKERS[i % len(MARKERS)], label=label)
        print(f"{label}: {', '.join(f'{rate:.1f} %' for rate in rates)}")
    axes.set(xlabel="slot", ylabel="acceptance given all before, %", ylim=(0, None))
    axes.set_xticks(list(slots))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(arguments.output, dpi=150)


if __name__ == "__main__":
    main()
