"""`generate` on DeepSeek-V4 targets: exact with every drafter; the caller keeps what is his."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from test_sampling import assert_distributed_as
from test_v4_cache import assert_same_state, run, start
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from batches import script_rows
from checkpoints import GOLDEN
from dspark_hf import DSparkCandidateGenerator, collect_statistics
from dspark_hf.drafting import probabilities
from dspark_hf.generation.settings import DraftSettings
from dspark_hf.generation.taps import TargetTaps
from dspark_hf.pipelines import _load_drafter
from small_tokenizer import make_tokenizer
from tiny import make_drafter, make_prompt, make_scripted
from tiny_v4 import (
    V4,
    WINDOW,
    golden_target,
    load_golden_drafter,
    make_v4_drafter,
    make_v4_target,
)

NEW_TOKENS = 40


@functools.cache
def tiny_target():
    return make_v4_target()


@functools.cache
def reference(prompt_length=6, new_tokens=NEW_TOKENS):
    prompt = make_prompt(prompt_length)
    return prompt, tiny_target().generate(prompt, max_new_tokens=new_tokens, do_sample=False)


def generate(target, prompt, drafter, **options):
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
    with collect_statistics() as statistics:
        return target.generate(prompt, assistant_model=drafter, **options), statistics


def test_the_embedded_drafter_on_its_target_is_exact():
    """The text of an independent run of the target, 48 tokens past its window of 16."""
    record = load_file(GOLDEN / V4 / "golden_target.safetensors")
    drafter = load_golden_drafter(bound=False)
    output, statistics = generate(golden_target(), record["input_ids"], drafter, max_new_tokens=48)
    assert torch.equal(output, record["greedy_48"])
    assert statistics.verified > 100


@pytest.mark.parametrize("num_right", range(6))
def test_every_accepted_count_is_exact_on_the_golden_target(num_right):
    """B012, B018, B019, B044: oracle and half-right drafters."""
    record = load_file(GOLDEN / V4 / "golden_target.safetensors")
    drafter = make_scripted(load_golden_drafter(bound=False), record["greedy_48"], num_right)
    output, statistics = generate(golden_target(), record["input_ids"], drafter, max_new_tokens=24)
    assert torch.equal(output, record["greedy_48"][:, : output.shape[1]])
    assert output.shape[1] == 30 + 24
    assert statistics.accepted == sum(statistics.verified_at[:num_right])


@pytest.mark.parametrize(("prompt_length", "block_size"), [(1, 5), (6, 1), (6, 9), (21, 5)])
def test_every_accepted_count_is_exact_far_past_the_window(prompt_length, block_size):
    """B041, B044: window 8, compression of 4 and 8, blocks longer than both."""
    prompt, expected = reference(prompt_length)
    for num_right in range(block_size + 1):
        drafter = make_scripted(make_v4_drafter(block_size=block_size), expected, num_right)
        output, statistics = generate(tiny_target(), prompt, drafter)
        assert torch.equal(output, expected), num_right
        assert statistics.accepted == sum(statistics.verified_at[:num_right])


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_the_drafters_context_in_every_round_equals_a_fresh_one(num_right):
    """B019, B044: what was committed, far past the window, and no row of a rejected draft."""
    prompt, expected = reference()
    target, drafter = tiny_target(), make_scripted(make_v4_drafter(), expected, num_right)
    with TargetTaps(target, drafter.config.target_layer_ids) as taps:
        run(target, None, expected)
        features = taps.take()
    draft, rounds = drafter.draft, []

    def checking(context, anchor_ids, **kwargs):
        committed = kwargs["input_ids"].shape[1] - 1
        rounds.append(committed)
        fresh = drafter.new_context(1, target=target)
        drafter.extend(fresh, features[:, :committed])
        assert context.lengths.tolist() == fresh.lengths.tolist() == [committed]
        for layer, wanted in zip(context.cache.layers, fresh.cache.layers, strict=True):
            found, rows = (side.keys[:, :, side.first : side.length] for side in (layer, wanted))
            assert found.shape[2] == min(committed, WINDOW)
            torch.testing.assert_close(found, rows, atol=5e-5, rtol=1e-4)
        return draft(context, anchor_ids, **kwargs)

    drafter.draft = checking
    output, _ = generate(target, prompt, drafter)
    assert torch.equal(output, expected)
    assert len(rounds) >= NEW_TOKENS // (num_right + 1) - 2


def test_packed_experts_draft_as_their_decoded_values_do():
    """The drafter that stays packed in memory is exact too."""
    prompt, expected = reference()
    drafter = make_v4_drafter(expert_dtype="fp4")
    for layer in drafter.layers:
        for name, tensor in layer.mlp.experts.named_parameters():
            low, high = (118, 124) if name.endswith("scale") else (0, 256)
            tensor.data = torch.randint(low, high, tensor.shape).to(torch.uint8)
    output, statistics = generate(tiny_target(), prompt, drafter)
    assert torch.equal(output, expected)
    assert statistics.verified > 0


def test_a_dense_drafter_serves_a_v4_target():
    """The target's cache does not ask what the drafter is made of."""
    prompt, expected = reference()
    drafter = make_scripted(make_drafter(taps=(1, 3)), expected, 3)
    output, statistics = generate(tiny_target(), prompt, drafter)
    assert torch.equal(output, expected)
    assert statistics.accepted


@pytest.mark.parametrize("num_right", [0, 3, 5])
def test_every_kind_of_stop_ends_the_text_and_the_cache(num_right):
    """Stop tokens, stop strings, a time limit: inside of blocks and at their ends."""
    target, tokenizer = make_v4_target(vocab_size=80), make_tokenizer()
    prompt = make_prompt(6) % 77 + 3
    expected = target.generate(prompt, do_sample=False, max_new_tokens=30)
    words = [tokenizer.decode(expected[0, a:b]) for a, b in ((15, 17), (24, 25))]
    stops = [{"eos_token_id": [int(expected[0, end]), 79]} for end in (8, 15, 22)]
    stops += [{"stop_strings": word, "tokenizer": tokenizer} for word in (words[0], words)]
    for options in stops:
        options |= {"return_dict_in_generate": True, "max_new_tokens": 30, "do_sample": False}
        plain = target.generate(prompt, **options)
        assert plain.sequences.shape[1] < 36
        drafter = make_scripted(make_v4_drafter(80), expected, num_right)
        found, _ = generate(target, prompt, drafter, **options)
        assert torch.equal(found.sequences, plain.sequences), options
        assert_same_state(found.cache, plain.cache)
    # The first look at the clock is too late.
    options |= {"max_time": 1e-9, "stop_strings": None}
    found, _ = generate(target, prompt, drafter, **options)
    assert torch.equal(found.sequences, expected[:, :7])
    assert_same_state(found.cache, start(target, prompt))


def test_a_cache_passed_in_and_out():
    """B047: the caller's cache, with the host's own layers in it, goes on to plain decoding."""
    prompt, expected = reference()
    target, cache = tiny_target(), DynamicCache(config=tiny_target().config)
    layers = list(cache.layers)
    drafter = make_scripted(make_v4_drafter(), expected, 2)
    first, _ = generate(
        target, prompt, drafter, max_new_tokens=10, cache=cache, return_dict_in_generate=True
    )
    assert first.cache is cache
    assert all(layer is own for layer, own in zip(cache.layers, layers, strict=True))
    assert_same_state(cache, start(target, first.sequences[:, :-1]))
    plain = target.generate(first.sequences, cache=cache, max_new_tokens=10, do_sample=False)
    assert torch.equal(plain, expected[:, : plain.shape[1]])
    again, _ = generate(target, plain, drafter, cache=cache, max_new_tokens=20)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("last", [30, 31, 32])
def test_a_call_that_fails_leaves_a_sound_cache(last):
    """A streamer that raises in a run or at its end: the cache ends before what it did not take."""

    class Broken:
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()
            if len(self.seen) == last:
                raise KeyboardInterrupt

        def end(self):
            raise AssertionError("the run did not end")

    prompt, expected = reference()
    target, cache, streamer = tiny_target(), DynamicCache(config=tiny_target().config), Broken()
    with pytest.raises(KeyboardInterrupt):
        generate(
            target,
            prompt,
            make_scripted(make_v4_drafter(), expected, 5),
            cache=cache,
            streamer=streamer,
        )
    assert [type(layer) for layer in cache.layers][2] is DeepseekV4HCACache
    length = cache.get_seq_length()
    assert length <= last
    assert_same_state(cache, start(target, expected[:, :length]))
    text = expected[:, : length + 1]
    assert torch.equal(
        target.generate(text, cache=cache, max_new_tokens=3, do_sample=False)[0],
        expected[0, : length + 4],
    )


def test_a_failure_with_several_rows_is_the_callers_own():
    """Rows cannot be put back together, so the cache is emptied; nothing of ours stays in it."""
    target, prompts = tiny_target(), torch.cat([make_prompt(8, seed=seed) for seed in (1, 2)])
    cache, forwards = DynamicCache(config=target.config), []

    def fail(*args):
        forwards.append(None)
        if len(forwards) == 3:
            raise KeyboardInterrupt

    handle = target.model.layers[2].mlp.register_forward_pre_hook(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(target, prompts, make_v4_drafter(), cache=cache)
    finally:
        handle.remove()
    assert type(cache.layers[2]) is DeepseekV4HCACache
    assert cache.get_seq_length() == 0


def test_other_assistants_are_refused_as_before():
    """Only our drafters come with a cache that can be rolled back."""
    with pytest.raises(ValueError, match="stateful"):
        tiny_target().generate(make_prompt(), assistant_model=make_v4_target(seed=1))
    assert tiny_target()._is_stateful


def test_hidden_states_and_attentions_are_those_of_plain_decoding():
    """B104: attentions span the window and the entries that were compressed by then."""
    prompt, expected = reference()
    options = {"output_hidden_states": True, "output_logits": True, "output_attentions": True}
    options |= {"return_dict_in_generate": True, "max_new_tokens": 20, "do_sample": False}
    plain = tiny_target().generate(prompt, **options)
    drafter = make_scripted(make_v4_drafter(), expected, 3)
    found = tiny_target().generate(prompt, assistant_model=drafter, **options)
    for ours, theirs in zip(found.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    for name in ("hidden_states", "attentions"):
        for ours, theirs in zip(found[name], plain[name], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_taps_are_the_mean_over_the_streams_of_the_raw_output():
    """Of every layer, the last included, whose entry in `hidden_states` is another tensor."""
    target, prompt, seen = tiny_target(), make_prompt(11), []
    drafter = make_v4_drafter(taps=(-1, 1, 3))
    generator = DSparkCandidateGenerator(target, drafter, DraftSettings(5), [], False, batch_size=1)
    handles = [
        target.model.layers[i].register_forward_hook(lambda m, a, out: seen.append(out))
        for i in range(4)
    ]
    with generator:
        normed = target(prompt, output_hidden_states=True).hidden_states[-1]
        features = generator.taps.take()
    for handle in handles:
        handle.remove()
    # The draft layers see no more of a prompt than their window.
    assert drafter.config.backbone_config.sliding_window == 8
    assert features.shape == (1, 8, 3 * 32)
    embedded, one, last = features.split(32, dim=-1)
    assert torch.equal(embedded, target.get_input_embeddings()(prompt)[:, -8:])
    assert torch.equal(one, seen[1].mean(dim=2)[:, -8:])
    assert torch.equal(last, seen[3].mean(dim=2)[:, -8:])
    # What they are not: the normed end, what the hyper-connections read, neighbouring layers.
    weighted = target.model.hc_head(seen[3])
    for other in (normed, weighted, seen[2].mean(dim=2), seen[0].mean(dim=2)):
        for tap in (one, last):
            assert (tap - other[:, -8:]).abs().max() > 0.1


def test_the_string_form_finds_the_drafter_in_the_targets_folder():
    """`pipeline(..., assistant_model="deepseek-ai/DeepSeek-V4-Flash-DSpark")`."""
    drafter = _load_drafter(golden_target(), GOLDEN / V4)
    assert drafter.is_dspark_drafter
    assert drafter.dtype == golden_target().dtype


# -- sampling

VOCAB, LENGTH = 4, 3
TEMPERATURE = 0.7


def small_target():
    return make_v4_target(
        vocab_size=VOCAB,
        num_hidden_layers=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe"] * 2,
        hc_sinkhorn_iters=2,
        initializer_range=0.25,
    )


def exact_paths(target, prompt):
    joint, ids = torch.ones(1, dtype=torch.float64), prompt
    for _ in range(LENGTH):
        p = probabilities(run(target, None, ids)[:, -1] / TEMPERATURE).double()
        joint = (joint[:, None] * p).flatten()
        tokens = torch.arange(VOCAB).repeat(len(ids))[:, None]
        ids = torch.cat((ids.repeat_interleave(VOCAB, dim=0), tokens), dim=1)
    return joint


def choose_by_rank(drafter, twin, num_right):
    """
    Replace the proposals: the first `num_right` tokens are the target's most likely ones, the rest
    its least likely. Asks a twin of the target, whose forwards the taps do not see.
    """
    draft = drafter.draft
    scores_behind = functools.cache(lambda ids: run(twin, None, torch.tensor([ids]))[0, -1])

    def chosen(context, anchor_ids, **kwargs):
        block = draft(context, anchor_ids, **kwargs)
        for row, ids in zip(block.tokens, kwargs["input_ids"].tolist(), strict=True):
            for k in range(len(row)):
                scores = scores_behind(tuple(ids))
                row[k] = scores.argmax() if k < num_right else scores.argmin()
                ids.append(int(row[k]))
        return block

    drafter.draft = chosen
    return drafter


PROMPTS = torch.tensor([[3, 2, 1, 2, 3, 1, 2], [1, 1, 3, 3, 2, 2, 1]])


@pytest.mark.parametrize(("num_right", "calls", "rows"), [(None, 200, 1), (2, 60, 4), (1, 60, 4)])
def test_sampled_texts_have_the_targets_distribution(num_right, calls, rows):
    """
    Over all 64 texts of three tokens; the prompts end one before a compression boundary. One prompt
    with the drafter's own samples; two with `num_return_sequences`, with the best tokens there are,
    and with the best and the worst.

    Each comparison fails a correct implementation with probability 1e-4 over the choice of seeds.
    Rows in lock-step count as calls: what one of them discards depends on the others alone.
    """
    target = small_target()
    drafter = make_v4_drafter(
        VOCAB,
        taps=(0, 1),
        block_size=2,
        num_target_layers=2,
        confidence_head=False,
        confidence_head_with_markov=False,
    )
    if num_right is not None:
        choose_by_rank(drafter, small_target(), num_right)
    prompts = PROMPTS[: 1 if rows == 1 else 2]
    weights = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    counts = torch.zeros(len(prompts), VOCAB**LENGTH)
    with collect_statistics() as statistics:
        for seed in range(calls):
            torch.manual_seed(seed)
            texts = target.generate(
                prompts,
                assistant_model=drafter,
                do_sample=True,
                num_return_sequences=rows,
                temperature=TEMPERATURE,
                top_k=0,
                max_new_tokens=LENGTH,
                dspark_draft_sampling="sample" if num_right is None else "greedy",
            )
            paths = (texts[:, prompts.shape[1] :] * weights).sum(dim=1)
            for found, own in zip(counts, paths.view(len(prompts), rows), strict=True):
                found += torch.bincount(own, minlength=VOCAB**LENGTH)
    # Some drafts are accepted and some are not, or one branch of the rule was never taken.
    assert 0 < statistics.accepted < statistics.verified
    for prompt, found in zip(prompts, counts, strict=True):
        assert_distributed_as(found, exact_paths(target, prompt[None]))


def test_several_rows():
    """In lock-step where they are of equal length; padding is compressed like text by the host."""
    target, prompts = tiny_target(), torch.cat([make_prompt(8, seed=seed) for seed in (1, 2, 3)])
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = target.generate(prompts, **options)
    drafter = script_rows(make_v4_drafter(), list(expected), [5, 3, 2])
    with collect_statistics() as statistics:
        output = target.generate(prompts, assistant_model=drafter, **options)
    assert torch.equal(output, expected)
    # Two drafts right in the slowest row and the token behind them.
    assert statistics.accepted_length > 2.5
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    # One row as well: forwards over one and over several tokens see padding differently.
    for rows in (3, 1):
        with pytest.raises(ValueError, match="rows of equal length"):
            target.generate(
                prompts[:rows], attention_mask=mask[:rows], assistant_model=drafter, **options
            )


@pytest.mark.parametrize("chunk", [None, 3])
def test_of_a_long_prompt_only_the_window_is_held(chunk):
    """The taps keep what a block can still see; positions count all of the prompt."""
    prompt, expected = reference(40, 12)
    drafter, seen = make_v4_drafter(), []
    extend = drafter.extend

    def record(context, features, **options):
        seen.append((int(context.lengths[0]), features.shape[1]))
        return extend(context, features, **options)

    drafter.extend = record
    output, _ = generate(
        tiny_target(), prompt, drafter, max_new_tokens=12, prefill_chunk_size=chunk
    )
    assert torch.equal(output, expected)
    assert seen[0] == (40 - WINDOW, WINDOW)
