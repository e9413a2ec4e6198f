"""Logits processors see the drafted path; constraints hold at every position of a block."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig

from dspark_hf import collect_statistics
from tiny import MASK_ID, make_drafter, make_prompt, make_scripted, make_target

NEW_TOKENS = 20
PROMPT = make_prompt(6)

# Each of them changes the text of the tiny target, which the test checks first.
GREEDY = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "even_ids": {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(4, 96, 2))},
    "forced_eos": {"forced_eos_token_id": 5},
}


def plain_and_drafted(options, num_right, prompt=PROMPT):
    target = make_target("qwen3")
    expected = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    drafter = make_scripted(make_drafter(), expected, num_right)
    with collect_statistics() as statistics:
        output = target.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=drafter,
            **options,
        )
    return expected, output, statistics


def without_options(prompt=PROMPT):
    return make_target("qwen3").generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_is_exact_with(name):
    """B036, B039."""
    # A prompt that holds the tokens which the target goes on to repeat.
    prompt = without_options()[:, :18]
    for num_right in range(5):
        expected, output, statistics = plain_and_drafted(GREEDY[name], num_right, prompt)
        assert not torch.equal(expected, without_options(prompt))
        assert torch.equal(output, expected)
        assert statistics.accepted == sum(statistics.verified_at[:num_right])


@pytest.mark.parametrize("kind", ["bad_words", "suppress", "begin_suppress", "sequence_bias"])
def test_greedy_is_exact_with_token_lists(kind):
    """B039: the lists name tokens that the target wants."""
    wanted = without_options()[0, 6:].tolist()
    options = {
        "bad_words": {"bad_words_ids": [[wanted[4]], wanted[1:3]]},
        "suppress": {"suppress_tokens": [wanted[2], wanted[5]]},
        "begin_suppress": {"begin_suppress_tokens": [wanted[0]]},
        "sequence_bias": {"sequence_bias": [[[wanted[1], wanted[2]], -100.0]]},
    }[kind]
    for num_right in range(5):
        expected, output, _ = plain_and_drafted(options, num_right)
        assert not torch.equal(expected, without_options())
        assert torch.equal(output, expected)


@pytest.mark.parametrize("num_right", range(5))
def test_min_new_tokens_holds_inside_a_block(num_right):
    """B033: the target wants the stop token early and may not have it yet."""
    wanted = without_options()[0, 6:].tolist()
    options = {"eos_token_id": wanted[1], "min_new_tokens": 6}
    target = make_target("qwen3")
    assert target.generate(PROMPT, eos_token_id=wanted[1], max_new_tokens=20).shape[1] == 8
    expected, output, _ = plain_and_drafted(options, num_right)
    assert torch.equal(output, expected)
    assert output.shape[1] >= 12


def test_illegal_drafts_are_rejected_and_the_constraint_stays():
    """B036, B037: the drafter proposes odd ids only, the text may have even ids only."""
    target, drafter = make_target("qwen3"), make_drafter()
    draft = drafter.draft

    def odd(*args, **kwargs):
        block = draft(*args, **kwargs)
        block.tokens = torch.full_like(block.tokens, 33)
        return block

    drafter.draft = odd
    with collect_statistics() as statistics:
        output = target.generate(
            PROMPT,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=drafter,
            **GREEDY["even_ids"],
        )
    assert not (output[:, 6:] % 2).any()
    assert statistics.accepted == 0
    assert statistics.verified > 0


def test_the_drafter_drafts_under_the_same_processors():
    """B024: drafts are legal by themselves, so a constraint does not cost acceptance."""
    drafter = make_drafter()
    draft, seen = drafter.draft, []

    def recording(*args, **kwargs):
        block = draft(*args, **kwargs)
        # What there is no room for is drafted, but not submitted, and nobody is asked about it.
        room = 6 + NEW_TOKENS - 1 - kwargs["input_ids"].shape[1]
        seen.append(block.tokens[0, :room])
        return block

    drafter.draft = recording
    make_target("qwen3").generate(
        PROMPT,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=drafter,
        **GREEDY["even_ids"],
    )
    assert seen
    assert not (torch.cat(seen) % 2).any()


class InPlace(LogitsProcessor):
    """Writes into what it is given, as user code may."""

    def __call__(self, input_ids, scores):
        scores[:, int(input_ids[0, -1]) % 50 :] -= 3.0
        return scores


def test_processors_that_write_in_place():
    """B034, B039: raw logits, drafts and other positions stay as they are."""
    processors = LogitsProcessorList([InPlace()])
    for num_right in range(5):
        expected, output, _ = plain_and_drafted({"logits_processor": processors}, num_right)
        assert torch.equal(output, expected)
    target = make_target("qwen3")
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "logits_processor": processors,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    drafted = target.generate(PROMPT, assistant_model=make_drafter(), **options)
    # One forward without the processor shows what raw logits are.
    with torch.no_grad():
        raw = target(drafted.sequences).logits[0, 5:-1]
    torch.testing.assert_close(torch.cat(drafted.logits), raw, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("markov", [None, "vanilla"])
def test_processors_that_write_in_place_leave_the_parallel_logits(markov):
    """B034: `base_logits` are those of the parallel stage, with and without a processor."""
    drafter = make_drafter(markov=markov)
    torch.manual_seed(0)
    features = torch.randn(1, 5, drafter.fc.in_features)
    plain, processed = (
        drafter(features, PROMPT[:, -1], logits_processor=processors, input_ids=PROMPT)
        for processors in (None, LogitsProcessorList([InPlace()]))
    )
    assert torch.equal(plain.base_logits, processed.base_logits)
    assert not torch.equal(plain.logits, processed.logits)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"top_k": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(4, 96, 2))},
    ],
    ids=lambda options: "-".join(options),
)
def test_sampling_runs_with(options):
    """B005, B020, B039: it samples, it speculates, the text varies."""
    target, drafter = make_target("qwen3", initializer_range=0.1), make_drafter()
    texts = set()
    with collect_statistics() as statistics:
        for seed in range(6):
            torch.manual_seed(seed)
            output = target.generate(
                PROMPT, max_new_tokens=8, do_sample=True, assistant_model=drafter, **options
            )
            texts.add(tuple(output[0, 6:].tolist()))
            if "prefix_allowed_tokens_fn" in options:
                assert not (output[:, 6:] % 2).any()
    assert statistics.verified > 0
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        (
            {
                "watermarking_config": SynthIDTextWatermarkingConfig(
                    ngram_len=5, keys=[1, 2, 3, 4]
                ),
                "do_sample": True,
            },
            "SynthID",
        ),
    ],
    ids=["guidance_scale", "synthid"],
)
def test_processors_with_memory_are_refused(options, named):
    """B039: they would remember drafted tokens that were then rejected."""
    with pytest.raises(ValueError, match=named):
        make_target("qwen3").generate(
            PROMPT, max_new_tokens=4, assistant_model=make_drafter(), **options
        )


def test_the_mask_token_is_an_ordinary_token_to_the_target():
    """B032: ids equal to the mask id are neither removed nor a reason to stop."""
    only_mask = {"prefix_allowed_tokens_fn": lambda batch_id, ids: [MASK_ID]}
    expected, output, _ = plain_and_drafted(only_mask, 4)
    assert torch.equal(output, expected)
    assert output[0, 6:].tolist() == [MASK_ID] * NEW_TOKENS
