"""Averages, errors and confidences: definitions against known answers and a second library."""

import csv
import math
from pathlib import Path

import pytest
import torch

from dspark_hf import RoundRecord
from dspark_hf.evaluation import metrics
from dspark_hf.evaluation.confidence import confidence_figures, reliability, survival_pairs
from dspark_hf.evaluation.records import Record
from dspark_hf.evaluation.reporting import gain
from dspark_hf.scheduling.reliability import expected_calibration_error

FIXTURES = Path(__file__).parents[1] / "fixtures"


def record(drafter, name, index, rounds, seconds=1.0):
    tokens = [0] * (1 + sum(r[0] for r in rounds))
    return Record(drafter, 1.0, name, index, "x", 5, tokens, seconds, rounds=rounds)


def test_accepted_length_weighs_rounds_and_macro_weighs_sets():
    """B149: ratio of sums inside a set, plain mean over sets."""
    drafted = [
        record("d", "a", 0, [[5, 4, 4, 4]]),
        record("d", "a", 1, [[1, 4, 4, 0]] * 3, seconds=2.0),
        record("d", "b", 0, [[3, 4, 4, 2]] * 2),
    ]
    plain = [record("plain", "a", 0, [], 0.5), record("plain", "b", 0, [], 1.0)]
    (result,) = metrics.summarise(drafted + plain, [{"id": "d", "name": "D"}], {})["results"]
    a, b = result["sets"]
    assert a["accepted_length"] == 8 / 4
    assert b["accepted_length"] == 3
    assert result["macro"]["accepted_length"] == 2.5
    assert result["pooled"]["accepted_length"] == 14 / 6
    assert a["acceptance_rate"] == 4 / 16
    # First tokens are part of the speed, and of nothing else.
    assert a["tokens_per_second"] == 10 / 3
    assert a["speedup"] == pytest.approx((10 / 3) / 2)
    assert result["macro"]["speedup"] == pytest.approx(((10 / 3) / 2 + 7) / 2)


def test_macro_gains_are_those_the_paper_quotes():
    """Table 1 and its text: DSpark over Eagle3 and over DFlash."""
    with open(FIXTURES / "paper_table1.csv", encoding="utf-8", newline="") as file:
        rows = {(row[0], row[1]): [float(x) for x in row[2:]] for row in list(csv.reader(file))[1:]}

    def result(target, drafter):
        sets = [
            {**dict.fromkeys((*metrics._AVERAGED, "accepted_length_error"), 0.0),
             "accepted_length": tau}
            for tau in rows[target, drafter]
        ]  # fmt: skip
        return {"macro": metrics.macro_average(sets)}

    quoted = {"Qwen3-4B": (30.9, 16.3), "Qwen3-8B": (26.7, 18.4), "Qwen3-14B": (30.0, 18.3)}
    for target, expected in quoted.items():
        gains = gain([result(target, name) for name in ("DSpark", "Eagle3", "DFlash")])
        assert [round(100 * g, 1) for g in gains[1:]] == pytest.approx(expected, abs=0.11)


def test_the_standard_error_is_that_of_repeated_experiments():
    """Delta method against the spread of 3,000 simulated evaluations, within 10 %."""
    generator = torch.Generator().manual_seed(0)
    rates = 0.3 + 0.6 * torch.rand(3000, 60, generator=generator)
    rounds = torch.randint(5, 80, (3000, 60), generator=generator).double()
    committed = rounds * (1 + 4 * rates)
    taus = committed.sum(1) / rounds.sum(1)
    errors = [
        metrics.ratio_error(list(zip(c.tolist(), r.tolist(), strict=True)))
        for c, r in zip(committed[:200], rounds[:200], strict=True)
    ]
    assert sum(errors) / len(errors) == pytest.approx(float(taus.std()), rel=0.1)
    # By hand: ratio 3, deviations of 1, and n / (n - 1) = 2.
    assert metrics.ratio_error([(2, 1), (4, 1)]) == 1.0
    assert math.isnan(metrics.ratio_error([(5, 2)]))


def test_predictions_are_cumulative_and_labels_are_prefixes():
    """B126: what was verified, up to a stop; nothing about what was not."""
    rounds = [
        RoundRecord([1, 2], 3, 3, 1, [0.5, 0.5, 0.8]),
        RoundRecord([1], 3, 1, 1, [0.9, 0.1, 0.1]),
        RoundRecord([1], 0, 0, 0, None),
    ]
    (p0, y0), (p1, y1), (p2, y2) = survival_pairs(rounds)
    assert p0.tolist() == [0.5, 0.9]
    assert y0.tolist() == [1, 1]
    assert (p1.tolist(), y1.tolist()) == ([0.25], [0])
    assert p2.tolist() == pytest.approx([0.2])
    assert y2.tolist() == [0]
    assert confidence_figures([RoundRecord([1], 3, 3, 0)]) is None


def test_ece_of_known_answers():
    """Twenty equal-width bins, weighted by count; 1 belongs to the last one."""
    predictions = torch.tensor([0.26] * 10 + [0.74] * 30 + [1.0] * 10, dtype=torch.float64)
    labels = torch.tensor([1] * 5 + [0] * 5 + [1] * 15 + [0] * 15 + [1] * 10, dtype=torch.bool)
    expected = (10 * 0.24 + 30 * 0.24 + 0) / 50
    assert float(expected_calibration_error(predictions, labels)) == pytest.approx(expected)
    counts, predicted, observed = reliability(predictions, labels)
    assert counts[[5, 14, 19]].tolist() == [10, 30, 10]
    assert counts.sum() == 50
    assert predicted[5] == pytest.approx(0.26)
    assert observed[[5, 14, 19]].tolist() == [0.5, 0.5, 1.0]
    # Opposite errors inside one bin cancel, which is what tells ECE from a mean absolute error.
    assert float(expected_calibration_error(predictions[:10], labels[:10], 1)) == pytest.approx(
        0.24
    )


def test_ece_of_calibrated_and_overconfident_predictions():
    """Uniform p: labels of probability p give 0, of probability p² the mean of p - p², 1/6."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200_000, generator=generator, dtype=torch.float64)
    draws = torch.rand(200_000, generator=generator, dtype=torch.float64)
    # Twenty bins of 10,000 draws: the mean absolute deviation is 0.004 at most.
    assert float(expected_calibration_error(p, draws < p)) < 0.006
    error = float(expected_calibration_error(p, draws < p.square()))
    assert error == pytest.approx(1 / 6, abs=0.006)


def test_means_over_positions_are_weighted_by_count():
    """Positions whose figure is unknown carry no weight."""
    rounds = [RoundRecord([1, 2, 3], 2, 2, 2, [0.9, 1.0])] + [
        RoundRecord([1], 2, 1, 0, [0.3, 0.0])
    ] * 3
    figures = confidence_figures(rounds)
    assert figures["counts"] == [4, 1]
    assert figures["ece"] == pytest.approx([(0.1 + 3 * 0.3) / 4, 0.1])
    assert figures["mean_ece"] == pytest.approx((4 * 0.25 + 0.1) / 5)
    assert figures["mean_roc_auc"] == figures["roc_auc"][0] == 1.0
    assert sum(figures["reliability"][0]["counts"]) == 4
