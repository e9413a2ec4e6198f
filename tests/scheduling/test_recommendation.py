"""Replaying recorded rounds: figures by hand, and what they advise."""

import pytest
import torch

from dspark_hf.scheduling.acceptance import AcceptanceRecords
from dspark_hf.scheduling.recommendation import compare_policies, recommend, replay
from dspark_hf.scheduling.settings import SchedulingSettings
from dspark_hf.scheduling.throughput_profile import ThroughputProfile


def rounds(confidences, accepted):
    logits = torch.tensor(confidences, dtype=torch.float64).logit()
    accepted = torch.tensor(accepted)
    return AcceptanceRecords(logits, accepted, torch.full_like(accepted, logits.shape[1]))


# Two kinds of rounds: a sure one and a doubtful one.
MIXED = rounds([[0.95, 0.95, 0.95], [0.1, 0.1, 0.1]] * 20, [3, 0] * 20)


def linear(per_token, draft_seconds):
    """A step of one second, and so much more for each further token."""
    seconds = [1 + per_token * i for i in range(32)]
    return ThroughputProfile(
        tuple(range(1, 33)), tuple(1 / value for value in seconds), draft_seconds=draft_seconds
    )


def test_a_fixed_length_by_hand():
    """τ, verified tokens and cost of verifying two of three."""
    outcome = replay(MIXED, linear(0.1, 0.2), SchedulingSettings(), num_draft_tokens=2)
    assert outcome.accepted_length == pytest.approx(1 + (2 + 0) / 2)
    assert outcome.mean_verified == 2
    assert outcome.acceptance_rate == pytest.approx(0.5)
    assert outcome.speedup == pytest.approx(2.0 / (1.2 + 0.2))
    assert outcome.options == {"num_assistant_tokens": 2}


def test_rows_and_load_by_hand():
    """Two rows a step, padded or packed, beside three tokens of other work."""
    settings = SchedulingSettings(verification="threshold", confidence_threshold=0.5)
    for layout, held in (("padded", 8), ("packed", 5)):
        outcome = replay(MIXED, linear(0.1, 0.2), settings, rows=2, load=3, layout=layout)
        # A sure row verifies three, its doubtful neighbour none.
        assert outcome.mean_verified == 1.5
        seconds = 1 + 0.1 * (held + 3 - 1) + 0.2
        assert outcome.speedup == pytest.approx((5 + 3) / seconds / (5 / 1.4))
    with pytest.raises(ValueError, match="do not fill one step of 41 rows"):
        replay(MIXED, linear(0.1, 0.2), settings, rows=41)


def test_what_ended_early_is_not_counted_as_verified():
    """Rounds in which the text stopped judged fewer tokens."""
    records = AcceptanceRecords(
        MIXED.confidence_logits[:2], torch.tensor([1, 0]), torch.tensor([1, 3])
    )
    assert replay(records, linear(0.1, 0.2), SchedulingSettings()).mean_verified == 2


def test_temperatures_change_the_replay():
    """A cold drafter that is right half of the time."""
    settings = {"verification": "threshold", "confidence_threshold": 0.6}
    raw = replay(MIXED, linear(0.1, 0.2), SchedulingSettings(**settings))
    warm = replay(MIXED, linear(0.1, 0.2), SchedulingSettings(temperatures=(8.0,) * 3, **settings))
    assert (raw.mean_verified, warm.mean_verified) == (1.5, 0)
    assert warm.acceptance_rate != warm.acceptance_rate


def test_the_advice_follows_the_costs():
    """Verification for nothing: everything. Dear: the scheduler. Drafts too dear: no drafter."""
    free = compare_policies(MIXED, linear(0.0, 0.2))
    choice = recommend(free)
    assert choice.options == {"num_assistant_tokens": 3}
    dear = compare_policies(MIXED, linear(0.5, 0.2))
    choice = recommend(dear)
    assert choice.settings.verification in ("scheduled", "threshold")
    assert choice.speedup > max(one.speedup for one in dear[:2]) * 1.01
    assert "dspark_verification" in choice.options
    assert "dspark_load" not in choice.options
    loaded = compare_policies(MIXED, linear(0.5, 0.2), load=3)[3].options
    assert loaded["dspark_load"] == 3
    assert recommend(compare_policies(MIXED, linear(0.1, 5.0))) is None


def test_the_scheduler_is_never_worse_than_everything_and_falls_with_load():
    """Confidences that are right: Θ is the real rate, whatever the load."""
    torch.manual_seed(0)
    confidence = torch.rand(500, 4).pow(0.4)
    accepted = (torch.rand(500, 4) < confidence).long().cumprod(dim=1).sum(dim=1)
    records = AcceptanceRecords(confidence.logit(), accepted, torch.full((500,), 4))
    profile, verified = linear(0.12, 0.3), []
    for load in (0, 4, 16, 64):
        everything = replay(records, profile, SchedulingSettings(), load=load)
        scheduled = SchedulingSettings(verification="scheduled")
        early = replay(records, profile, scheduled, load=load)
        assert early.speedup > everything.speedup * 0.98
        verified.append(early.mean_verified)
    assert verified == sorted(verified, reverse=True)
    assert verified[0] > 2.5
    assert verified[-1] < 0.5
