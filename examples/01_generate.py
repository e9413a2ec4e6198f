"""The same text with and without a drafter: `python examples/01_generate.py [TARGET DRAFTER]`."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.cli.models import shipped_drafter, smollm2_source

target_name, drafter_name = (
    sys.argv[1:3] if len(sys.argv) > 2 else (smollm2_source(), shipped_drafter())
)

tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
drafter = DSparkDrafter.from_pretrained(drafter_name, dtype=torch.float32)

messages = [{"role": "user", "content": "Name three things that float on water."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
drafted = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter)

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("identical to plain decoding:", torch.equal(plain, drafted))

# Sampling works the same way and has the target's distribution; top-k, top-p, penalties and other
# processors apply.
sampled = target.generate(**inputs, max_new_tokens=48, do_sample=True, assistant_model=drafter)
print(tokenizer.decode(sampled[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
