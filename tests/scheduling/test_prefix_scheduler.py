"""The prefix scheduler as pure functions: optima, jagged curves, ties, many rows."""

import itertools
import pickle

import pytest
import torch

from dspark_hf.scheduling.policy import VerificationPolicy
from dspark_hf.scheduling.prefix_scheduler import (
    admission_gains,
    admit,
    best_count,
    early_stop,
    keep_prefix,
    most_units,
    step_tokens,
    survival_probabilities,
    throughput,
)
from dspark_hf.scheduling.settings import SchedulingSettings
from dspark_hf.scheduling.throughput_profile import ThroughputProfile


def plan(survival, steps_per_second, search, layout="packed", load=0):
    """Verify lengths, and Θ there."""
    gains = admission_gains(survival, layout)
    theta = throughput(gains, steps_per_second, survival.shape[0] + load)
    count = search(theta)
    return admit(survival, count, layout).tolist(), float(theta[count])


def brute_force(survival, steps_per_second, layout, load=0):
    """The best Θ over all combinations of verify lengths."""
    rows, block = survival.shape
    best = 0.0
    for lengths in itertools.product(range(block + 1), repeat=rows):
        tau = rows + load + sum(float(survival[r, :n].sum()) for r, n in enumerate(lengths))
        units = sum(lengths) if layout == "packed" else max(lengths)
        best = max(best, tau * float(steps_per_second[units]))
    return best


def random_survival(rows, block, generator):
    return torch.rand(rows, block, dtype=torch.float64, generator=generator).cumprod(dim=1)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("load", [0, 5])
def test_early_stop_is_optimal_where_a_token_never_gets_cheaper(layout, load):
    """Step times that grow faster and faster make Θ unimodal: 40 random curves and survivals."""
    generator = torch.Generator().manual_seed(load)
    for _ in range(40):
        survival = random_survival(3, 4, generator)
        units = 12 if layout == "packed" else 4
        growth = torch.rand(units + 1, dtype=torch.float64, generator=generator).sort().values
        curve = 1 / (0.5 + growth.cumsum(0) * float(torch.rand(1, generator=generator)))
        lengths, theta = plan(survival, curve, early_stop, layout, load)
        assert theta == pytest.approx(brute_force(survival, curve, layout, load), rel=1e-12)
        assert plan(survival, curve, best_count, layout, load)[0] == lengths


def test_what_brings_nothing_is_not_admitted():
    """Algorithm 1 asks for more, not for as much; of equal steps the shortest is the best."""
    assert int(early_stop(torch.tensor([1.0, 1.0, 2.0]))) == 0
    assert int(early_stop(torch.tensor([1.0, 2.0, 2.0, 3.0]))) == 1
    assert int(early_stop(torch.tensor([1.0, 2.0, 3.0]))) == 2
    assert int(best_count(torch.tensor([1.0, 2.0, 2.0]))) == 1


def test_a_search_reaches_past_a_cliff_where_the_early_stop_stays():
    """B119: the third token costs a step of the stairs that holds five."""
    survival = torch.tensor([[0.95, 0.9, 0.85, 0.8, 0.75]], dtype=torch.float64)
    curve = 1 / torch.tensor([1.0, 1.05, 1.1, 1.6, 1.6, 1.6], dtype=torch.float64)
    assert plan(survival, curve, early_stop)[0] == [2]
    assert plan(survival, curve, best_count)[0] == [5]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_search_is_optimal_on_any_curve(layout):
    """Jagged curves: 40 random stairs."""
    generator = torch.Generator().manual_seed(1)
    stuck = 0
    for _ in range(40):
        survival = random_survival(3, 3, generator).sqrt()
        steps = torch.rand(10 if layout == "packed" else 4, generator=generator).double()
        curve = 1 / (1 + (steps * (steps > 0.6)).cumsum(0))
        best = brute_force(survival, curve, layout)
        assert plan(survival, curve, best_count, layout)[1] == pytest.approx(best, rel=1e-12)
        stuck += plan(survival, curve, early_stop, layout)[1] < best - 1e-9
    assert stuck


def test_the_papers_counterexample_as_lengths():
    """Appendix A: the first token does not pay, the second would pay for both."""
    curve = torch.tensor([1.0, 0.5, 0.45], dtype=torch.float64)
    likely, hopeless = (torch.tensor([[0.8, a]], dtype=torch.float64) for a in (0.72, 0.0))
    assert plan(likely, curve, early_stop)[0] == plan(hopeless, curve, early_stop)[0] == [0]
    # The unconstrained search lets the first draft token decide whether it is submitted itself.
    assert plan(likely, curve, best_count)[0] == [2]
    assert plan(hopeless, curve, best_count)[0] == [0]


def test_rows_get_what_their_survival_deserves():
    """One sure row, one hopeless row, one row without room; ties by position, then by row."""
    survival = torch.tensor([[0.9, 0.8, 0.7], [0.5, 0.1, 0.0], [0.9, 0.8, 0.7]])
    limited = keep_prefix(survival, torch.tensor([3, 3, 1]))
    assert admit(limited, 0, "packed").tolist() == [0, 0, 0]
    assert admit(limited, 1, "packed").tolist() == [1, 0, 0]
    assert admit(limited, 2, "packed").tolist() == [1, 0, 1]
    assert admit(limited, 4, "packed").tolist() == [3, 0, 1]
    assert admit(limited, 5, "packed").tolist() == [3, 1, 1]
    # A token that cannot survive is not submitted, however much room there is.
    assert admit(limited, 9, "packed").tolist() == [3, 2, 1]
    assert admit(limited, 2, "padded").tolist() == [2, 2, 1]
    certain = torch.ones(3, 4)
    assert admit(certain, 5, "packed").tolist() == [2, 2, 1]


def test_what_a_step_holds():
    """Packed rows hold what they submit; padded rows are as wide as the widest."""
    assert step_tokens(2, 2, "packed").tolist() == [2, 3, 4, 5, 6]
    assert step_tokens(2, 2, "padded").tolist() == [2, 4, 6]
    assert [most_units(5, 2, layout) for layout in ("packed", "padded")] == [3, 1]
    assert [most_units(1, 2, layout) for layout in ("packed", "padded")] == [0, 0]


def test_survival_is_the_product_of_confidences():
    """B116: .9, .4, .99 survive as .9, .36, .356; NaN is no confidence."""
    logits = torch.tensor([[0.9, 0.4, 0.99], [0.9, float("nan"), 0.99]]).logit()
    expected = torch.tensor([[0.9, 0.36, 0.3564], [0.9, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(survival_probabilities(logits), expected, atol=1e-6, rtol=0)
    assert survival_probabilities(torch.full((1, 2), torch.inf)).tolist() == [[1.0, 1.0]]


# A machine whose time per step starts to grow at 16 tokens.
ROOFLINE = ThroughputProfile(
    tokens=(1, 16, 1024), steps_per_second=(100.0, 95.0, 95.0 / 48), target="T"
)


def policy(block_size=4, profile=ROOFLINE, layout="packed", **fields):
    return VerificationPolicy(SchedulingSettings(**fields), block_size, profile, layout)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("scheduler", ["early_stop", "lagged"])
def test_lengths_fall_smoothly_with_load(scheduler, layout):
    """Figure 8 of the paper: from everything to nothing, never up again."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]] * 2)
    totals = []
    for load in (0, 4, 8, 12, 16, 32, 64, 256):
        scheduled = policy(verification="scheduled", scheduler=scheduler, layout=layout)
        for _ in range(4):
            lengths = scheduled.verify_lengths(logits, torch.tensor([4, 4]), load)
        totals.append(int(lengths.sum()))
    assert totals[0] == 8
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] == 0
    assert len(set(totals)) >= 4


def test_the_policies_that_need_no_cost():
    """B117: full verifies what is usable; the threshold cuts by each row's own confidences."""
    logits = torch.tensor([[0.9, 0.4, 0.99], [0.9, 0.8, 0.7]]).logit()
    limits = torch.tensor([3, 2])
    assert policy(3).verify_lengths(None, limits).tolist() == [3, 2]
    hopeless = torch.full((2, 3), -torch.inf)
    assert policy(3).verify_lengths(hopeless, limits).tolist() == [3, 2]
    # A ceiling that leaves room takes nothing away, however little is hoped for.
    roomy = policy(3, max_verify_tokens=99)
    assert roomy.verify_lengths(hopeless, limits).tolist() == [3, 2]
    cut = policy(3, verification="threshold", confidence_threshold=0.5)
    assert cut.verify_lengths(logits, limits).tolist() == [1, 2]


@pytest.mark.parametrize("verification", ["full", "threshold", "scheduled"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_ceiling_holds_for_every_policy(verification, layout):
    """No step holds more tokens than `dspark_max_verify_tokens`, and none fewer than it could."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=generator) + 3
    free = ThroughputProfile((1, 512), (1.0, 1.0))
    for ceiling in (5, 7, 10, 13, 25, 40, 10**30):
        lengths = policy(
            verification=verification, profile=free, layout=layout, max_verify_tokens=ceiling
        ).verify_lengths(logits, torch.full((5,), 4))
        held = 5 * (1 + int(lengths.max())) if layout == "padded" else 5 + int(lengths.sum())
        assert held <= ceiling
        assert held >= min(ceiling, 25) - (4 if layout == "padded" else 0)
    # Without a confidence head rows share by position.
    shared = policy(layout="packed", max_verify_tokens=8)
    assert shared.verify_lengths(None, torch.full((5,), 4)).tolist() == [1, 1, 1, 0, 0]


def test_finished_rows_are_forgotten():
    """B062: what they said two rounds ago adds no capacity for the rows that go on."""
    limits = torch.full((3,), 4)
    for layout in ("packed", "padded"):
        fields = {"verification": "scheduled", "scheduler": "lagged", "layout": layout}
        three, one = policy(**fields), policy(**fields)
        doubtful = torch.full((1, 4), -1.0)
        logits = torch.cat((torch.full((1, 4), 9.0), doubtful, torch.full((1, 4), 9.0)))
        for _ in range(2):
            three.verify_lengths(logits, limits, 12)
            one.verify_lengths(doubtful, limits[:1], 12)
        three.select([1])
        sure = torch.full((1, 4), 9.0)
        expected = one.verify_lengths(sure, limits[:1], 12).tolist()
        assert three.verify_lengths(sure, limits[:1], 12).tolist() == expected
        assert expected[0] < 4


def test_the_lagged_capacity_is_that_of_two_rounds_ago():
    """Section 5.2: confident rounds pass their capacity on, with a lag of two."""
    confident, doubtful = torch.full((1, 4), 9.0), torch.full((1, 4), -9.0)
    lagged = policy(verification="scheduled", scheduler="lagged")
    rounds = [confident, confident, doubtful, doubtful, confident, confident, confident]
    limits = torch.tensor([4])
    found = [int(lagged.verify_lengths(logits, limits)) for logits in rounds]
    assert found == [4, 4, 4, 4, 0, 0, 4]


def test_the_lagged_capacity_goes_to_the_best_rows():
    """Rows compete for it by their present survival."""
    profile = ThroughputProfile((1, 6, 7, 32), (1.0, 1.0, 0.5, 0.1))
    lagged = policy(verification="scheduled", scheduler="lagged", profile=profile)
    limits = torch.tensor([4, 4])
    for _ in range(2):
        lagged.verify_lengths(torch.full((2, 4), 3.0), limits)
    logits = torch.tensor([[3.0] * 4, [-3.0] * 4])
    assert lagged.verify_lengths(logits, limits).tolist() == [4, 0]


def test_what_a_policy_needs():
    """A scheduler without costs or confidences says so."""
    with pytest.raises(ValueError, match="needs a throughput profile"):
        policy(verification="scheduled", profile=None)
    with pytest.raises(ValueError, match="needs confidence logits"):
        policy(verification="threshold").verify_lengths(None, torch.tensor([4]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verification": "shceduled"}, "'full', 'threshold' or 'scheduled'"),
        ({"scheduler": "global"}, "'early_stop' or 'lagged'"),
        ({"verification": "threshold", "confidence_threshold": 1.5}, "between 0 and 1"),
        ({"max_verify_tokens": 0}, "at least 1"),
        ({"load": -1}, "at least 0"),
        ({"layout": "flat"}, "'packed' or 'padded'"),
    ],
)
def test_a_policy_of_ones_own_is_checked_like_the_fields(fields, message):
    """Whoever writes a server misspells as well."""
    with pytest.raises(ValueError, match=message):
        policy(**fields)


def test_what_a_policy_is_asked_is_checked():
    """Loads and shapes that mean nothing."""
    scheduled, limits = policy(verification="scheduled"), torch.tensor([4, 4])
    for load in (-1, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            scheduled.verify_lengths(torch.zeros(2, 4), limits, load)
    for shape in ((2, 5), (1, 4)):
        with pytest.raises(ValueError, match=r"expected \(2, 4\)"):
            scheduled.verify_lengths(torch.zeros(shape), limits)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("scheduler", ["early_stop", "lagged"])
def test_requests_come_and_go_in_a_server(scheduler, layout):
    """Any number of rows in any round, for as long as one likes, without a trace of old ones."""
    serving = policy(verification="scheduled", scheduler=scheduler, layout=layout)
    sizes = []
    for i in range(120):
        rows = (3, 5, 2, 0, 7, 4)[i % 6]
        limits = torch.full((rows,), 3)
        lengths = serving.verify_lengths(torch.full((rows, 4), 3.0), limits, load=i)
        assert lengths.shape == (rows,)
        assert bool((lengths <= limits).all())
        if i == 2:
            assert lengths.sum() > 0
        sizes.append(len(pickle.dumps(serving)))
    assert max(sizes[60:]) <= max(sizes[:60]) + 64


def test_many_rows_agree_with_the_algorithm_as_the_paper_writes_it():
    """256 rows of 7 tokens, on a curve with noise, against a plain loop."""
    generator = torch.Generator().manual_seed(0)
    survival = torch.rand(256, 7, generator=generator).double().sqrt().cumprod(dim=1)
    curve = 1 / (1 + torch.arange(256 * 7 + 1, dtype=torch.float64) / 300)
    ranked = sorted(
        ((-float(survival[r, j]), j, r) for r in range(256) for j in range(7)),
    )
    lengths, tau, best = [0] * 256, 256.0, 256.0 * float(curve[0])
    for admitted, (negative, _, row) in enumerate(ranked, start=1):
        tau -= negative
        if tau * float(curve[admitted]) <= best:
            break
        best = tau * float(curve[admitted])
        lengths[row] += 1
    assert plan(survival, curve, early_stop)[0] == lengths
    assert 0 < sum(lengths) < 256 * 7
