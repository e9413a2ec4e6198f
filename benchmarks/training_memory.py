"""
Peak memory and speed of one training step, chunked and with whole logits.

    python benchmarks/training_memory.py --target TARGET [--length 1024] [--anchors 512]

A DSpark drafter (block 7, two layers) of the target takes a step on one random text: with the
objective as it is, and with draft logits, teacher logits and their softmaxes written out over all
positions and the whole vocabulary, as automatic differentiation wants them. Each runs in a process
of its own. Reported is the peak of the resident set above the loaded models and the target's
states, and anchors per second of processor time, which other work on the machine does not change.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

MODES = ("chunked", "whole logits")


def naive_loss():
    """A stand-in for `vocabulary_loss` that keeps everything."""
    from torch.nn import functional

    from dspark_hf.training.vocabulary_loss import VocabularyLoss

    def loss(hidden, latents, w2, head, teacher, labels, weights, ce_weight, tv_weight, chunk_rows):
        scores = (functional.linear(hidden, head.weight) + functional.linear(latents, w2)).float()
        p = functional.linear(teacher.hidden, teacher.weight).float().softmax(dim=-1)
        ce = functional.cross_entropy(scores, labels, reduction="none")
        tv = (scores.softmax(dim=-1) - p).abs().sum(dim=-1)
        ce_sum, tv_sum = (weights * ce).sum(), (weights * tv).sum()
        acceptance = (1 - 0.5 * tv).clamp(0, 1).detach()
        total = ce_weight * ce_sum + tv_weight * tv_sum
        return VocabularyLoss(total, ce_sum.detach(), tv_sum.detach(), acceptance)

    return loss


def measure(target_name: str, length: int, anchors: int, mode: str) -> dict[str, float]:
    """Peak megabytes and anchors per second of processor time, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from dspark_hf.training import objective as objective_module
    from dspark_hf.training.build import build_drafter
    from dspark_hf.training.target_states import TargetReader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if mode == "whole logits":
        objective_module.vocabulary_loss = naive_loss()
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.bfloat16)
    drafter = build_drafter(target, mask_token_id=16, num_layers=2, markov_rank=64).float()
    reader = TargetReader(target, drafter.config.target_layer_ids)
    ids = torch.randint(10, 1000, (1, length))
    mask = torch.ones_like(ids)
    states = reader(ids, mask)
    objective = objective_module.DSparkObjective(drafter, num_anchors=anchors)
    teacher = reader.teacher(states.last_hidden[:0, 0])

    # Loading has a peak of its own; Linux forgets it on request.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before, started = status_megabytes("VmRSS"), time.process_time()
    with torch.autocast("cpu", torch.bfloat16):
        loss, sums = objective(ids, mask, mask.bool(), states, teacher)
    loss.backward()
    seconds = time.process_time() - started
    return {
        "megabytes": status_megabytes("VmHWM") - before,
        "anchors": float(sums.count[0]) / seconds,
    }


def status_megabytes(field: str) -> float:
    """A size from this process's status file."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--target", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--mode", choices=MODES, help="measure one mode in this process")
    arguments = parser.parse_args()
    if arguments.mode:
        mode = arguments.mode
        figures = measure(arguments.target, arguments.length, arguments.anchors, mode)
        print(json.dumps(figures))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--mode"]
    for mode in MODES:
        result = subprocess.run([*command, mode], check=True, capture_output=True, text=True)
        figures = json.loads(result.stdout.splitlines()[-1])
        print(
            f"{mode:>12}: {figures['megabytes']:8.0f} MB above the models, "
            f"{figures['anchors']:6.1f} anchors per CPU second"
        )


if __name__ == "__main__":
    main()
