"""
Memory and time of a DeepSeek-V4 drafter of full width, from a checkpoint of random packed weights.

    python benchmarks/deepseek_v4_drafter.py --folder FOLDER [--stages 1] [--threads 1]

A checkpoint with the shapes and number formats of V4-Flash-DSpark is written to FOLDER (3.6 GB for
each stage) and loaded in a process of its own. Reported are the peak of the resident set while
loading, the part of it that is not the mapped file, both against the size of the file; and the time
of a block of 5 tokens behind a full window of 128. The values are random, so nothing is accepted:
memory and time do not depend on them, the number of different experts that a block selects does,
and it is counted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

VOCAB, HIDDEN, WIDTH, EXPERTS, HEADS, RANK, GROUPS = 129280, 4096, 2048, 256, 64, 1024, 8
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 43,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": RANK,
    "o_groups": GROUPS,
    "o_lora_rank": 1024,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rope_theta": 10000,
    "max_position_embeddings": 1048576,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def write_checkpoint(folder: Path, stages: int) -> None:
    """Random weights in the published formats, one shard for each stage."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    weight_map = {}
    for stage in range(stages):
        name = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
        tensors = {
            f"mtp.{stage}.{key}": value
            for key, value in stage_tensors(stage, stages - 1, generator).items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def stage_tensors(stage: int, last: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One stage of the drafter, by the names inside `mtp.{stage}.`."""

    def floats(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=generator) * 0.02).to(dtype)

    def scales(*shape, low, high):
        values = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        return values.view(torch.float8_e8m0fnu)

    tensors = {
        "attn.attn_sink": torch.zeros(HEADS),
        "attn.q_norm.weight": torch.ones(RANK, dtype=torch.bfloat16),
        "attn.kv_norm.weight": torch.ones(512, dtype=torch.bfloat16),
        "attn_norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "ffn_norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "ffn.gate.weight": floats(EXPERTS, HIDDEN),
        "ffn.gate.bias": torch.zeros(EXPERTS),
    }
    for place in ("attn", "ffn"):
        tensors[f"hc_{place}_fn"] = floats(24, 4 * HIDDEN, dtype=torch.float32)
        tensors[f"hc_{place}_base"] = torch.zeros(24)
        tensors[f"hc_{place}_scale"] = torch.ones(3)
    fp8 = {
        "attn.wq_a": (RANK, HIDDEN),
        "attn.wq_b": (HEADS * 512, RANK),
        "attn.wkv": (512, HIDDEN),
        "attn.wo_a": (GROUPS * 1024, HEADS * 512 // GROUPS),
        "attn.wo_b": (HIDDEN, GROUPS * 1024),
        "ffn.shared_experts.w1": (WIDTH, HIDDEN),
        "ffn.shared_experts.w3": (WIDTH, HIDDEN),
        "ffn.shared_experts.w2": (HIDDEN, WIDTH),
    }
    if stage == 0:
        fp8["main_proj"] = (HIDDEN, 3 * HIDDEN)
        tensors["main_norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for name, (rows, columns) in fp8.items():
        codes = torch.randn(rows, columns, generator=generator)
        tensors[f"{name}.weight"] = codes.to(torch.float8_e4m3fn)
        tensors[f"{name}.scale"] = scales(rows // 128, columns // 128, low=120, high=122)
    # Every expert is a piece of one pool of bytes: drawing all of them would take minutes.
    pool = torch.randint(-128, 128, (1 << 24,), generator=generator, dtype=torch.int8)
    for expert in range(EXPERTS):
        for part, (rows, columns) in {
            "w1": (WIDTH, HIDDEN),
            "w3": (WIDTH, HIDDEN),
            "w2": (HIDDEN, WIDTH),
        }.items():
            name = f"ffn.experts.{expert}.{part}"
            start = int(torch.randint(len(pool) // 2, (), generator=generator))
            piece = pool[start : start + rows * columns // 2]
            tensors[f"{name}.weight"] = piece.view(rows, columns // 2).clone()
            tensors[f"{name}.scale"] = scales(rows, columns // 32, low=118, high=121)
    if stage == last:
        tensors |= {
            "norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
            "hc_head_fn": floats(4, 4 * HIDDEN, dtype=torch.float32),
            "hc_head_base": torch.zeros(4),
            "hc_head_scale": torch.ones(1),
            "markov_head.markov_w1.weight": floats(VOCAB, 256),
            "markov_head.markov_w2.weight": floats(VOCAB, 256),
            "confidence_head.proj.weight": floats(1, HIDDEN + 256),
        }
    return tensors


def status_bytes(field: str) -> int:
    """A line of this process's memory status (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; this benchmark needs Linux.")


class PeakOf:
    """Largest value of a memory field while the context is open, sampled every 10 ms."""

    def __init__(self, field: str):
        self.field, self.peak, self._stop = field, 0, threading.Event()

    def __enter__(self) -> "PeakOf":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, status_bytes(self.field))


def measure(folder: Path, threads: int, repeats: int) -> dict:
    """Load and draft, in this process."""
    from dspark_hf import DSparkDrafter

    torch.set_num_threads(threads)
    file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    anonymous = status_bytes("RssAnon")
    started = time.perf_counter()
    with PeakOf("RssAnon") as peak:
        drafter = DSparkDrafter.from_pretrained(folder, dtype="auto").eval()
    loading = time.perf_counter() - started
    resident = status_bytes("VmHWM")
    held = status_bytes("RssAnon") - anonymous
    shared = torch.nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16)
    head.weight = shared.weight
    drafter.bind(input_embeddings=shared, output_embeddings=head)
    selected = []
    for layer in drafter.layers:
        layer.mlp.gate.register_forward_hook(
            lambda module, args, output: selected.append(len(output[2].unique()))
        )
    context = drafter.new_context(1)
    drafter.extend(context, torch.randn(1, 128, 3 * HIDDEN, dtype=torch.bfloat16))
    times, processor_times = [], []
    for i in range(repeats + 1):
        started, busy = time.perf_counter(), time.process_time()
        drafter.draft(context, torch.tensor([1000 + i]))
        times.append(time.perf_counter() - started)
        processor_times.append(time.process_time() - busy)
    return {
        "file_bytes": file_bytes,
        "held_bytes": held,
        "held_over_file": held / file_bytes,
        "peak_bytes_without_mapped_file": peak.peak - anonymous,
        "peak_over_file": (peak.peak - anonymous) / file_bytes,
        "peak_resident_bytes": resident,
        "loading_seconds": loading,
        # The first block fills tables and caches.
        "block_seconds": statistics.median(times[1:]),
        # On a machine that does other work, this is the figure that means something.
        "block_processor_seconds": statistics.median(processor_times[1:]),
        "experts_per_stage_and_block": statistics.mean(selected),
        "stages": len(drafter.layers),
        "threads": threads,
        "dtype": "bfloat16",
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        result = measure(options.folder, options.threads, options.repeats)
        print(json.dumps(result, indent=2))
        return
    if not (options.folder / "config.json").is_file():
        write_checkpoint(options.folder, options.stages)
    # A process of its own: what writing took is no part of the peak.
    command = [sys.executable, __file__, "--measure", "--folder", str(options.folder)]
    command += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
