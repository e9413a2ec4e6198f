"""What the trainer reads of a target, and targets that it cannot read."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from dspark_hf.training.target_states import TargetReader
from tiny import HIDDEN, VOCAB, make_prompt, make_target

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TARGETS = {
    "qwen3": make_target,
    "gpt2": lambda: make_target("gpt2"),
    "gemma2, soft cap": lambda: make_target("gemma2"),
    "granite, logits_scaling": lambda: GraniteForCausalLM(
        GraniteConfig(**SHARED, logits_scaling=3.0)
    ),
    "cohere, logit_scale": lambda: CohereForCausalLM(CohereConfig(**SHARED, logit_scale=0.25)),
}


@pytest.mark.parametrize("case", TARGETS)
def test_states_and_head_give_the_targets_own_distribution(case):
    target = TARGETS[case]().eval()
    reader = TargetReader(target, [0, 2], with_normaliser=True)
    ids = make_prompt(12)
    states = reader(ids, torch.ones_like(ids))
    expected = target(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(
        states.features, torch.cat([expected.hidden_states[i] for i in (1, 3)], dim=-1)
    )
    teacher = reader.teacher(states.last_hidden[0])
    probs = teacher.probabilities(slice(3, 9), teacher.rows_of_head(None, torch.float32), None)
    torch.testing.assert_close(probs, expected.logits[0, 3:9].softmax(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(states.log_normaliser, expected.logits.logsumexp(-1))
    assert not states.features.requires_grad


def test_hooks_are_gone_and_no_logits_of_the_sequence_are_formed():
    target = make_target()
    reader = TargetReader(target, [1])
    target.lm_head.register_forward_hook(lambda *args: pytest.fail("the head ran"))
    ids = make_prompt(9)
    reader(ids, torch.ones_like(ids))
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_a_target_whose_head_is_not_the_whole_story_is_refused():
    target = make_target()
    forward = target.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    target.forward = scaled
    with pytest.raises(ValueError, match="are not its output head applied to"):
        TargetReader(target, [0])


def test_a_head_with_bias_is_refused():
    """Drafting would add the bias and training would not."""
    target = PhiForCausalLM(PhiConfig(**SHARED)).eval()
    assert target.lm_head.bias is not None
    with pytest.raises(ValueError, match="not a plain weight without bias"):
        TargetReader(target, [0])
