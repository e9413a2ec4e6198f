"""Greedy output equals plain `generate` token for token, whatever the drafter says."""

import functools

import pytest
import torch

from dspark_hf import collect_statistics
from dspark_hf.losslessness import greedy_gaps
from tiny import (
    FAMILIES,
    FAMILIES_AND_KERNELS,
    make_drafter,
    make_prompt,
    make_scripted,
    make_target,
)

NEW_TOKENS = 24


@functools.cache
def target_of(family, attention="sdpa"):
    return make_target(family, attention=attention)


@functools.cache
def reference(family, attention, prompt_length, new_tokens):
    prompt = make_prompt(prompt_length)
    target = target_of(family, attention)
    return prompt, target.generate(prompt, max_new_tokens=new_tokens, do_sample=False)


def run(target, prompt, drafter, new_tokens, **options):
    with collect_statistics() as statistics:
        output = target.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, assistant_model=drafter, **options
        )
    return output, statistics


@pytest.mark.parametrize(("family", "attention"), FAMILIES_AND_KERNELS)
@pytest.mark.parametrize("block_size", range(1, 9))
def test_every_accepted_count_is_exact(family, attention, block_size):
    """B012, B018, B019, B046, B099."""
    target = target_of(family, attention)
    prompt, expected = reference(family, attention, 6, NEW_TOKENS)
    for num_right in range(block_size + 1):
        drafter = make_scripted(make_drafter(block_size=block_size), expected, num_right)
        output, statistics = run(target, prompt, drafter, NEW_TOKENS)
        assert torch.equal(output, expected), (num_right, output, expected)
        # The double is right exactly so often: the loop must have used every right token.
        full = [k for k, count in statistics.verify_lengths.items() if count and k == block_size]
        assert statistics.accepted_at[:num_right] == statistics.verified_at[:num_right]
        assert not any(statistics.accepted_at[num_right:])
        assert full or block_size > NEW_TOKENS
        if num_right:
            assert statistics.rounds <= NEW_TOKENS // (num_right + 1) + 1


@pytest.mark.parametrize(
    ("family", "attention"),
    [pair for pair in FAMILIES_AND_KERNELS if pair[0] in ("mistral_swa", "gemma2", "gemma3")],
)
@pytest.mark.parametrize("prompt_length", [5, 12])
def test_exact_far_past_the_sliding_window(family, attention, prompt_length):
    """B041, B043: window 8, 44 new tokens."""
    target = target_of(family, attention)
    prompt, expected = reference(family, attention, prompt_length, 44)
    for num_right in range(7):
        drafter = make_scripted(make_drafter(block_size=6), expected, num_right)
        output, statistics = run(target, prompt, drafter, 44)
        assert torch.equal(output, expected)
        assert statistics.accepted == sum(statistics.verified_at[:num_right])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_drafter_is_exact(family):
    """B099: rejected at once, the text stays."""
    prompt, expected = reference(family, "sdpa", 6, NEW_TOKENS)
    output, _ = run(target_of(family), prompt, make_drafter(), NEW_TOKENS)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("prompt_length", [1, 2, 4, 50])
def test_prompt_lengths(prompt_length):
    """B051, B065."""
    prompt, expected = reference("qwen3", "sdpa", prompt_length, 16)
    for num_right in range(5):
        drafter = make_scripted(make_drafter(), expected, num_right)
        assert torch.equal(run(target_of("qwen3"), prompt, drafter, 16)[0], expected)


@pytest.mark.parametrize("new_tokens", range(1, 8))
def test_every_length_up_to_block_plus_three(new_tokens):
    """B026, B065: exactly as many tokens as asked for, and no draft that cannot be used."""
    prompt, expected = reference("qwen3", "sdpa", 6, new_tokens)
    longer = reference("qwen3", "sdpa", 6, NEW_TOKENS)[1]
    for num_right in range(5):
        drafter = make_scripted(make_drafter(), longer, num_right)
        output, statistics = run(target_of("qwen3"), prompt, drafter, new_tokens)
        assert torch.equal(output, expected)
        assert statistics.new_tokens == new_tokens
        assert max(statistics.verify_lengths, default=0) < new_tokens


@pytest.mark.parametrize("num_right", range(5))
def test_to_the_last_learned_position(num_right):
    """B065: prompt and text fill the 256 rows of the position table; no draft runs over its end."""
    prompt, expected = reference("gpt2", "sdpa", 248, 8)
    assert expected.shape[1] == target_of("gpt2").config.n_positions
    drafter = make_scripted(make_drafter(), expected, num_right)
    assert torch.equal(run(target_of("gpt2"), prompt, drafter, 8)[0], expected)


def test_ties_fall_as_in_plain_decoding():
    """B013: every token has a twin with the same logit; the same one of the two wins."""
    target = make_target("qwen3")
    with torch.no_grad():
        target.lm_head.weight[48:96] = target.lm_head.weight[:48]
    prompt = make_prompt(6)
    expected = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    for num_right in range(5):
        drafter = make_scripted(make_drafter(), expected, num_right)
        output, statistics = run(target, prompt, drafter, NEW_TOKENS)
        assert torch.equal(output, expected)
        assert statistics.accepted == sum(statistics.verified_at[:num_right])


def test_max_length_of_one_more_token():
    """B026."""
    prompt, expected = reference("qwen3", "sdpa", 6, 1)
    output = target_of("qwen3").generate(
        prompt, max_length=7, do_sample=False, assistant_model=make_drafter()
    )
    assert torch.equal(output, expected)


def test_past_the_drafters_trained_context():
    """B088: the drafter knows 64 positions; acceptance may suffer, the text may not."""
    prompt, expected = reference("qwen3", "sdpa", 50, 60)
    drafter = make_scripted(make_drafter(), expected, 2)
    output, statistics = run(target_of("qwen3"), prompt, drafter, 60)
    assert torch.equal(output, expected)
    assert statistics.accepted_length > 2.5


def test_both_block_layouts_are_exact_and_draft_as_many_tokens():
    """B071: γ tokens either way; the infill layout runs one slot more."""
    prompt, expected = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    for anchor_predicts in (True, False):
        for num_right in (None, 0, 1, 2, 3, 4):
            drafter = make_drafter(anchor_predicts=anchor_predicts)
            assert drafter.config.block_width == 4 + (not anchor_predicts)
            if num_right is not None:
                drafter = make_scripted(drafter, expected, num_right)
            output, statistics = run(target_of("qwen3"), prompt, drafter, NEW_TOKENS)
            assert torch.equal(output, expected)
            assert statistics.drafted == 4 * sum(
                count for length, count in statistics.verify_lengths.items() if length
            )
            if num_right is not None:
                assert statistics.accepted == sum(statistics.verified_at[:num_right])


@pytest.mark.parametrize("markov", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("stored", [True, False])
def test_every_head_and_bound_or_stored_embeddings(markov, stored):
    """B084: an unbound drafter borrows the target's modules for the call and stays unbound."""
    prompt, expected = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    drafter = make_drafter(markov=markov, stored=stored)
    output, _ = run(target_of("qwen3"), prompt, drafter, NEW_TOKENS)
    assert torch.equal(output, expected)
    assert (drafter.get_output_embeddings() is None) == (not stored)


def test_taps_at_both_ends():
    """B067, B068: the first layer's input and the last layer's raw output are taps like others."""
    prompt, expected = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    drafter = make_drafter(taps=(-1, 3))
    assert torch.equal(run(target_of("qwen3"), prompt, drafter, NEW_TOKENS)[0], expected)


def test_left_padded_prompt_gives_the_same_text_and_the_same_drafts():
    """B057: one row, padded by 0, 1 and 7."""
    prompt, _ = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    target = target_of("qwen3")
    texts, drafts = [], []
    for padding in (0, 1, 7):
        drafter = make_drafter()
        draft, seen = drafter.draft, []

        def recording(*args, draft=draft, seen=seen, **kwargs):
            seen.append(draft(*args, **kwargs))
            return seen[-1]

        drafter.draft = recording
        padded = torch.nn.functional.pad(prompt, (padding, 0), value=0)
        mask = torch.nn.functional.pad(torch.ones_like(prompt), (padding, 0))
        output, _ = run(target, padded, drafter, 12, attention_mask=mask)
        texts.append(output[:, padding:])
        drafts.append(torch.cat([block.base_logits for block in seen]))
    for text, logits in zip(texts[1:], drafts[1:], strict=True):
        assert torch.equal(text, texts[0])
        torch.testing.assert_close(logits, drafts[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("masked", [(6, 7), (2,), (0, 3)], ids=str)
def test_masked_positions_elsewhere_than_on_the_left(masked):
    """B064: right padding and holes are read as plain decoding reads them."""
    prompt, target = make_prompt(8), target_of("llama")
    mask = torch.ones_like(prompt)
    mask[0, list(masked)] = 0
    expected = target.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert not torch.equal(expected, reference("llama", "sdpa", 8, NEW_TOKENS)[1])
    for num_right in range(5):
        drafter = make_scripted(make_drafter(), expected, num_right)
        output, _ = run(target, prompt, drafter, NEW_TOKENS, attention_mask=mask)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("mask_dtype", [torch.long, torch.bool, torch.float32, None])
@pytest.mark.parametrize("with_positions", [True, False])
def test_masks_and_positions_given_or_not(mask_dtype, with_positions):
    """B059."""
    prompt, expected = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    options = {}
    if mask_dtype is not None:
        options["attention_mask"] = torch.ones_like(prompt, dtype=mask_dtype)
    if with_positions:
        options["position_ids"] = torch.arange(6)[None]
    drafter = make_scripted(make_drafter(), expected, 3)
    output, _ = run(target_of("qwen3"), prompt, drafter, NEW_TOKENS, **options)
    assert torch.equal(output, expected)


def test_prompt_given_as_embeddings():
    """B065: no ids in front of the first new token."""
    prompt, expected = reference("qwen3", "sdpa", 6, NEW_TOKENS)
    target = target_of("qwen3")
    embeddings = target.get_input_embeddings()(prompt)
    output = target.generate(
        inputs_embeds=embeddings,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=make_drafter(),
    )
    assert torch.equal(output, expected[:, 6:])


def test_chunked_prefill():
    """B105: features of all chunks reach the drafter."""
    prompt, expected = reference("qwen3", "sdpa", 50, 16)
    drafter = make_drafter()
    lengths = []
    draft = drafter.draft

    def recording(context, *args, **kwargs):
        lengths.append(context.position)
        return draft(context, *args, **kwargs)

    drafter.draft = recording
    output, _ = run(target_of("qwen3"), prompt, drafter, 16, prefill_chunk_size=16)
    assert torch.equal(output, expected)
    assert lengths[0] == 50


def test_bfloat16_tokens_are_the_targets_argmax_up_to_a_small_gap():
    """B015, B016, B017."""
    target = make_target("llama").bfloat16()
    prompt = make_prompt(6)
    plain = target.generate(prompt, max_new_tokens=32, do_sample=False)
    drafter = make_scripted(make_drafter().bfloat16(), plain, 3)
    output, _ = run(target, prompt, drafter, 32)
    # Logits here are of size 10; bfloat16 keeps 8 bits.
    assert float(greedy_gaps(target, output, 6).max()) <= 0.25


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("stored", [True, False])
def test_target_and_drafter_in_different_precisions(target_dtype, drafter_dtype, stored):
    """B092."""
    target = make_target("qwen3").to(target_dtype)
    drafter = make_drafter(stored=stored).to(drafter_dtype)
    prompt = make_prompt(6)
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output, _ = run(target, prompt, drafter, 12)
    assert output.shape == plain.shape
    if target_dtype == torch.float32:
        assert torch.equal(output, plain)
    else:
        assert float(greedy_gaps(target, output, 6).max()) <= 0.25
