"""The fields in the real loop: what they do, where they may be set, what is refused."""

import threading

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from batches import make_prompts, pad_left, script_rows
from dspark_hf import DSparkDrafter, collect_statistics
from dspark_hf.generation.candidate_generator import DSparkCandidateGenerator
from dspark_hf.generation.rows import Rows
from dspark_hf.generation.settings import DraftSettings
from dspark_hf.scheduling import round_scheduler
from dspark_hf.scheduling.calibration import collect_acceptance
from dspark_hf.scheduling.load import ConcurrentLoad, process_load
from dspark_hf.scheduling.round_scheduler import RoundScheduler
from dspark_hf.scheduling.settings import SchedulingSettings
from dspark_hf.scheduling.skipping import DraftSkipper
from dspark_hf.scheduling.throughput_profile import ThroughputProfile
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)
# Verifying costs something from the third token on.
PROFILE = {"tokens": [1, 2, 3, 512], "steps_per_second": [10.0, 10.0, 8.0, 0.5]}
SCHEDULED = {"dspark_verification": "scheduled", "dspark_throughput_profile": PROFILE}


def with_confidence(value, **options):
    """A head that says the same of every token."""
    drafter = make_drafter(**options)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(value)
    return drafter


def lengths_of(drafter, target=None, new_tokens=12, **options):
    """Verify lengths of all rounds but those that run out of room."""
    found = []
    with collect_statistics(on_round=lambda record: found.append(record.num_verified)):
        (target or make_target("qwen3")).generate(
            PROMPT,
            **{"max_new_tokens": new_tokens, "do_sample": False, "assistant_model": drafter}
            | options,
        )
    return found[:-4] or found[:1]


WHERE = ["keyword", "config", "target", "saved target", "drafter", "saved drafter"]


@pytest.mark.parametrize("where", WHERE)
def test_scheduling_from_everywhere(where, tmp_path):
    """B094, B097: a keyword, a config, the target's, the drafter's, and those from disk."""
    target, drafter, options = make_target("qwen3"), with_confidence(0.0), {}
    # Even odds: the second token does not pay for its step, the first is free.
    fields = SCHEDULED | {"dspark_load": 0}
    if where == "keyword":
        options = fields
    elif where == "config":
        options["generation_config"] = GenerationConfig(**fields)
    elif where == "target":
        target.generation_config.update(**fields)
    elif where == "saved target":
        # As the config of a published target says that began as a model's default.
        target.generation_config._from_model_config = True
        target.generation_config.update(**fields)
        target.save_pretrained(tmp_path)
        target = type(target).from_pretrained(tmp_path)
    else:
        drafter.generation_config.update(**fields)
    if where == "saved drafter":
        drafter.save_pretrained(tmp_path)
        drafter = DSparkDrafter.from_pretrained(tmp_path)
    assert set(lengths_of(drafter, target, **options)) == {1}


def test_a_call_outranks_the_drafter():
    """B097: each field by itself."""
    drafter = with_confidence(0.0)
    drafter.generation_config.update(**SCHEDULED)
    assert set(lengths_of(drafter, dspark_verification="full")) == {4}
    assert set(lengths_of(drafter, dspark_load=500)) == {0}
    assert set(lengths_of(drafter, dspark_max_verify_tokens=1)) == {0}
    free = {"tokens": [1, 512], "steps_per_second": [1.0, 1.0]}
    assert set(lengths_of(drafter, dspark_throughput_profile=free)) == {4}
    # A threshold selects its own rule; none is none, and leaves the drafter's.
    assert set(lengths_of(drafter, dspark_confidence_threshold=0.4)) == {4}
    for off in (0.0, None):
        assert set(lengths_of(drafter, dspark_confidence_threshold=off)) == {1}


def test_the_confidence_head_decides_how_much_is_verified():
    """B113: a sure head verifies more, a hopeless one only the token that costs nothing."""
    assert set(lengths_of(with_confidence(9.0), **SCHEDULED)) == {4}
    assert set(lengths_of(with_confidence(-9.0), **SCHEDULED)) == {1}


def test_a_head_that_says_nan_is_not_believed():
    """It cuts where confidences count, and neither the text nor the statistics stumble over it."""
    drafter = with_confidence(float("nan"))
    assert set(lengths_of(drafter)) == {4}
    assert set(lengths_of(drafter, **SCHEDULED)) == {0}
    assert set(lengths_of(drafter, dspark_confidence_threshold=0.1)) == {0}
    with pytest.raises(ValueError, match="confidence head says NaN"):
        collect_acceptance(make_target("qwen3"), drafter, [{"input_ids": PROMPT}], max_new_tokens=6)


def test_temperatures_reach_every_policy():
    """B122: a logit of 2 at temperature 8 is an even chance, and positions have their own."""
    drafter = with_confidence(2.0)
    warm = {"dspark_sts_temperatures": [1.0, 8.0, 1.0, 1.0]}
    assert set(lengths_of(drafter, dspark_confidence_threshold=0.7)) == {4}
    assert set(lengths_of(drafter, dspark_confidence_threshold=0.7, **warm)) == {1}
    assert set(lengths_of(drafter, **SCHEDULED)) == {4}
    assert set(lengths_of(drafter, **SCHEDULED, dspark_sts_temperatures=[8.0] * 4)) == {1}
    records = []
    with collect_statistics(on_round=records.append):
        make_target("qwen3").generate(
            PROMPT, max_new_tokens=8, do_sample=False, assistant_model=drafter, **warm
        )
    assert records[0].confidences == pytest.approx(
        torch.tensor([2.0, 0.25, 2.0, 2.0]).sigmoid().tolist()
    )


def test_offsets_reach_every_policy_and_belong_to_their_temperatures():
    """Added behind the temperature; a call's own temperatures leave the drafter's offsets out."""
    drafter = with_confidence(2.0)
    low = {"dspark_confidence_offsets": [0.0, -3.0, 0.0, 0.0]}
    assert set(lengths_of(drafter, dspark_confidence_threshold=0.7, **low)) == {1}
    assert set(lengths_of(drafter, **SCHEDULED, **low)) == {1}
    drafter.generation_config.update(**low, dspark_sts_temperatures=[2.0] * 4)
    records = []
    for options in ({}, {"dspark_sts_temperatures": [0.5] * 4}):
        with collect_statistics(on_round=records.append):
            make_target("qwen3").generate(
                PROMPT, max_new_tokens=3, do_sample=False, assistant_model=drafter, **options
            )
    expected = ([1.0, -2.0, 1.0, 1.0], [4.0] * 4)
    for record, logits in zip([r for r in records if r.num_drafted], expected, strict=True):
        assert record.confidences == pytest.approx(torch.tensor(logits).sigmoid().tolist())


def test_a_lagged_schedule_runs_in_the_loop():
    """The first two rounds have no predecessor."""
    assert set(lengths_of(with_confidence(0.0), dspark_scheduler="lagged", **SCHEDULED)) == {1}


def test_a_lagged_schedule_forgets_rows_that_have_left():
    """B062: their confidences of two rounds ago add no capacity."""
    settings = SchedulingSettings("scheduled", scheduler="lagged", profile=PROFILE)
    with RoundScheduler(settings, make_target("qwen3"), make_drafter(), 3) as scheduler:
        for _ in range(2):
            scheduler.begin(3)
            logits = torch.tensor([[9.0] * 4, [-1.0] * 4, [9.0] * 4])
            scheduler.verify_lengths(logits, torch.full((3,), 4))
        scheduler.select([1])
        scheduler.begin(1)
        found = scheduler.verify_lengths(torch.full((1, 4), 9.0), torch.tensor([4]))
    assert found.tolist() == [1]


@pytest.mark.parametrize("ceiling", [1, 3, 5])
def test_the_ceiling_in_the_loop(ceiling):
    """No step is wider, with any policy."""
    for options in ({}, SCHEDULED, {"dspark_confidence_threshold": 0.5}):
        found = lengths_of(with_confidence(9.0), dspark_max_verify_tokens=ceiling, **options)
        assert set(found) == {ceiling - 1}


@pytest.mark.parametrize("cache", ["static", None])
def test_finished_rows_count_in_the_step_where_they_cannot_leave(cache):
    """
    A static cache holds its rows to the end: ceiling and cost are those of all of them. A row that
    leaves makes room for the tokens of the other.
    """
    target, drafter, widest = make_target("qwen3"), with_confidence(9.0), []
    prompts = make_prompts([6, 6])
    texts = [target.generate(prompt, max_new_tokens=30, do_sample=False)[0] for prompt in prompts]
    # The first row stops early, at a token that the second does not say.
    stop = next(int(t) for t in texts[0][8:] if t not in texts[1])
    target.register_forward_pre_hook(
        lambda module, args, kwargs: widest.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    cliff = {"tokens": [1, 4, 5, 512], "steps_per_second": [10.0, 10.0, 1.0, 0.5]}
    for options in (
        {"dspark_max_verify_tokens": 4},
        SCHEDULED | {"dspark_throughput_profile": cliff},
    ):
        widest.clear()
        target.generate(
            **pad_left(prompts),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=stop,
            cache_implementation=cache,
            assistant_model=script_rows(drafter, texts, [4, 4]),
            **options,
        )
        assert set(widest[1:-2]) == {4}


def test_a_compiled_width_stays_below_the_ceiling():
    """Widths are rounded up to what is compiled, and then down where the ceiling says so."""
    target, drafter, input_ids = make_target("qwen3"), with_confidence(9.0), make_prompt(6)
    for ceiling, held, width in ((None, 1, 3), (3, 1, 1), (4, 1, 3), (1, 1, 0), (6, 2, 1)):
        settings = DraftSettings(3, scheduling=SchedulingSettings(max_verify_tokens=ceiling))
        with DSparkCandidateGenerator(
            target, drafter, settings, LogitsProcessorList(), False, batch_size=1
        ) as generator:
            generator.widths = (0, 1, 3)
            target(input_ids[:, :-1])
            generator.capture()
            generator.commit()
            limit = 2 if ceiling is None else 4
            proposal = generator.propose(Rows(input_ids, 0), [limit], num_held=held)
        assert proposal.tokens.shape[1] == width
        assert max(proposal.lengths) == min(width, limit)


def test_a_missing_head_or_profile_verifies_everything_with_one_warning(caplog):
    """B114, B119: fail closed, and say so once."""
    assert set(lengths_of(make_drafter(confidence=False), **SCHEDULED)) == {4}
    assert sum("needs a confidence head" in record.message for record in caplog.records) == 1
    caplog.clear()
    assert set(lengths_of(with_confidence(-9.0), dspark_verification="scheduled")) == {4}
    assert sum("dspark_throughput_profile" in record.message for record in caplog.records) == 1
    caplog.clear()
    assert set(lengths_of(make_drafter(), dspark_draft_skipping=True)) == {4}
    assert sum("dspark_draft_skipping needs" in record.message for record in caplog.records) == 1
    # Another rule goes on without the skipping, and is not said to be off.
    cut = {"dspark_draft_skipping": True, "dspark_confidence_threshold": 0.5}
    assert set(lengths_of(with_confidence(-9.0), **cut)) == {0}
    assert "every drafted token is verified" not in caplog.text
    assert "every round drafts" in caplog.text


def unusable_target():
    """A target that must not be run."""
    target = make_target("qwen3")

    def refuse(module, args):
        raise InterruptedError

    target.register_forward_pre_hook(refuse)
    return target


REFUSED = [
    ({"dspark_verification": "always"}, "'full', 'threshold' or 'scheduled'"),
    ({"dspark_scheduler": "global"}, "'early_stop' or 'lagged'"),
    ({"dspark_load": -1}, "at least 0"),
    ({"dspark_load": 1.5}, "at least 0"),
    ({"dspark_load": True}, "at least 0"),
    ({"dspark_load": 10**400}, "below 2\\*\\*63"),
    ({"dspark_confidence_threshold": float("nan")}, "between 0 and 1"),
    ({"dspark_load": "busy"}, "'concurrent'"),
    ({"dspark_max_verify_tokens": 0}, "at least 1"),
    ({"dspark_max_verify_tokens": 2.0}, "at least 1"),
    ({"dspark_sts_temperatures": [1.0] * 3}, "list of 4 temperatures.*found 3"),
    ({"dspark_sts_temperatures": 1.0}, "list of 4 temperatures"),
    ({"dspark_sts_temperatures": [1.0, 0.0, 1.0, 1.0]}, "at least 1e-06"),
    ({"dspark_sts_temperatures": [1.0, "warm", 1.0, 1.0]}, "finite"),
    ({"dspark_sts_temperatures": [1.0, float("inf"), 1.0, 1.0]}, "finite"),
    ({"dspark_confidence_offsets": [0.0] * 3}, "list of 4 offsets.*found 3"),
    ({"dspark_confidence_offsets": [0.0, 0.0, 0.0, float("nan")]}, "finite"),
    ({"dspark_scheduler": ""}, "'early_stop' or 'lagged'"),
    ({"dspark_draft_sampling": 0}, "'sample' or 'greedy'"),
    ({"dspark_draft_skipping": "yes"}, "True, False or None"),
    ({"dspark_throughput_profile": 5}, "path, a dict"),
    (SCHEDULED | {"dspark_throughput_profile": "no/such/file.json"}, "cannot be read"),
    (SCHEDULED | {"dspark_throughput_profile": {"tokens": [1]}}, "lacks"),
    (SCHEDULED | {"dspark_throughput_profile": PROFILE | {"dtype": "float16"}}, "another dtype"),
    (SCHEDULED | {"dspark_throughput_profile": PROFILE | {"drafter": "γ = 9"}}, "another drafter"),
    ({"dspark_draft_skipping": True, "dspark_throughput_profile": PROFILE}, "no draft_seconds"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_values_are_refused_before_compute(options, message):
    """Loud, early, with what was found."""
    with pytest.raises(ValueError, match=message):
        lengths_of(make_drafter(), unusable_target(), **options)


def test_a_ceiling_below_the_rows_cannot_be_kept():
    """Each row verifies at least its last committed token."""
    with pytest.raises(ValueError, match="dspark_max_verify_tokens=3 cannot be kept with 4 rows"):
        round_scheduler.RoundScheduler(
            SchedulingSettings(max_verify_tokens=3), make_target("qwen3"), make_drafter(), 4
        )


def test_auto_is_asked_for_only_where_it_is_needed(monkeypatch):
    """Nothing is measured for a policy that needs no costs."""
    asked = []

    def measured(target, drafter):
        asked.append(1)
        return ThroughputProfile.from_dict(PROFILE)

    monkeypatch.setattr(round_scheduler, "automatic_profile", measured)
    auto = {"dspark_throughput_profile": "auto"}
    assert set(lengths_of(with_confidence(0.0), **auto)) == {4}
    assert not asked
    found = lengths_of(with_confidence(0.0), dspark_verification="scheduled", **auto)
    assert set(found) == {1}
    assert asked


def test_concurrent_load_counts_the_others():
    """Off by default; a call leaves no trace, not even one that fails."""
    drafter = with_confidence(3.0)
    with process_load.call(2000):
        assert set(lengths_of(drafter, **SCHEDULED)) == {4}
        assert set(lengths_of(drafter, dspark_load="concurrent", **SCHEDULED)) == {0}
    assert set(lengths_of(drafter, dspark_load="concurrent", **SCHEDULED)) == {4}
    with pytest.raises(InterruptedError):
        lengths_of(drafter, unusable_target(), dspark_load="concurrent", **SCHEDULED)
    assert process_load.of_others(None) == 0


def test_a_call_is_seen_by_the_others_while_it_runs():
    """The tokens of its present step: its prompts, then what it verifies."""
    seen, read, target = [], [], make_target("qwen3")
    target.register_forward_pre_hook(lambda *_: read.append(process_load.of_others(None)))
    with collect_statistics(on_round=lambda record: seen.append(process_load.of_others(None))):
        target.generate(
            PROMPT.repeat(2, 1),
            max_new_tokens=12,
            do_sample=False,
            assistant_model=with_confidence(9.0),
            dspark_load="concurrent",
        )
    assert (read[0], seen[0]) == (2 * PROMPT.shape[1], 2 * 5)
    assert process_load.of_others(None) == 0


def test_the_counter_under_threads():
    """Calls come and go; each sees the others and never itself."""
    load, barrier, seen = ConcurrentLoad(), threading.Barrier(8), []

    def call(tokens):
        with load.call(1) as key:
            load.submit(key, tokens)
            barrier.wait()
            seen.append(load.of_others(key) + tokens)
            barrier.wait()

    threads = [threading.Thread(target=call, args=(tokens,)) for tokens in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [28] * 8
    assert load.of_others(None) == 0


COSTLY = ThroughputProfile((1, 5, 512), (10.0, 10.0, 0.1), draft_seconds=0.05)


def rounds_drafted(committed, rounds, **options):
    """Which rounds draft when each drafted round commits `committed(i)` tokens."""
    skipper, drafted = DraftSkipper(COSTLY), []
    for i in range(rounds):
        drafted.append(skipper.should_draft())
        if drafted[-1]:
            skipper.record(committed(i), 1, 5, **options)
    return drafted


def test_drafting_pauses_where_it_does_not_pay_and_tries_again():
    """A round costs 1.5 plain steps: one token a round is a loss, two are a gain."""
    assert all(rounds_drafted(lambda i: 2, 200))
    hopeless = rounds_drafted(lambda i: 1, 400)
    assert hopeless[:16] == [True] * 16
    assert hopeless[16:28] == [False] * 8 + [True] * 4
    assert hopeless[28:48] == [False] * 16 + [True] * 4
    # Trials cost ever less, and never end: four rounds in sixty-eight.
    assert 26 <= sum(rounds_drafted(lambda i: 1, 1000)[500:]) <= 32
    recovering = rounds_drafted(lambda i: 1 if i < 100 else 3, 300)
    assert not all(recovering[:100])
    assert all(recovering[200:])
    # Whoever recovers begins anew: a relapse pauses for eight rounds, not for longer.
    relapse = rounds_drafted(lambda i: 3 if 100 <= i < 300 else 1, 400)[300:]
    first_pause = relapse[relapse.index(False) :]
    assert first_pause[:12] == [False] * 8 + [True] * 4


def test_other_work_counts_in_the_cost_of_a_draft():
    """What others would have committed while we draft is lost, too."""
    assert all(rounds_drafted(lambda i: 2, 100))
    assert not all(rounds_drafted(lambda i: 2, 100, load=100))


def test_finished_rows_make_plain_steps_dear():
    """Plain decoding would hold them as well, so a draft has less to beat."""
    profile = ThroughputProfile((1, 2, 512), (10.0, 1.0, 0.1), draft_seconds=0.5)
    for held, pays in ((1, False), (2, True)):
        skipper = DraftSkipper(profile)
        drafted = []
        for _ in range(40):
            drafted.append(skipper.should_draft())
            if drafted[-1]:
                skipper.record(2, 1, 2, num_held=held)
        assert all(drafted) == pays


@pytest.mark.parametrize(("num_right", "load"), [(0, 0), (4, 0), (1, 0), (1, 100)])
def test_skipping_in_the_loop(num_right, load):
    """Greedy text is the same, and exactly those rounds draft that the rule says."""
    target, records = make_target("qwen3"), []
    expected = target.generate(PROMPT, max_new_tokens=80, do_sample=False)
    with collect_statistics(on_round=records.append):
        found = target.generate(
            PROMPT,
            max_new_tokens=80,
            do_sample=False,
            assistant_model=make_scripted(make_drafter(), expected, num_right),
            dspark_draft_skipping=True,
            dspark_throughput_profile=COSTLY.as_dict(),
            dspark_load=load,
        )
    assert torch.equal(found, expected)
    drafted = [record.num_drafted > 0 for record in records][:-1]
    assert drafted == rounds_drafted(lambda i: 1 + num_right, len(drafted), load=load)
    assert all(drafted) == (num_right == 4 or (num_right == 1 and load == 0))
