"""Eagle3 drafters in the decoding loop: lossless, in every form, and as short as asked for."""

import logging

import pytest
import torch
from test_sampling import (
    ANCHOR,
    DRAWS,
    LENGTH,
    PROMPT,
    WARPERS,
    assert_distributed_as,
    exact_paths,
    path_counts,
    small_target,
    verify_rows,
)
from transformers import DynamicCache, LogitsProcessorList

from batches import make_prompts, pad_left
from dspark_hf import DSparkCandidateGenerator, DSparkDecoderOnlyOutput, collect_statistics
from dspark_hf.generation.settings import DraftSettings
from tiny import (
    FAMILIES,
    HIDDEN,
    VOCAB,
    make_drafter,
    make_eagle3,
    make_prompt,
    make_scripted,
    make_target,
)

TOKENS = 24


def greedy(target, prompt, drafter=None, **options):
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    return target.generate(prompt, assistant_model=drafter, **options)


# -- lossless --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [None, 0, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_exact(family, num_right):
    """B015: random, wrong, half right and right drafters on every kind of target."""
    target, prompt = make_target(family), make_prompt()
    expected = greedy(target, prompt)
    drafter = make_eagle3(stored=family != "gpt2")
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    with collect_statistics() as statistics:
        assert torch.equal(greedy(target, prompt, drafter), expected)
    if num_right is not None:
        # Of 24 tokens the prefill gives one; a round that has room gives `num_right` and one more.
        assert statistics.rounds == -(-(TOKENS - 1) // (num_right + 1))


@pytest.mark.parametrize("stored", [True, False])
def test_greedy_is_exact_with_a_reduced_vocabulary(stored):
    """B040: what cannot be drafted is emitted all the same."""
    target, prompt = make_target(), make_prompt()
    expected = greedy(target, prompt)
    drafter = make_eagle3(draft_vocab_size=20, stored=stored)
    # Some of the text's tokens, and others.
    others = torch.arange(75, VOCAB)
    drafter.draft_to_target.copy_(torch.cat((expected[0, 6:10], others)).unique()[:20])
    with collect_statistics() as statistics:
        assert torch.equal(greedy(target, prompt, drafter), expected)
    assert statistics.drafted > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": list(range(3, 20)), "min_new_tokens": 5},
        {"num_assistant_tokens": 2},
    ],
    ids=str,
)
def test_greedy_is_exact_with_processors(options, seed):
    """B005: processors along the drafted path, and stops inside of it."""
    target, prompt = make_target(), make_prompt(seed=seed)
    expected = greedy(target, prompt, **options)
    for num_right in (2, 4):
        drafter = make_scripted(make_eagle3(), expected, num_right)
        assert torch.equal(greedy(target, prompt, drafter, **options), expected)
    assert torch.equal(greedy(target, prompt, make_eagle3(), **options), expected)


@pytest.mark.parametrize("draft_vocab_size", [None, 5])
@pytest.mark.parametrize("name", ["plain", "top_k", "repetition_penalty"])
def test_sampling_keeps_the_distribution(name, draft_vocab_size):
    """
    B001, B002, B081: three tokens of 20,000 rows, chi-square.

    Fails a correct drafter with probability 1e-4 a case over the choice of the seed.
    """
    target, processors = small_target(), WARPERS[name]
    drafter = make_eagle3(vocab_size=8, block_size=3, draft_vocab_size=draft_vocab_size)
    if draft_vocab_size:
        drafter.draft_to_target.copy_(torch.tensor([0, 1, 3, 6, 7]))
    context = drafter.new_context(DRAWS)
    with torch.no_grad():
        states = target(PROMPT, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    ids = torch.cat((PROMPT, torch.tensor([[ANCHOR]])), dim=1).expand(DRAWS, -1)
    drafter.extend(context, features.expand(DRAWS, -1, -1), token_ids=ids[:, 1:])
    block = drafter.draft(context, ids[:, -1], True, processors, ids)
    verification = verify_rows(target, ids, block, processors, torch.full((DRAWS,), 3))
    assert 0 < verification.num_accepted.float().mean() < 3
    counts = path_counts(target, verification, processors)
    assert_distributed_as(counts, exact_paths(target, processors, LENGTH))


def test_sampled_generate_accepts_and_stays_in_the_support():
    """B006: through `generate`; top-k 3 of the target is all that is ever emitted."""
    target, drafter = small_target(), make_eagle3(vocab_size=8)
    with collect_statistics() as statistics:
        output = target.generate(
            PROMPT, max_new_tokens=60, do_sample=True, top_k=3, assistant_model=drafter
        )
    with torch.no_grad():
        best = target(output).logits[:, 3:-1].topk(3).indices
    assert (best == output[:, 4:, None]).any(dim=-1).all()
    assert 0 < statistics.accepted < statistics.verified


# -- what the loop hands over ----------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 2])
@pytest.mark.parametrize("padding", ["none", "left", "hole"])
def test_every_round_drafts_from_the_committed_text(num_right, padding):
    """B050, B052: each row's features and token, as a fresh forward over the text gives them."""
    target = make_target()
    prompt = make_prompt(8)
    mask = torch.ones_like(prompt)
    mask[:, {"none": [], "left": [0, 1], "hole": [3, 4]}[padding]] = 0
    expected = greedy(target, prompt, attention_mask=mask)
    drafter = make_scripted(make_eagle3(), expected, num_right)
    scripted, rounds = drafter.draft, []

    def checking(context, anchor_ids, **kwargs):
        ids = kwargs["input_ids"]
        text = torch.cat((prompt[mask.bool()][None], ids[:, 8:]), dim=1)
        full = torch.cat((mask, torch.ones(1, ids.shape[1] - 8, dtype=torch.long)), dim=1)
        positions = (full.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            states = target(
                ids, attention_mask=full, position_ids=positions, output_hidden_states=True
            ).hidden_states
        features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        features = features[:, full[0].bool()][:, :-1]
        fresh = drafter.new_context(1)
        drafter.extend(fresh, features, token_ids=text[:, 1:])
        assert context.lengths.tolist() == fresh.lengths.tolist() == [text.shape[1] - 1]
        for name in ("keys", "values"):
            one, other = (getattr(c.cache.layers[0], name) for c in (context, fresh))
            rows = context.cache.layers[0].length
            torch.testing.assert_close(one[:, :, :rows], other[:, :, :rows], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(context.last_hidden, fresh.last_hidden, atol=2e-4, rtol=1e-4)
        rounds.append(text.shape[1])
        return scripted(context, anchor_ids, **kwargs)

    drafter.draft = checking
    assert torch.equal(greedy(target, prompt, drafter, attention_mask=mask), expected)
    assert len(rounds) >= 4


def test_only_tokens_that_can_be_of_use_are_drafted():
    """An autoregressive drafter pays for each token: 2 asked for, and none behind the last one."""
    target, prompt = make_target(), make_prompt()
    expected = greedy(target, prompt)
    drafter = make_scripted(make_eagle3(), expected, 4)
    with collect_statistics() as statistics:
        greedy(target, prompt, drafter, num_assistant_tokens=2)
    # 23 tokens behind the first: seven rounds of three, then one draft and the last token.
    assert statistics.drafted == statistics.accepted == 7 * 2 + 1
    with collect_statistics() as statistics:
        greedy(target, prompt, drafter)
    assert statistics.drafted == statistics.accepted == 4 * 4 + 2


def test_blocks_of_a_block_drafter_stay_whole():
    """B072: the limit is none for a drafter that was trained on whole blocks."""
    drafter = make_drafter()
    context = drafter.new_context(1)
    context.limit = 1
    assert drafter.draft(context, torch.tensor([5])).tokens.shape == (1, 4)


@pytest.mark.parametrize("lengths", [[6], [6, 2, 9]], ids=str)
def test_prompts_of_embeddings_alone(caplog, lengths):
    """The text is exact, and the drafter starts behind the prompt; it is said once a call."""
    target, batch = make_target(), pad_left(make_prompts(lengths))
    expected = greedy(target, batch["input_ids"], attention_mask=batch["attention_mask"])
    drafter = make_eagle3()
    embeds = target.get_input_embeddings()(batch.pop("input_ids"))
    with caplog.at_level(logging.WARNING), collect_statistics() as statistics:
        output = greedy(target, None, drafter, inputs_embeds=embeds, **batch)
    assert torch.equal(output, expected[:, max(lengths) :])
    assert statistics.drafted > 0
    told = [record for record in caplog.records if "inputs_embeds alone" in record.message]
    assert len(told) == 1


def test_a_cache_can_be_handed_on():
    """B049: a second turn starts cold at the place where the first one ended."""
    target, prompt = make_target(), make_prompt()
    expected = greedy(target, prompt, max_new_tokens=2 * TOKENS)
    cache = DynamicCache(config=target.config)
    first = greedy(target, prompt, make_eagle3(), cache=cache)
    second = greedy(target, first, make_scripted(make_eagle3(), expected, 3), cache=cache)
    assert torch.equal(second, expected)


def test_custom_generate_and_dict_output():
    """B094: the official extension point, with scores."""
    target, prompt, drafter = make_target(), make_prompt(), make_eagle3()
    plain = target.generate(
        prompt,
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    output = target.generate(
        prompt,
        max_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        custom_generate=drafter.custom_generate(),
    )
    assert isinstance(output, DSparkDecoderOnlyOutput)
    assert torch.equal(output.sequences, plain.sequences)
    torch.testing.assert_close(
        torch.stack(output.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4
    )
    assert output.statistics.drafted > 0


def test_the_hosts_own_loop_pairs_features_and_tokens():
    """B014: the host's protocol, in the host's loop: every feature with the token behind it."""
    target, prompt = make_target(), make_prompt()
    expected = greedy(target, prompt)
    drafter, seen = make_scripted(make_eagle3(), expected, 2), []
    extend = drafter.extend

    def recording(context, features, token_ids):
        seen.append(token_ids)
        extend(context, features, token_ids)

    drafter.extend = recording
    with DSparkCandidateGenerator(
        target,
        drafter,
        DraftSettings(num_draft_tokens=4),
        LogitsProcessorList(),
        do_sample=False,
        batch_size=1,
    ) as generator:
        target._get_candidate_generator = lambda **kwargs: generator
        output = greedy(target, prompt, make_target(seed=5))
    assert torch.equal(output, expected)
    ids = torch.cat(seen, dim=1)
    assert len(seen) > 4
    assert torch.equal(ids, expected[:, 1 : 1 + ids.shape[1]])


def test_confidence_threshold_is_said_to_be_without_effect(caplog):
    """B021: this drafter has no confidence head, so nothing is cut."""
    target, prompt = make_target(), make_prompt()
    with caplog.at_level(logging.WARNING):
        output = greedy(target, prompt, make_eagle3(), dspark_confidence_threshold=0.5)
    assert torch.equal(output, greedy(target, prompt))
    assert "needs a confidence head" in caplog.text


# -- the drafter's own calls -----------------------------------------------------------------------


def test_a_failing_processor_leaves_the_context_as_it_was():
    """B050: rows of a block that was not finished are not left in the cache."""
    drafter = make_eagle3()
    context = drafter.new_context(1)
    features, ids = torch.randn(1, 5, 3 * HIDDEN), torch.randint(3, 90, (1, 5))
    drafter.extend(context, features, token_ids=ids)
    expected = drafter.draft(context, ids[:, -1]).logits

    def failing(path, scores):
        if path.shape[1] == 3:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(RuntimeError, match="no more"):
        drafter.draft(context, ids[:, -1], logits_processor=failing)
    assert torch.equal(drafter.draft(context, ids[:, -1]).logits, expected)


def test_the_anchor_given_is_the_anchor_used():
    """What was drafted from is what `draft` is told, and the committed token is kept for later."""
    drafter = make_eagle3()
    features, ids = torch.randn(1, 5, 3 * HIDDEN), torch.randint(3, 90, (1, 5))
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % VOCAB
    context = drafter.new_context(1)
    drafter.extend(context, features, token_ids=ids)
    torch.testing.assert_close(
        drafter.draft(context, other[:, -1]).logits, drafter(features, other).logits
    )
    more, following = torch.randn(1, 1, 3 * HIDDEN), torch.tensor([[9]])
    drafter.extend(context, more, token_ids=following)
    whole = drafter(torch.cat((features, more), dim=1), torch.cat((ids, following), dim=1))
    torch.testing.assert_close(
        drafter.draft(context, following[:, -1]).logits, whole.logits, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("shape", [(1, 4), (2, 5), (5,)])
def test_token_ids_that_do_not_fit_their_features(shape):
    """B111: both shapes are told."""
    drafter = make_eagle3()
    with pytest.raises(ValueError, match=r"token_ids has shape .*\(1, 5, 96\)"):
        drafter.extend(
            drafter.new_context(1),
            torch.randn(1, 5, 3 * HIDDEN),
            token_ids=torch.zeros(shape, dtype=torch.long),
        )


def test_features_that_do_not_fit():
    """B070: as for every drafter."""
    drafter = make_eagle3()
    with pytest.raises(ValueError, match=r"\(1, 5, 95\).*\(1, T, 96\): 3 taps of width 32"):
        drafter.extend(
            drafter.new_context(1),
            torch.randn(1, 5, 95),
            token_ids=torch.zeros(1, 5, dtype=torch.long),
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_different_lengths_equal_their_single_runs(attention):
    """B050, B055: ragged rounds, padding in front, a round without news, rows that leave."""
    drafter = make_eagle3(attn_implementation=attention)
    features, ids = torch.randn(3, 12, 3 * HIDDEN), torch.randint(3, 90, (3, 12))
    rounds = [[5, 2, 4], [1, 4, 0], [3, 3, 1]]
    rows = [0, 1, 2]
    context = drafter.new_context(3)
    done = [0, 0, 0]
    for number, counts in enumerate(rounds):
        width = max(counts)
        part = torch.full((len(rows), width, 3 * HIDDEN), 9.0)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            # The prompt stands at the right, later rounds at the left.
            at = slice(width - counts[row], width) if number == 0 else slice(0, counts[row])
            new = slice(done[row], done[row] + counts[row])
            part[i, at], tokens[i, at], mask[i, at] = features[row, new], ids[row, new], True
            done[row] += counts[row]
        drafter.extend(context, part, token_ids=tokens, mask=mask)
        assert context.lengths.tolist() == [done[row] for row in rows]
        anchors = torch.stack([ids[row, done[row] - 1] for row in rows])
        block = drafter.draft(context, anchors)
        for i, row in enumerate(rows):
            single = drafter(features[row : row + 1, : done[row]], ids[row : row + 1, : done[row]])
            torch.testing.assert_close(block.logits[i], single.logits[0], atol=1e-4, rtol=1e-4)
            assert torch.equal(block.tokens[i], single.tokens[0])
        if number == 1:
            rows = [2, 0]
            context.select(rows)


def test_drafting_from_nothing():
    drafter = make_eagle3()
    with pytest.raises(ValueError, match=r"row is empty.*extend first"):
        drafter.draft(drafter.new_context(1), torch.tensor([5]))


def test_weights_that_are_no_numbers():
    """B029: told before a token is emitted."""
    drafter = make_eagle3()
    drafter.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits contain NaN"):
        greedy(make_target(), make_prompt(), drafter)


def test_another_target():
    """B070: the pair is compared before anything runs."""
    with pytest.raises(ValueError, match="decoder layers is 4, the drafter expects 6"):
        greedy(make_target(), make_prompt(), make_eagle3(num_target_layers=6))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_binding_gives_up_an_identical_copy_only(name):
    """B079: bit for bit, or not at all."""
    target, drafter = make_target(), make_eagle3()
    with pytest.raises(ValueError, match="has other values"):
        drafter.bind(target)
    drafter.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    drafter.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    features, ids = torch.randn(1, 5, 3 * HIDDEN), torch.randint(3, 90, (1, 5))
    expected = drafter(features, ids).logits
    drafter.bind(target)
    assert getattr(drafter, name) is None
    assert torch.equal(drafter(features, ids).logits, expected)
