"""Drafters whose accepted length is known exactly, on prompts of a one-character-a-token target."""

import dataclasses

import torch
from test_stopping import character_tokenizer

from dspark_hf.evaluation.prompts import PromptSet, encode_prompt
from tiny import make_drafter, make_target

GAMMA, NEW_TOKENS = 4, 16
SETS = [
    PromptSet("gsm8k", ("buoy", "lighthouse"), "gsm8k.jsonl"),
    PromptSet("mt-bench", ("waves", "sand", "kelp"), "mt-bench.jsonl"),
]


def greedy_texts(target, tokenizer, sets=SETS, new_tokens=NEW_TOKENS + GAMMA):
    """Whole greedy texts (1, length), a bit longer than an evaluation asks for."""
    texts = []
    for prompts in sets:
        for prompt in prompts.prompts:
            inputs = encode_prompt(tokenizer, prompt, "cpu")
            texts.append(
                target.generate(
                    **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None
                )
            )
    return texts


def make_right_for(num_right, texts, seed=1, **overrides):
    """A drafter whose first `num_right` tokens continue whichever of `texts` it is in."""
    drafter = make_drafter(block_size=GAMMA, seed=seed, **overrides)
    draft = drafter.draft

    def scripted(context, anchor_ids, **kwargs):
        block = draft(context, anchor_ids, **kwargs)
        so_far = kwargs["input_ids"]
        length = so_far.shape[1]
        known = [t for t in texts if torch.equal(t[:, :length], so_far)]
        if not known:  # The prompt that warms up.
            return block
        right = known[0][:, length : length + GAMMA]
        wrong = (right + 1) % drafter.config.vocab_size
        return dataclasses.replace(
            block, tokens=torch.where(torch.arange(GAMMA) < num_right, right, wrong)
        )

    drafter.draft = scripted
    return drafter


def make_pair():
    """A tiny target and its tokenizer."""
    return make_target("qwen3"), character_tokenizer()
