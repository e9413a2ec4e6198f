"""What is counted, and what it is called."""

import gc
import math
import threading

import pytest
import torch

from dspark_hf import RoundRecord, Statistics, collect_statistics
from dspark_hf.generation.taps import TargetTaps
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)


def statistics_of_rounds(*rounds):
    statistics = Statistics()
    for verified, accepted, committed in rounds:
        statistics.add_round(RoundRecord(list(range(committed)), 4, verified, accepted))
    return statistics


def test_accepted_length_is_a_ratio_of_sums_with_the_bonus_token():
    """B149."""
    statistics = statistics_of_rounds((4, 4, 5), (4, 0, 1), (4, 2, 3))
    assert statistics.accepted_length == 3.0
    assert statistics.accepted_length_without_bonus == 2.0
    assert math.isnan(Statistics().accepted_length)


def test_prefix_and_conditional_acceptance():
    """B154: rounds with 4, 0 and 2 accepted; one round verified two tokens only."""
    statistics = statistics_of_rounds((4, 4, 5), (4, 0, 1), (4, 2, 3), (2, 2, 3))
    assert statistics.verified_at == [4, 4, 3, 3]
    assert statistics.accepted_at == [3, 3, 1, 1]
    assert statistics.reached_at == [4, 3, 2, 1]
    assert statistics.prefix_acceptance == [3 / 4, 3 / 4, 1 / 3, 1 / 3]
    assert statistics.conditional_acceptance == [3 / 4, 1.0, 1 / 2, 1.0]


def test_a_line_for_people():
    statistics = statistics_of_rounds((4, 4, 5), (4, 0, 1), (4, 2, 3), (2, 2, 3))
    statistics.calls, statistics.new_tokens = 1, 13
    assert str(statistics) == (
        "τ 3.00: 13 tokens of 1 calls, 4 rounds; 8 of 14 verified draft tokens accepted; "
        "acceptance by position, given all before: 0.75, 1.00, 0.50, 1.00"
    )
    assert "τ nan" in str(Statistics())


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5])
def test_a_stop_token_inside_an_accepted_run(offset):
    """B028, B150: emitted tokens count, and there is no bonus behind a stop."""
    target, prompt = make_target("qwen3"), make_prompt(6, seed=8)
    text = target.generate(prompt, max_new_tokens=12, do_sample=False)
    new = text[0, 6:].tolist()
    assert new[offset] not in new[:offset]
    drafter = make_scripted(make_drafter(), text, 4)
    output = target.generate(
        prompt,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=new[offset],
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    statistics = output.statistics
    # The first round drafts new tokens 1 to 4 and commits token 5 as its bonus.
    assert statistics.rounds == 1
    assert statistics.committed == offset
    assert statistics.accepted == min(offset, 4)
    assert statistics.verified == min(offset, 4)
    assert statistics.accepted_length == offset


def test_calls_are_added_up():
    """Counts of two calls are the sums; rates are ratios of sums."""
    target, drafter = make_target("qwen3"), make_drafter()
    parts = []
    with collect_statistics() as both:
        for length in (6, 9):
            with collect_statistics() as one:
                target.generate(
                    PROMPT, max_new_tokens=length, do_sample=False, assistant_model=drafter
                )
            parts.append(one)
    assert both.calls == 2
    assert both.new_tokens == 15
    assert both.rounds == sum(part.rounds for part in parts)
    assert sum(both.verify_lengths.values()) == both.rounds
    assert both.verified_at[0] == sum(part.verified_at[0] for part in parts)
    assert both.total_seconds == pytest.approx(sum(part.total_seconds for part in parts))
    assert both.as_dict()["accepted_length"] == both.accepted_length


def test_collectors_see_their_own_thread_only():
    """Thread-safe: a call in another thread is another thread's business."""
    target, drafter = make_target("qwen3"), make_drafter()
    seen = {}

    def run(name, length):
        with collect_statistics() as statistics:
            target.generate(PROMPT, max_new_tokens=length, do_sample=False, assistant_model=drafter)
        seen[name] = statistics.new_tokens

    with collect_statistics() as outer:
        threads = [threading.Thread(target=run, args=(i, 5 + i)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {0: 5, 1: 6, 2: 7}
    assert outer.calls == 0


def test_rounds_are_reported_while_generating():
    """A listener sees every round, and its tokens add up to the text."""
    target, drafter = make_target("qwen3"), make_drafter()
    records = []
    with collect_statistics(on_round=records.append) as statistics:
        output = target.generate(
            PROMPT, max_new_tokens=10, do_sample=False, assistant_model=drafter
        )
    assert len(records) == statistics.rounds
    assert [token for record in records for token in record.tokens] == output[0, 7:].tolist()
    assert all(len(record.confidences) == 4 for record in records if record.num_drafted)


def test_confidence_reliability_counts_the_rounds_it_speaks_of():
    """B126: position k counts only if every earlier one was accepted."""
    statistics = Statistics()
    statistics.add_round(RoundRecord([1, 2], 3, 3, 1, [0.95, 0.45, 0.05]))
    bins = statistics.confidence_bins
    assert bins[9] == [1, 0.95, 1]
    assert bins[4] == [1, 0.45, 0]
    assert bins[0] == [0, 0.0, 0]
    statistics.add_round(RoundRecord([1, 2, 3, 4], 3, 3, 3, [1.0, 1.0, 1.0]))
    assert bins[9] == [4, 3.95, 4]


def test_a_drafter_that_is_never_right_is_reported_once(caplog):
    """B101, B102: the text is right all the same, so only a message can tell."""
    target = make_target("qwen3")
    text = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    drafter = make_scripted(make_drafter(), text, 0)
    for _ in range(2):
        target.generate(PROMPT, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert sum("was accepted in" in record.message for record in caplog.records) == 1


def test_a_drafter_that_proposes_nothing_is_reported_once(caplog):
    """B101, B118."""
    target, drafter = make_target("qwen3"), make_drafter()
    draft = drafter.draft

    def empty(*args, **kwargs):
        block = draft(*args, **kwargs)
        block.tokens, block.logits = block.tokens[:, :0], block.logits[:, :0]
        return block

    drafter.draft = empty
    expected = target.generate(PROMPT, max_new_tokens=16, do_sample=False)
    for _ in range(2):
        output = target.generate(
            PROMPT, max_new_tokens=16, do_sample=False, assistant_model=drafter
        )
        assert torch.equal(output, expected)
    assert sum("proposed nothing" in record.message for record in caplog.records) == 1


def test_only_tapped_states_survive_the_prefill():
    """B105: of 12 layers, two tensors of the prompt's size are alive after the forward."""
    target = make_target("qwen3", num_hidden_layers=12)
    prompt = make_prompt(200)

    def alive():
        gc.collect()
        shape = (1, 200, 32)
        tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
        return sum(t.shape == shape for t in tensors)

    before = alive()
    with TargetTaps(target, [2, 9]) as taps, torch.no_grad():
        logits = target(prompt, logits_to_keep=1).logits
        assert logits.shape[1] == 1
        assert alive() - before == 2
        features = taps.take()
        assert alive() - before == 0
    assert features.shape == (1, 200, 64)


def test_prefill_asks_for_one_row_of_logits():
    """B106: one at the prefill, as many as submitted tokens plus one afterwards."""
    target, drafter = make_target("qwen3"), make_drafter()
    rows = []
    target.lm_head.register_forward_hook(lambda m, args, out: rows.append(out.shape[1]))
    target.generate(make_prompt(100), max_new_tokens=11, do_sample=False, assistant_model=drafter)
    assert rows[0] == 1
    assert max(rows[1:]) == 5


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "gemma3", "mistral_swa"])
def test_taps_read_the_raw_output_of_their_layer(family):
    """B067, B161: for every layer, and the input of the first."""
    target = make_target(family, attention="eager")
    prompt = make_prompt(12)
    with TargetTaps(target, [-1, 0, 1, 2, 3]) as taps, torch.no_grad():
        states = target(prompt, output_hidden_states=True).hidden_states
        features = taps.take()
    for i, state in enumerate(states[:-1]):
        assert torch.equal(features[..., 32 * i : 32 * (i + 1)], state)
    last = features[..., -32:]
    # The host's last entry is normed; the tap is not.
    assert not torch.allclose(last, states[-1])
    norm = target.transformer.ln_f if family == "gpt2" else target.model.norm
    torch.testing.assert_close(norm(last), states[-1])
