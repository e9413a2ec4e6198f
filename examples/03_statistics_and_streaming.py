"""
What speculation did, and tokens as they come.

    python examples/03_statistics_and_streaming.py [TARGET DRAFTER]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from dspark_hf import DSparkDrafter, collect_statistics
from dspark_hf.cli.models import shipped_drafter, smollm2_source

target_name, drafter_name = (
    sys.argv[1:3] if len(sys.argv) > 2 else (smollm2_source(), shipped_drafter())
)

tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
drafter = DSparkDrafter.from_pretrained(drafter_name, dtype=torch.float32)

messages = [{"role": "user", "content": "Write a haiku about the sea."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

# Statistics of all calls inside the block, and the text while it is generated.
with collect_statistics() as statistics:
    target.generate(
        **inputs,
        max_new_tokens=48,
        do_sample=False,
        assistant_model=drafter,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )

print(f"accepted length τ: {statistics.accepted_length:.2f} tokens a round, bonus token included")
for k, (prefix, conditional) in enumerate(
    zip(statistics.prefix_acceptance, statistics.conditional_acceptance, strict=True), start=1
):
    print(
        f"draft token {k}: accepted {prefix:.0%} of rounds, {conditional:.0%} when all earlier were"
    )

# The same counts come with the dict output of a single call.
output = target.generate(
    **inputs,
    max_new_tokens=16,
    do_sample=False,
    assistant_model=drafter,
    return_dict_in_generate=True,
)
print("rounds of the second call:", output.statistics.rounds)
