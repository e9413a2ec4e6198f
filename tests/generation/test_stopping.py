"""Where generation ends: the same token as in plain decoding, wherever in a block it falls."""

import functools
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from dspark_hf import collect_statistics
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)
GAMMA = 6


@functools.cache
def unstopped():
    return make_target("qwen3").generate(PROMPT, max_new_tokens=24, do_sample=False)


@functools.cache
def character_tokenizer():
    """One character per id, so that stop strings can end anywhere in a block."""
    # The host's stop-string matcher probes a tokenizer with "abcdef".
    characters = string.ascii_letters + string.digits + "".join(map(chr, range(0x400, 0x423)))
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a")


def generate(num_right=GAMMA, drafter=None, **options):
    target = make_target("qwen3")
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    drafter = drafter or make_scripted(make_drafter(block_size=GAMMA), unstopped(), num_right)
    with collect_statistics() as statistics:
        drafted = target.generate(PROMPT, assistant_model=drafter, **options)
    return target.generate(PROMPT, **options), drafted, statistics


@pytest.mark.parametrize("offset", range(14))
@pytest.mark.parametrize("as_list", [False, True])
def test_stop_token_at_every_offset(offset, as_list):
    """B022, B028, B150: for single and several stop tokens, right and half-right drafters."""
    token = int(unstopped()[0, 6 + offset])
    eos = [95, token] if as_list else token
    for num_right in (GAMMA, 2, 0):
        plain, drafted, statistics = generate(num_right, eos_token_id=eos)
        assert torch.equal(drafted, plain)
        assert drafted.shape[1] <= 6 + offset + 1
        assert statistics.new_tokens == drafted.shape[1] - 6
        # The first token comes from the prefill and belongs to no round.
        assert statistics.committed == statistics.new_tokens - 1


def test_no_stop_token_at_all():
    """B027."""
    plain, drafted, _ = generate(eos_token_id=None)
    assert torch.equal(drafted, plain)
    assert drafted.shape[1] == 30


@pytest.mark.parametrize("offset", range(1, 8))
@pytest.mark.parametrize("num_right", [0, 3, GAMMA])
def test_stop_strings_end_where_plain_decoding_ends(offset, num_right):
    """B023, B024: `tokenizer=` alone suffices, at every offset of the string's end."""
    tokenizer = character_tokenizer()
    ending = tokenizer.decode(unstopped()[0, 6 + offset - 1 : 6 + offset + 1].tolist())
    assert len(ending) == 2
    plain, drafted, _ = generate(num_right, stop_strings=[ending], tokenizer=tokenizer)
    assert torch.equal(drafted, plain)
    assert drafted.shape[1] <= 6 + offset + 1 < 30


class Recording(StoppingCriteria):
    """Remembers what it was asked about, and stops after so many tokens."""

    def __init__(self, stop_after):
        self.stop_after = stop_after
        self.lengths, self.num_scores = [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        self.num_scores.append(None if scores is None else len(scores))
        done = input_ids.shape[1] >= 6 + self.stop_after
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool)


@pytest.mark.parametrize("stop_after", range(1, 12))
@pytest.mark.parametrize("with_scores", [False, True])
def test_user_criteria_are_asked_once_per_token(stop_after, with_scores):
    """B023 and M4: no overshoot inside a block; ids and scores as in plain decoding."""
    options = {"return_dict_in_generate": True, "output_scores": True} if with_scores else {}
    asked = []
    for assistant in (None, make_scripted(make_drafter(block_size=GAMMA), unstopped(), GAMMA)):
        criterion = Recording(stop_after)
        output = make_target("qwen3").generate(
            PROMPT,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([criterion]),
            assistant_model=assistant,
            **options,
        )
        sequences = output.sequences if with_scores else output
        assert sequences.shape[1] == 6 + stop_after
        if with_scores:
            assert len(output.scores) == stop_after
        asked.append((criterion.lengths, criterion.num_scores))
    assert asked[0] == asked[1]


def test_max_time_stops_in_the_first_round():
    """B023: a criterion of the host that is neither length nor stop token."""
    _, drafted, statistics = generate(max_time=0.0)
    assert drafted.shape[1] == 7
    assert statistics.rounds == 0


@pytest.mark.parametrize("limit", [{"max_length": 13}, {"max_new_tokens": 7}])
def test_length_limits(limit):
    """B026, B029."""
    options = {"max_new_tokens": None, **limit}
    plain, drafted, _ = generate(**options)
    assert torch.equal(drafted, plain)
    assert drafted.shape[1] == 13


def test_stop_token_equal_to_the_drafters_mask_is_refused():
    """B083: the pair cannot belong together."""
    target = make_target("qwen3")
    target.generation_config.eos_token_id = 96
    with pytest.raises(ValueError, match="mask_token_id 96 is a stop token"):
        target.generate(PROMPT, max_new_tokens=4, assistant_model=make_drafter())
