"""STS on synthetic logits with known temperatures; reliability against a library; files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, roc_auc_score

from dspark_hf import DSparkDrafter
from dspark_hf.generation.statistics import RoundRecord
from dspark_hf.scheduling.acceptance import AcceptanceRecords
from dspark_hf.scheduling.calibration import (
    Calibration,
    collect_acceptance,
    confidence_fingerprint,
)
from dspark_hf.scheduling.reliability import (
    brier_score,
    expected_calibration_error,
    ranking_quality,
)
from dspark_hf.scheduling.temperature_scaling import (
    TEMPERATURE_GRID,
    assess,
    chance_ece,
    fit_temperatures,
    fit_with_offsets,
    mean_ece,
    survival_predictions,
)
from tiny import make_drafter, make_prompt, make_scripted, make_target


def synthetic(temperatures, rounds, seed=0):
    """Rounds in which the confidence logits are `temperatures` times too large."""
    generator = torch.Generator().manual_seed(seed)
    block = len(temperatures)
    true_logits = 1.2 + 1.5 * torch.randn(rounds, block, generator=generator)
    survives = torch.rand(rounds, block, generator=generator) < true_logits.sigmoid()
    accepted = survives.long().cumprod(dim=1).sum(dim=1)
    logits = true_logits * torch.tensor(temperatures)
    return AcceptanceRecords(logits, accepted, torch.full((rounds,), block))


def test_known_temperatures_are_recovered():
    """B122: over- and under-confident positions, within a grid step; ranking unchanged."""
    known = [2.0, 1.0, 0.5]
    records = synthetic(known, 20_000)
    fitted = fit_temperatures(records)
    steps = (fitted / torch.tensor(known)).log2().abs() * 16
    assert steps.max() <= 1 + 1e-9
    held_out = synthetic(known, 20_000, seed=1)
    before, after = assess(held_out), assess(held_out, fitted)
    assert mean_ece(before) > 0.05
    assert mean_ece(after) < 0.02
    # Order-preserving at each position: of the first one the survival itself is the confidence.
    assert after[0].auc == pytest.approx(before[0].auc, abs=1e-12)


def test_a_constant_error_needs_an_offset():
    """
    Beyond the paper: a logit that is too large by a constant keeps its error under any temperature;
    temperature and offset together are recovered.
    """
    known, shifts = torch.tensor([2.0, 0.5]), torch.tensor([1.5, -0.8])

    def shifted(seed):
        records = synthetic(known.tolist(), 10_000, seed)
        return replace(records, confidence_logits=records.confidence_logits + known * shifts)

    records, held_out = shifted(0), shifted(1)
    temperatures, offsets = fit_with_offsets(records)
    assert (temperatures / known).log2().abs().max() <= 2 / 16 + 1e-9
    torch.testing.assert_close(offsets, -shifts.double(), atol=0.1, rtol=0)
    # What the fit promises on its own rounds: right on average at every position.
    predicted = survival_predictions(records.confidence_logits, temperatures, offsets)
    survived = torch.stack([records.survived(k) for k in range(2)], dim=1).double()
    torch.testing.assert_close(predicted.mean(dim=0), survived.mean(dim=0), atol=1e-5, rtol=0)
    before, after = assess(held_out), assess(held_out, temperatures, offsets)
    assert mean_ece(assess(held_out, fit_temperatures(records))) > 0.03
    assert mean_ece(after) < 0.02
    assert after[0].auc == pytest.approx(before[0].auc, abs=1e-12)


def test_offsets_keep_what_a_confidence_says():
    """
    With the right mean a constant has no calibration error at all; on a few rounds of a head that
    ranks well, likelihood keeps the ranking of the survival.
    """
    for seed in (1, 3, 4):
        records = synthetic([1.0, 1.0], 200, seed)
        temperatures, offsets = fit_with_offsets(records)
        assert temperatures.max() < 2
        raw, fitted = assess(records)[1], assess(records, temperatures, offsets)[1]
        assert fitted.auc > raw.auc - 0.02


def test_what_chance_alone_would_show():
    """Falls with the root of the rounds, and is what confidences show that are right."""
    few, many = synthetic([1.0, 1.0], 500), synthetic([1.0, 1.0], 8000)
    assert chance_ece(few) == chance_ece(few)
    assert chance_ece(few) / chance_ece(many) == pytest.approx(4, rel=0.15)
    assert mean_ece(assess(many)) == pytest.approx(chance_ece(many), rel=0.35)


def test_no_data_is_the_identity():
    """B122, B125: positions that nothing judged keep 1, and their figures are NaN."""
    records = synthetic([2.0, 2.0, 2.0], 2000)
    short = AcceptanceRecords(
        records.confidence_logits, records.num_accepted.clamp(max=1), torch.full((2000,), 1)
    )
    fitted = fit_temperatures(short)
    assert fitted[0] > 1.5
    assert fitted[1:].tolist() == [1.0, 1.0]
    assert [values[1:].tolist() for values in fit_with_offsets(short)] == [[1.0, 1.0], [0.0, 0.0]]
    report = assess(short)[1]
    assert report.count == 0
    assert all(np.isnan(value) for value in (report.ece, report.brier, report.auc, report.survival))
    assert np.isfinite(mean_ece(assess(short)))
    nothing = AcceptanceRecords(torch.zeros(0, 3), torch.zeros(0).long(), torch.zeros(0).long())
    assert fit_temperatures(nothing).tolist() == [1.0] * 3
    assert np.isnan(mean_ece(assess(nothing)))


def test_ties_go_to_the_temperature_closest_to_one():
    """Where every temperature is equally wrong, nothing is changed."""
    accepted = torch.tensor([0, 2]).repeat(50)
    records = AcceptanceRecords(torch.zeros(100, 2), accepted, torch.full((100,), 2))
    assert fit_temperatures(records).tolist() == [1.0, 1.0]
    assert 1.0 in TEMPERATURE_GRID
    assert (TEMPERATURE_GRID.min(), TEMPERATURE_GRID.max()) == (0.125, 8.0)


def test_a_handful_of_outcomes_is_no_data():
    """Fewer than 20 rounds of either kind leave a position as it is."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 1, generator=generator)
    for survived, is_fitted in ((19, False), (20, True), (380, True), (381, False)):
        # The rounds that survive have nothing to do with the confidences: hotter is better.
        accepted = (torch.randperm(400, generator=generator) < survived).long()
        fitted = fit_temperatures(AcceptanceRecords(logits, accepted, torch.full((400,), 1)))
        assert (fitted[0] != 1) == is_fitted


def test_survival_is_cumulative():
    """Section 4: a_j is the product up to j, each factor with its own temperature."""
    logits = torch.tensor([[0.9, 0.4]]).logit()
    torch.testing.assert_close(
        survival_predictions(logits), torch.tensor([[0.9, 0.36]]).double(), atol=1e-6, rtol=0
    )
    scaled = survival_predictions(logits, torch.tensor([2.0, 1.0]))
    assert scaled[0].tolist() == pytest.approx([0.75, 0.75 * 0.4], abs=1e-6)


@pytest.mark.parametrize("levels", [8, 10**6])
def test_figures_agree_with_a_library(levels):
    """With many ties, both ends of the scale included, and with few."""
    generator = torch.Generator().manual_seed(0)
    predictions = (torch.rand(500, generator=generator) * levels).round() / levels
    outcomes = torch.rand(500, generator=generator) < predictions
    assert levels > 8 or {0.0, 1.0} < set(predictions.tolist())
    expected = roc_auc_score(outcomes.numpy(), predictions.numpy())
    assert ranking_quality(predictions, outcomes) == pytest.approx(expected)
    expected = brier_score_loss(outcomes.numpy(), predictions.numpy())
    assert brier_score(predictions, outcomes) == pytest.approx(expected)


def test_calibration_error_by_hand():
    """B125: two bins, empty ones, probability 1, a batch of predictions."""
    predictions = torch.tensor([0.11, 0.12, 1.0, 1.0])
    outcomes = torch.tensor([True, False, True, True])
    expected = (abs(0.23 - 1) + 0) / 4
    assert float(expected_calibration_error(predictions, outcomes)) == pytest.approx(expected)
    both = torch.stack((predictions, torch.full((4,), 0.75)))
    assert expected_calibration_error(both, outcomes).tolist() == pytest.approx([expected, 0.0])
    assert torch.isnan(expected_calibration_error(torch.zeros(0), torch.zeros(0).bool()))
    for one_class in (torch.ones(4).bool(), torch.zeros(4).bool()):
        assert np.isnan(ranking_quality(predictions, one_class))
    assert np.isnan(ranking_quality(torch.zeros(0), torch.zeros(0).bool()))
    assert np.isnan(brier_score(torch.zeros(0), torch.zeros(0).bool()))


def test_rounds_become_records_and_files(tmp_path):
    """Raw logits come back; rounds without drafts are left out; other files are named."""
    rounds = [
        RoundRecord([1, 2], 2, 2, 1, [0.9, 0.4]),
        RoundRecord([1], 0, 0, 0, None),
        RoundRecord([5], 2, 1, 0, [1.0, 0.0]),
    ]
    records = AcceptanceRecords.from_rounds(rounds, {"target": "T"})
    assert records.confidence_logits[0].tolist() == pytest.approx(
        torch.tensor([0.9, 0.4]).logit().tolist(), abs=1e-5
    )
    assert records.confidence_logits.isfinite().all()
    assert (records.num_accepted.tolist(), records.num_verified.tolist()) == ([1, 0], [2, 1])
    records.save(tmp_path / "rounds.safetensors")
    loaded = AcceptanceRecords.load(tmp_path / "rounds.safetensors")
    assert torch.equal(loaded.confidence_logits, records.confidence_logits)
    assert loaded.facts == {"target": "T"}
    # A text of two tokens has no room for a draft.
    with pytest.raises(ValueError, match="No recorded round drafted anything"):
        AcceptanceRecords.from_rounds(rounds[1:2])
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file"):
        AcceptanceRecords.load(tmp_path / "text")
    make_drafter().save_pretrained(tmp_path)
    replace(records, confidence_logits=torch.zeros(2)).save(tmp_path / "flat.safetensors")
    for name in ("model", "flat"):
        with pytest.raises(ValueError, match="expected confidence_logits"):
            AcceptanceRecords.load(tmp_path / f"{name}.safetensors")
    for changes, message in (
        ({"num_accepted": torch.tensor([1, 2])}, "round 2 accepts 2 of 1 verified"),
        ({"num_verified": torch.tensor([3, 1])}, "verified tokens of 2"),
        ({"num_accepted": torch.tensor([1, -1])}, "round 2 accepts -1"),
        ({"num_accepted": torch.tensor([1.0, 0.0])}, "num_accepted is torch.float32"),
        ({"confidence_logits": torch.full((2, 2), torch.nan)}, "finite"),
        ({"facts": {"pair": "T"}}, "its facts are"),
    ):
        replace(records, **changes).save(tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match=rf"wrong\.safetensors holds no.*{message}"):
            AcceptanceRecords.load(tmp_path / "wrong.safetensors")


def test_collected_logits_are_the_heads_own():
    """Through the real loop, whatever temperatures and policy the drafter has set for itself."""
    target, prompt = make_target("qwen3"), make_prompt(6)
    expected = target.generate(prompt, max_new_tokens=20, do_sample=False)
    drafter = make_scripted(make_drafter(), expected, 2)
    drafter.generation_config.dspark_sts_temperatures = [3.0, 3.0, 3.0, 3.0]
    drafter.generation_config.dspark_confidence_offsets = [-9.0, -9.0, -9.0, -9.0]
    drafter.generation_config.dspark_confidence_threshold = 0.999999
    draft, said = drafter.draft, []

    def listening(*args, **kwargs):
        block = draft(*args, **kwargs)
        said.append(block.confidence_logits[0])
        return block

    drafter.draft = listening
    records = collect_acceptance(
        target, drafter, [{"input_ids": prompt}], max_new_tokens=20, do_sample=False
    )
    torch.testing.assert_close(records.confidence_logits, torch.stack(said), atol=1e-4, rtol=1e-4)
    assert records.num_accepted[:-1].tolist() == [2] * (len(records) - 1)
    assert drafter.generation_config.dspark_sts_temperatures == [3.0, 3.0, 3.0, 3.0]


def calibration_of(drafter, **changes):
    values = {
        "temperatures": (1.0, 2.0, 0.5, 1.0),
        "block_size": 4,
        "drafter": confidence_fingerprint(drafter),
        "num_rounds": 100,
    }
    return Calibration(**(values | changes))


def test_temperatures_travel_with_the_drafter(tmp_path):
    """Fitted, applied, saved, loaded in another precision."""
    drafter = make_drafter()
    calibration = calibration_of(drafter, offsets=(0.5, 0.0, -1.0, 0.0))
    calibration.save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json")
    assert loaded == calibration
    loaded.apply_to(drafter)
    drafter.save_pretrained(tmp_path / "drafter")
    again = DSparkDrafter.from_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    assert again.generation_config.dspark_sts_temperatures == [1.0, 2.0, 0.5, 1.0]
    assert again.generation_config.dspark_confidence_offsets == [0.5, 0.0, -1.0, 0.0]
    # The paper's temperatures alone take the offsets of an earlier fit away.
    calibration_of(drafter).apply_to(again)
    assert again.generation_config.dspark_confidence_offsets is None
    loaded.apply_to(again)


def test_foreign_and_malformed_calibrations_are_refused(tmp_path):
    """Another drafter, another γ, no head, no calibration at all."""
    drafter = make_drafter()
    with pytest.raises(ValueError, match="fitted for a drafter with confidence head"):
        calibration_of(drafter).apply_to(make_drafter(seed=9))
    with pytest.raises(ValueError, match="γ = 4, and this one has γ = 3"):
        calibration_of(drafter).apply_to(make_drafter(block_size=3))
    with pytest.raises(ValueError, match="no confidence head"):
        confidence_fingerprint(make_drafter(confidence=False))
    path = tmp_path / "calibration.json"
    calibration_of(drafter).save(path)
    good = json.loads(path.read_text())
    broken = (
        "no json",
        "[]",
        json.dumps({"temperatures": [1.0]}),
        json.dumps(good | {"temperatures": [1.0, 2.0]}),
        json.dumps(good | {"temperatures": [1.0, -2.0, 1.0, 1.0]}),
        json.dumps(good | {"temperatures": "warm"}),
        json.dumps(good | {"temperatures": None}),
        json.dumps(good | {"offsets": [1.0]}),
        json.dumps(good | {"colour": "blue"}),
        json.dumps(good | {"block_size": "4"}),
        json.dumps(good | {"num_rounds": "many"}),
        json.dumps(good | {"facts": 3}),
    )
    for text in broken:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"calibration\.json is not a calibration file"):
            Calibration.load(path)
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, found '4'"):
        Calibration((1.0,) * 4, "4", "", 100)  # type: ignore[arg-type]
    # Zero for float32, so nothing but NaN would come out.
    with pytest.raises(ValueError, match="must be at least 1e-06"):
        Calibration((1e-60,) * 4, 4, "", 100)


def test_a_float16_copy_is_told_that_it_may_be_the_same_drafter():
    """It is rounded twice, and on the way some weights become others."""
    drafter = make_drafter()
    calibration = calibration_of(drafter)
    calibration.apply_to(make_drafter().bfloat16())
    with pytest.raises(ValueError, match="load it in float32 or bfloat16"):
        calibration.apply_to(make_drafter(seed=9).half())
