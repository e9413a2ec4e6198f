"""Many rows: each equals its own single-row run, whatever the others do."""

import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Fp8QuantizedLayer

from batches import make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from tiny import FAMILIES, make_drafter, make_eagle3, make_target

NEW_TOKENS = 16
LENGTHS = [6, 2, 9, 1, 12, 6, 3, 7]
# Never right, half right, always right, and in between.
RIGHT = [4, 0, 2, 4, 1, 0, 3, 2]


@functools.cache
def target_of(family, attention="sdpa"):
    return make_target(family, attention=attention)


@functools.cache
def singles(family="qwen3", attention="sdpa", eos=None):
    """Prompts and the texts that plain single-row decoding makes of them."""
    target = target_of(family, attention)
    prompts = make_prompts(LENGTHS)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": eos}
    return prompts, [target.generate(prompt, **options)[0] for prompt in prompts]


def run(target, prompts, texts, num_right=RIGHT, extra=0, **options):
    drafter = script_rows(make_drafter(), texts, num_right)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    with collect_statistics() as statistics:
        output = target.generate(**pad_left(prompts, extra), assistant_model=drafter, **options)
    return output, statistics


def assert_rows_equal(sequences, prompts, texts, extra=0):
    """New tokens of each row, and padding behind a row that ends early."""
    width = max(prompt.shape[1] for prompt in prompts) + extra
    for row, prompt, text in zip(sequences[:, width:].tolist(), prompts, texts, strict=True):
        expected = text[prompt.shape[1] :].tolist()
        assert row == expected + [0] * (len(row) - len(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_good_and_bad_drafts_equal_their_single_runs(family):
    """B055, B056, B057: past the sliding window, too."""
    prompts, texts = singles(family)
    output, statistics = run(target_of(family), prompts, texts)
    assert_rows_equal(output, prompts, texts)
    assert statistics.new_tokens == NEW_TOKENS * len(prompts)
    # Every row in as many rounds as it takes alone: slow rows do not hold up fast ones.
    assert statistics.rounds == sum(-(-(NEW_TOKENS - 1) // (right + 1)) for right in RIGHT)


@pytest.mark.parametrize("num_rows", range(1, 8))
def test_every_batch_size(num_rows):
    prompts, texts = (part[:num_rows] for part in singles())
    output, _ = run(target_of("qwen3"), prompts, texts)
    assert_rows_equal(output, prompts, texts)


def test_rounds_of_each_row_are_its_own():
    """B056: a row that accepts all is done in a quarter of the rounds of one that accepts none."""
    prompts, texts = (part[:2] for part in singles())
    for num_right in ([4, 0], [0, 4]):
        rounds = []
        drafter = script_rows(make_drafter(), texts, num_right)
        with collect_statistics(on_round=rounds.append):
            target_of("qwen3").generate(
                **pad_left(prompts),
                assistant_model=drafter,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        lengths = [len(record.tokens) for record in rounds]
        assert lengths.count(5) == 3
        assert len(rounds) == 3 + 15


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_padding_changes_neither_drafts_nor_text(padding):
    """B057: every block of every row is drafted as without padding."""
    prompts, texts = (part[:3] for part in singles())

    def blocks(chosen, extra):
        seen, drafter = {}, script_rows(make_drafter(), texts, RIGHT)
        draft = drafter.draft

        def recording(context, anchor_ids, **kwargs):
            block = draft(context, anchor_ids, **kwargs)
            for i, length in enumerate(context.lengths.tolist()):
                text = tuple(kwargs["input_ids"][i, -length - 1 :].tolist())
                seen[text] = block.base_logits[i]
            return block

        drafter.draft = recording
        output = target_of("qwen3").generate(
            **pad_left(chosen, extra),
            assistant_model=drafter,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        return output, seen

    output, found = blocks(prompts, padding)
    assert_rows_equal(output, prompts, texts, padding)
    for i in range(3):
        # The same row alone is right as often, so it drafts from the same texts.
        for text, logits in blocks(prompts[i : i + 1], 0)[1].items():
            if text in found:
                torch.testing.assert_close(found[text], logits, atol=1e-4, rtol=1e-4)
    assert len(found) > 12


@pytest.mark.parametrize("num_rows", [1, 3])
def test_token_types_go_on_with_the_last_one(num_rows):
    """Speakers that change within the last tokens of the prompt; a block is all of the last one."""
    target, prompts = target_of("gpt2"), make_prompts([8, 5, 7][:num_rows])
    batch = pad_left(prompts)
    types = torch.full_like(batch["input_ids"], 5)
    types[:, -2:] = torch.tensor([[7], [9], [11]])[:num_rows]
    options = {"token_type_ids": types, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(**batch, **options)
    texts = [
        row[-len(prompt[0]) - NEW_TOKENS :] for row, prompt in zip(expected, prompts, strict=True)
    ]
    drafter = script_rows(make_drafter(), texts, [4, 2, 0])
    with collect_statistics() as statistics:
        output = target.generate(**batch, **options, assistant_model=drafter)
    assert torch.equal(output, expected)
    assert statistics.accepted > 8


@pytest.mark.parametrize("stops", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_rows_that_finish_leave_and_are_padded(stops):
    """B062: pad only, no drafts, nothing in the statistics."""
    prompts, texts = (part[:3] for part in singles())
    # A stop token that the rows in question reach in mid-block, and the others never.
    target, eos = target_of("qwen3"), []
    for row in stops:
        others = {
            int(t) for i in range(3) if i not in stops for t in texts[i][len(prompts[i][0]) :]
        }
        new = texts[row][prompts[row].shape[1] :].tolist()
        eos.append(next(token for token in new[2:] if token not in others))
    expected = [
        target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=eos)[0]
        for prompt in prompts
    ]
    drafter = script_rows(make_drafter(), texts, RIGHT)
    draft, seen = drafter.draft, []

    def recording(context, anchor_ids, **kwargs):
        seen.append(len(anchor_ids))
        return draft(context, anchor_ids, **kwargs)

    drafter.draft = recording
    with collect_statistics() as statistics:
        output = target.generate(
            **pad_left(prompts),
            assistant_model=drafter,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    assert_rows_equal(output, prompts, expected)
    lengths = [len(text) - prompt.shape[1] for text, prompt in zip(expected, prompts, strict=True)]
    assert output.shape[1] == 9 + max(lengths)
    assert statistics.new_tokens == sum(lengths)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 3


def test_a_row_may_finish_with_the_first_token():
    prompts, texts = (part[:3] for part in singles())
    first = int(texts[1][prompts[1].shape[1]])
    target = target_of("qwen3")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": first}
    expected = [target.generate(prompt, **options)[0] for prompt in prompts]
    assert len(expected[1]) == prompts[1].shape[1] + 1
    output, _ = run(target, prompts, texts, eos_token_id=first, pad_token_id=0)
    assert_rows_equal(output, prompts, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
        {"encoder_repetition_penalty": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(5 + row, 90, 1 + len(ids) % 3)},
        {"bad_words_ids": [[5], [7, 8]], "exponential_decay_length_penalty": (4, 1.5)},
    ],
    ids=str,
)
def test_processors_see_every_row_in_its_place(options):
    """B014, B026: text-reading processors, also those that count rows or columns."""
    prompts, _ = (part[:4] for part in singles())
    target = target_of("qwen3")
    batch = pad_left(prompts)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 31, **options}
    expected = target.generate(**batch, **options)
    texts = [expected[i, 9 - prompts[i].shape[1] :] for i in range(4)]
    drafter = script_rows(make_drafter(), texts, RIGHT)
    with collect_statistics() as statistics:
        output = target.generate(**batch, assistant_model=drafter, **options)
    assert torch.equal(output, expected)
    assert statistics.accepted > 8


def test_criteria_are_asked_per_row():
    """A user's criterion gets all rows at one length and its answer counts for those rows."""
    prompts, texts = (part[:3] for part in singles())
    target, width = target_of("qwen3"), 9
    limits, shapes = torch.tensor([5, 14, 9]), []

    def criterion(input_ids, scores, **kwargs):
        shapes.append(input_ids.shape)
        return input_ids.shape[1] - width >= limits

    output, _ = run(target, prompts, texts, stopping_criteria=[criterion], pad_token_id=0)
    expected = [
        text[: prompt.shape[1] + int(limit)]
        for text, prompt, limit in zip(texts, prompts, limits, strict=True)
    ]
    assert_rows_equal(output, prompts, expected)
    assert all(shape[0] == 3 for shape in shapes)
    assert len(shapes) < 3 * NEW_TOKENS


class Columns:
    """A streamer that takes batches."""

    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        self.seen.append(value.clone())

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_columns_of_plain_decoding():
    prompts, texts = (part[:3] for part in singles())
    options = {"eos_token_id": int(texts[0][10]), "pad_token_id": 0}
    plain, drafted = Columns(), Columns()
    target_of("qwen3").generate(
        **pad_left(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, streamer=plain, **options
    )
    run(target_of("qwen3"), prompts, texts, streamer=drafted, **options)
    assert drafted.ended
    assert len(drafted.seen) == len(plain.seen)
    assert all(torch.equal(a, b) for a, b in zip(drafted.seen, plain.seen, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_outputs_equal_those_of_plain_decoding(family, implementation):
    """B104: scores, logits, hidden states and attentions of rows that move."""
    prompts, texts = (part[:3] for part in singles(family, "eager"))
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "cache_implementation": implementation,
    }
    target = target_of(family, "eager")
    plain = target.generate(
        **pad_left(prompts), max_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    found, _ = run(target, prompts, texts, **options)
    assert torch.equal(found.sequences, plain.sequences)
    close = {"atol": 1e-3, "rtol": 1e-3}
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), **close)
    pads = [9 - prompt.shape[1] for prompt in prompts]
    for name in ("hidden_states", "attentions"):
        for step, wanted in zip(getattr(found, name)[1:], getattr(plain, name)[1:], strict=True):
            for state, wanted_state in zip(step, wanted, strict=True):
                assert state.shape == wanted_state.shape
                for row in range(3):
                    torch.testing.assert_close(state[row], wanted_state[row], **close)
    assert max(pads) == 7


@pytest.mark.parametrize("family", ["qwen3", "mistral_swa", "gemma3"])
@pytest.mark.parametrize("eos", [False, True])
def test_the_returned_cache_is_the_one_of_the_returned_sequences(family, eos):
    """B049: a second turn over it gives what plain decoding gives."""
    prompts, texts = (part[:3] for part in singles(family))
    target = target_of(family)
    stop = {"eos_token_id": int(texts[0][10]), "pad_token_id": 0} if eos else {}
    cache = DynamicCache(config=target.config)
    first, _ = run(target, prompts, texts, cache=cache, **stop)
    more = torch.cat(make_prompts([4, 4, 4], seed=40))
    mask = torch.cat((pad_left(prompts)["attention_mask"], (first[:, 9:] != 0).long()), dim=1)
    ids = torch.cat((first, more), dim=1)
    mask = torch.cat((mask, torch.ones_like(more)), dim=1)
    expected = [
        target.generate(row[keep.bool()][None], max_new_tokens=8, do_sample=False)[0]
        for row, keep in zip(ids, mask, strict=True)
    ]
    assert cache.get_seq_length() == first.shape[1] - 1
    # Padding inside a row is more than the double can read.
    drafter = make_drafter() if eos else script_rows(make_drafter(), expected, RIGHT)
    second = target.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        assistant_model=drafter,
        max_new_tokens=8,
        do_sample=False,
    )
    if family == "qwen3" or not eos:
        for row, text in zip(second, expected, strict=True):
            assert row[-8:].tolist() == text[-8:].tolist()
    else:
        # Padding inside a row takes up room in a sliding window, in plain decoding as well.
        again = DynamicCache(config=target.config)
        positions = (mask[:, :-5].cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            target(ids[:, :-5], attention_mask=mask[:, :-5], position_ids=positions, cache=again)
        plain = target.generate(
            ids, attention_mask=mask, cache=again, max_new_tokens=8, do_sample=False
        )
        assert torch.equal(second, plain)


def test_bad_batches_are_refused_before_compute():
    target, drafter = target_of("qwen3"), make_drafter()
    batch = pad_left(make_prompts([4, 4]))
    calls = []
    handle = target.register_forward_pre_hook(lambda module, args: calls.append(1))
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="every token of row 1"):
        target.generate(**batch, assistant_model=drafter, max_new_tokens=4)
    three = torch.cat(make_prompts([4, 4, 4]))
    with pytest.raises(ValueError, match="attention_mask has 2 rows and the batch has 3"):
        target.generate(
            three,
            attention_mask=batch["attention_mask"],
            assistant_model=drafter,
            max_new_tokens=4,
        )
    for width in (3, 5):
        with pytest.raises(ValueError, match=f"has {width} columns and the prompt has 4"):
            target.generate(
                three,
                attention_mask=torch.ones(3, width, dtype=torch.long),
                assistant_model=drafter,
                max_new_tokens=4,
            )
    with pytest.raises(ValueError, match="no rows"):
        target.generate(
            torch.zeros(0, 4, dtype=torch.long), assistant_model=drafter, max_new_tokens=4
        )
    handle.remove()
    assert not calls


@pytest.mark.parametrize("layers", [[], [Fp8QuantizedLayer() for _ in range(4)]], ids=len)
def test_a_cache_of_another_batch_is_refused_before_compute(layers):
    target, cache = target_of("qwen3"), DynamicCache()
    cache.layers = layers
    with torch.no_grad():
        target(torch.cat(make_prompts([4, 4])), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows and the batch has 1"):
        target.generate(
            torch.ones(1, 6, dtype=torch.long),
            cache=cache,
            assistant_model=make_drafter(),
            max_length=9,
        )


@pytest.mark.parametrize("make", [make_drafter, make_eagle3])
@pytest.mark.parametrize("threshold", [None, 0.4])
def test_nothing_is_created_on_the_default_device(make, threshold):
    """Callers set it to their accelerator; here one that holds no values stands for it."""
    prompts, texts = (part[:3] for part in singles())
    drafter = make()
    if make is make_drafter:
        drafter = script_rows(drafter, texts, RIGHT)
    target, batch = target_of("qwen3"), pad_left(prompts)
    with torch.device("meta"):
        output = target.generate(
            **batch,
            assistant_model=drafter,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            dspark_confidence_threshold=threshold,
        )
    assert_rows_equal(output, prompts, texts)


def test_a_failure_leaves_an_empty_cache():
    """Rows that stopped at different places cannot be put back together."""
    prompts, texts = (part[:2] for part in singles())
    target, cache = target_of("qwen3"), DynamicCache(config=target_of("qwen3").config)

    def failing(input_ids, scores, **kwargs):
        if input_ids.shape[1] > 9:
            raise RuntimeError("stop here")
        return torch.tensor([False, False])

    with pytest.raises(RuntimeError, match="stop here"):
        run(target, prompts, texts, cache=cache, stopping_criteria=[failing])
    assert cache.get_seq_length() == 0
    output, _ = run(target, prompts, texts, cache=cache)
    assert_rows_equal(output, prompts, texts)
