"""A text-generation pipeline with a drafter: `python examples/02_pipeline.py [TARGET DRAFTER]`."""

import sys

from transformers import pipeline

import dspark_hf  # noqa: F401 - makes the pipeline understand a drafter's path
from dspark_hf.cli.models import shipped_drafter, smollm2_source

target_name, drafter_name = (
    sys.argv[1:3] if len(sys.argv) > 2 else (smollm2_source(), shipped_drafter())
)

# A path or Hub id, in this library's layout or a published one; a loaded drafter object works as
# well.
generator = pipeline(
    "text-generation",
    model=target_name,
    assistant_model=drafter_name,
    dtype="float32",
    device="cpu",
)

messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = generator(messages, max_new_tokens=32, do_sample=False)
print(answer[0]["generated_text"][-1]["content"])

# The drafter's fields are ordinary generation options.
answer = generator(
    messages,
    max_new_tokens=32,
    do_sample=False,
    num_assistant_tokens=4,
    dspark_confidence_threshold=0.3,
)
print(answer[0]["generated_text"][-1]["content"])
