"""
Run by torchrun on two processes: every way of generating with several processes, one after the
other. Exits with an error where a rank disagrees.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from batches import make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from tiny import make_drafter, make_target
from tiny_v4 import make_v4_drafter, make_v4_target

CARDS = Path(__file__).parents[2] / "model_cards"


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def check_tensor_parallel(folder: str) -> None:
    """Both ranks hold half of every head and a whole drafter."""
    whole = make_target("llama", num_key_value_heads=2)
    target = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    assert target.tp_size == 2
    prompts = make_prompts([6, 3, 8])
    batch = pad_left(prompts)
    expected = whole.generate(**batch, max_new_tokens=16, do_sample=False)
    texts = [row[8 - p.shape[1] :] for row, p in zip(expected, prompts, strict=True)]
    drafter = script_rows(make_drafter(), texts, [4, 0, 2])
    with collect_statistics() as statistics:
        found = target.generate(
            **batch, max_new_tokens=16, do_sample=False, assistant_model=drafter
        )
    assert torch.equal(found, expected)
    assert statistics.accepted > 15

    # Ranks draw from generators of their own; what the first one draws counts.
    torch.manual_seed(dist.get_rank())
    for options in ({}, {"dspark_confidence_threshold": 0.5}):
        sampled = target.generate(
            **batch, max_new_tokens=16, do_sample=True, assistant_model=make_drafter(), **options
        )
        first, second = gathered(sampled)
        assert torch.equal(first, second)


def launch_options() -> dict[str, Any]:
    """What the cards of DeepSeek-V4 give to `DistributedConfig`, with 2 ranks in place of 8."""
    texts = {
        re.search(r"DistributedConfig\(.*?\)", card.read_text(encoding="utf-8"), re.S).group()
        for card in CARDS.glob("DeepSeek-V4-*.md")
    }
    call = ast.parse(texts.pop(), mode="eval").body
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert not texts
    return {name: 2 if value == 8 else value for name, value in options.items()}


def check_expert_parallel(folder: str) -> None:
    """Experts of a DeepSeek-V4 target spread over the ranks, a whole drafter on each."""
    whole, prompts = make_v4_target(), torch.cat(make_prompts([7, 7]))
    target = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(**launch_options()),
    )
    assert target.model.layers[0].mlp.experts.gate_up_proj.to_local().shape[0] == 2
    expected = whole.generate(prompts, max_new_tokens=16, do_sample=False)
    drafter = script_rows(make_v4_drafter(), list(expected), [5, 2])
    with collect_statistics() as statistics:
        found = target.generate(
            prompts, max_new_tokens=16, do_sample=False, assistant_model=drafter
        )
    assert torch.equal(found, expected)
    assert statistics.accepted > 15
    torch.manual_seed(dist.get_rank())
    sampled = target.generate(
        prompts, max_new_tokens=16, do_sample=True, assistant_model=make_v4_drafter()
    )
    first, second = gathered(sampled)
    assert torch.equal(first, second)


def check_ranks_that_finish_at_different_times() -> None:
    """Sharded parameters: every forward is a collective, so all ranks run as many."""
    rank, whole = dist.get_rank(), make_target("llama")
    prompts = make_prompts([4 + 3 * rank, 5], seed=11 + 20 * rank)
    expected = whole.generate(**pad_left(prompts), max_new_tokens=12, do_sample=False)
    width = expected.shape[1] - 12
    texts = [row[width - p.shape[1] :] for row, p in zip(expected, prompts, strict=True)]
    target = make_target("llama")
    for layer in target.model.layers:
        fully_shard(layer)
    fully_shard(target)
    drafter = script_rows(make_drafter(), texts, [4 * rank, 4 * rank])
    with collect_statistics() as statistics:
        found = target.generate(
            **pad_left(prompts),
            max_new_tokens=12,
            do_sample=False,
            assistant_model=drafter,
            synced_gpus=True,
        )
    assert torch.equal(found, expected)
    rounds = [int(part) for part in gathered(torch.tensor([statistics.rounds]))]
    assert rounds[0] > 2 * rounds[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    check_tensor_parallel(f"{sys.argv[1]}/llama")
    check_expert_parallel(f"{sys.argv[1]}/deepseek_v4")
    check_ranks_that_finish_at_different_times()
    dist.barrier()
    dist.destroy_process_group()
