"""
Peak memory of the prefill, plain and with a drafter, each in a process of its own.

    python benchmarks/prefill_memory.py --target TARGET --drafter DRAFTER [--length 2000]

Plain decoding, decoding with the drafter, and plain decoding that returns every layer's hidden
states (what a drafter would cost without taps) are run on the same random prompt for three tokens.
Reported is the peak of the resident set above what the loaded models occupy.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

MODES = ("plain", "drafter", "all hidden states")


def measure(target: str, drafter: str, length: int, mode: str) -> float:
    """Peak megabytes above the loaded models, in this process."""
    import torch

    from dspark_hf.cli.models import load_pair

    pair = load_pair(target, drafter, "bfloat16", threads=1)
    ids = torch.randint(10, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 3, "do_sample": False}
    if mode == "drafter":
        options["assistant_model"] = pair.drafter
    if mode == "all hidden states":
        options |= {"return_dict_in_generate": True, "output_hidden_states": True}
    pair.target.generate(ids[:, :16], **options)  # Buffers of the kernels themselves.
    # Loading has a peak of its own; Linux forgets it on request.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = status_megabytes("VmRSS")
    pair.target.generate(ids, **options)
    return status_megabytes("VmHWM") - before


def status_megabytes(field: str) -> float:
    """A size from this process's status file."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--mode", choices=MODES, help="measure one mode in this process")
    arguments = parser.parse_args()
    if arguments.mode:
        mode = arguments.mode
        print(json.dumps(measure(arguments.target, arguments.drafter, arguments.length, mode)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--mode"]
    for mode in MODES:
        result = subprocess.run([*command, mode], check=True, capture_output=True, text=True)
        print(f"{mode:>18}: {json.loads(result.stdout.splitlines()[-1]):8.1f} MB above the models")


if __name__ == "__main__":
    main()
