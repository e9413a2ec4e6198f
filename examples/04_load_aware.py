"""
Verify only what is worth it on this machine, at this load.

    python examples/04_load_aware.py [TARGET DRAFTER]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, collect_statistics, measure_throughput
from dspark_hf.cli.models import shipped_drafter, smollm2_source

target_name, drafter_name = (
    sys.argv[1:3] if len(sys.argv) > 2 else (smollm2_source(), shipped_drafter())
)

tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
drafter = DSparkDrafter.from_pretrained(drafter_name, dtype=torch.float32)

messages = [{"role": "user", "content": "How does a lighthouse work?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

# How long a target step takes, by the tokens in it. dspark_throughput_profile="auto" does the same
# once and keeps the result; `dspark-hf profile` writes it to a file.
profile = measure_throughput(
    target, drafter, token_counts=[1, 2, 4, 8, 16, 32], context_length=64, repeats=3
)
for tokens in profile.tokens:
    print(f"{tokens:3d} tokens: {1000 * profile.step_seconds(tokens):.1f} ms")

plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
for load in (0, 8, 64):
    with collect_statistics() as statistics:
        output = target.generate(
            **inputs,
            max_new_tokens=32,
            do_sample=False,
            assistant_model=drafter,
            dspark_verification="scheduled",
            dspark_throughput_profile=profile.as_dict(),
            dspark_load=load,
        )
    print(
        f"load {load:2d}: {statistics.verified / statistics.rounds:.1f} tokens verified per round, "
        f"τ {statistics.accepted_length:.2f}, same text: {torch.equal(plain, output)}"
    )
