"""SPS(B): validation, look-up, JSON, measurement, the kept one."""

import itertools
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BitsAndBytesConfig, DynamicCache

from dspark_hf.scheduling import profiling
from dspark_hf.scheduling.profiling import (
    automatic_profile,
    default_token_counts,
    measure_throughput,
    profile_facts,
)
from dspark_hf.scheduling.throughput_profile import ThroughputProfile, monotone
from tiny import make_drafter, make_target
from tiny_v4 import golden_target, load_golden_drafter


def curve(*seconds, tokens=None, **fields):
    tokens = tuple(range(1, len(seconds) + 1)) if tokens is None else tokens
    return ThroughputProfile(tokens, tuple(1 / value for value in seconds), **fields)


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [
        ([], [], "at least one"),
        ([1, 2], [1.0], "found 2 and 1"),
        ([1, 3, 2], [3.0, 2.0, 1.0], "3 followed by 2"),
        ([1, 2, 2], [3.0, 2.0, 1.0], "2 followed by 2"),
        ([2, 3], [3.0, 2.0], "start at 1"),
        ([1, 10**400], [3.0, 2.0], "at most"),
        ([1, 2.5], [3.0, 2.0], "integers"),
        ([True, 2], [3.0, 2.0], "integers"),
        ([1, 2], [3.0, 0.0], "positive numbers, found 0.0 at 2"),
        ([1, 2], [3.0, -1.0], "positive"),
        ([1, 2], [3.0, float("nan")], "positive"),
        ([1, 2], [3.0, "fast"], "positive"),
        ([1, 2], [3.0, 1e-320], "positive"),
        ([1, 2], [10**400, 3.0], "positive"),
        ("1, 2", [3.0, 2.0], "must be a list"),
    ],
)
def test_malformed_curves_are_refused(tokens, rates, message):
    """B123: what is wrong, and where."""
    with pytest.raises(ValueError, match=message):
        ThroughputProfile(tokens, rates)


def test_step_times_never_fall_and_nothing_beyond_is_free():
    """Linear between points; past the last one, in proportion to the tokens."""
    profile = curve(1.0, 2.0, 3.0, tokens=(1, 3, 4))
    np.testing.assert_allclose(profile.step_seconds([1, 2, 3, 4, 8]), [1, 1.5, 2, 3, 6])
    noisy = curve(1.0, 1.4, 1.2, 1.3, 2.0)
    seconds = noisy.step_seconds(np.arange(1, 12))
    assert all(after >= before for before, after in itertools.pairwise(seconds))
    # What was measured is kept as it is.
    assert noisy.as_dict()["steps_per_second"][1] == pytest.approx(1 / 1.4)
    drafting = curve(1.0, 2.0, draft_seconds=1.0)
    np.testing.assert_allclose(drafting.rounds_per_second([1, 2]), [1 / 2, 1 / 3])


def test_monotone_is_the_closest_one():
    """Neighbours in the wrong order are averaged; what is in order stays."""
    np.testing.assert_allclose(monotone([1.0, 2.0, 3.0]), [1, 2, 3])
    np.testing.assert_allclose(monotone([1.0, 3.0, 2.0, 4.0]), [1, 2.5, 2.5, 4])
    np.testing.assert_allclose(monotone([3.0, 2.0, 1.0]), [2, 2, 2])
    np.testing.assert_allclose(monotone([2.0, 4.0, 1.0]), [2, 2.5, 2.5])


def test_json_there_and_back(tmp_path):
    """Every entry survives; unknown and missing entries, and files that are none, are named."""
    profile = curve(1.0, 2.0, draft_seconds=0.1, rows=2, context_length=9, target="T", device="D")
    profile.save(tmp_path / "profile.json")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    assert ThroughputProfile.load(tmp_path / "profile.json") == profile
    assert ThroughputProfile.from_dict(profile.as_dict()) == profile
    with pytest.raises(ValueError, match=r"has \['speed'\]"):
        ThroughputProfile.from_dict(profile.as_dict() | {"speed": 3})
    with pytest.raises(ValueError, match=r"lacks \['steps_per_second'\]"):
        ThroughputProfile.from_dict({"tokens": [1]})
    for text in ("[1, 2]", "not json", "{}"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json is not a throughput profile"):
            ThroughputProfile.load(tmp_path / "other.json")


def test_a_profile_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    """Beside another process that saves in the middle of it, and where the disk says no."""
    path, profile, other = tmp_path / "profile.json", curve(1.0, 2.0), curve(3.0)
    write, pid = Path.write_text, os.getpid()

    def interrupted(self, *args, **kwargs):
        write(self, *args, **kwargs)
        monkeypatch.setattr(Path, "write_text", write)
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        other.save(path)
        monkeypatch.setattr(os, "getpid", lambda: pid)

    monkeypatch.setattr(Path, "write_text", interrupted)
    profile.save(path)
    assert ThroughputProfile.load(path) == profile
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        profile.save(tmp_path / "folder")
    assert {file.name for file in tmp_path.iterdir()} == {"profile.json", "folder"}


@pytest.mark.parametrize("fields", [{"rows": 0}, {"context_length": "256"}, {"target": 5}])
def test_malformed_facts_are_refused(fields):
    """What stands beside the curve is checked as well."""
    with pytest.raises(ValueError, match=f"{next(iter(fields))} of a throughput profile must be"):
        ThroughputProfile((1,), (1.0,), **fields)


def test_a_drafter_of_another_target_is_not_measured():
    """Its cost beside this target would mean nothing."""
    with pytest.raises(ValueError, match="6"):
        measure_throughput(make_target("qwen3"), make_drafter(num_target_layers=6))


@pytest.mark.parametrize("name", ["target", "device", "dtype", "attention", "drafter"])
def test_a_foreign_profile_is_refused(name):
    """Both values are named; what a profile does not say is not compared."""
    facts = profile_facts(make_target("qwen3"), make_drafter())
    ThroughputProfile((1,), (1.0,), **facts).check(facts)
    ThroughputProfile((1,), (1.0,)).check(facts)
    with pytest.raises(ValueError, match=f"another {name}: elsewhere; this call has"):
        ThroughputProfile((1,), (1.0,), **(facts | {name: "elsewhere"})).check(facts)


def test_facts_tell_models_apart(monkeypatch):
    """Another depth, another γ, another precision, other threads, quantised weights."""
    facts = profile_facts(make_target("qwen3"), make_drafter())
    assert profile_facts(make_target("qwen3", seed=5), make_drafter()) == facts
    assert profile_facts(make_target("qwen3", num_hidden_layers=2))["target"] != facts["target"]
    assert profile_facts(make_target("llama"))["target"] != facts["target"]
    other = profile_facts(make_target("qwen3"), make_drafter(block_size=3))
    assert other["drafter"] != facts["drafter"]
    assert profile_facts(make_target("qwen3").bfloat16())["dtype"] == "bfloat16"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert profile_facts(make_target("qwen3"))["device"] != facts["device"]
    assert profile_facts(make_target("qwen3"), make_drafter().bfloat16())["drafter"] not in (
        facts["drafter"],
        other["drafter"],
    )
    compiled = make_target("qwen3")
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    assert profile_facts(compiled)["target"] == f"{facts['target']}, compiled"


def test_facts_tell_quantised_targets_apart():
    """By their settings, given as the host keeps them or as a file holds them; 4 bits are not 8."""
    plain = profile_facts(make_target("qwen3"))["target"]
    four, eight = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
    described = []
    for settings in (four, eight, four.to_dict(), {"quant_method": "fp8"}):
        target = make_target("qwen3")
        target.config.quantization_config = settings
        described.append(profile_facts(target)["target"])
    assert described[0] == described[2]
    assert len({plain, *described}) == 4
    assert all(text.startswith(f"{plain}, bitsandbytes ") for text in described[:3])


def test_counts_to_measure():
    """From 1 to the ceiling; above the rows, whole columns."""
    assert default_token_counts(16) == list(range(1, 17))
    assert default_token_counts(64)[-1] == 64
    assert default_token_counts(32, rows=8) == [1, 2, 4, 8, 16, 24, 32]
    assert default_token_counts(13, rows=4) == [1, 2, 4, 8, 12]
    with pytest.raises(ValueError, match="holds no step of 8 rows"):
        default_token_counts(4, rows=8)


# Of five turns two warm up, and one of the others meets other work.
DISTURBED = (100.0, 50.0, 0.0, 7.0, 0.0)


def fake_clock(seconds_of):
    """A clock that a target forward moves by what its number of tokens should take, and a log."""
    now, ran = [0.0], []

    def advance(module, args, kwargs, output):
        tokens = args[0].numel()
        now[0] += seconds_of(tokens) + DISTURBED[ran.count(tokens) % len(DISTURBED)]
        ran.append(tokens)

    return (lambda: now[0]), advance, ran


@pytest.mark.parametrize("rows", [1, 2])
def test_a_measurement_is_what_the_clock_said(rows):
    """Median over repetitions, in the order of B, with nothing left behind in the target."""
    target, drafter = make_target("qwen3"), make_drafter()
    clock, advance, ran = fake_clock(lambda tokens: 1.0 + tokens / 10)
    hook = target.register_forward_hook(advance, with_kwargs=True)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    forwards, behind = [], set()
    watch = target.register_forward_pre_hook(
        lambda module, args, kwargs: behind.add(int(kwargs["cache"].get_seq_length())),
        with_kwargs=True,
    )
    profile = measure_throughput(
        target,
        drafter,
        token_counts=[1, 2, 4, 8],
        context_length=10,
        rows=rows,
        repeats=3,
        clock=clock,
        on_forward=lambda: forwards.append(1),
    )
    hook.remove()
    watch.remove()
    assert torch.equal(torch.get_rng_state(), before)
    # The prefill, and then every step behind the same context.
    assert behind == {0, 10}
    # In alternating direction, so that drift cancels.
    steps = [tokens for tokens in ran if tokens < 10]
    up, down = [1, 2, 4, 8], [8, 4, 2, 1]
    assert steps in (up + down + up + down + up, down + up + down + up + down)
    assert profile.tokens == (1, 2, 4, 8)
    expected = [1 / (1 + tokens / 10) for tokens in (1, 2, 4, 8)]
    assert profile.steps_per_second == pytest.approx(expected)
    assert (profile.rows, profile.context_length) == (rows, 10)
    assert len(forwards) == 5 * (3 + 2)
    profile.check(profile_facts(target, drafter))
    assert {"torch", "transformers"} == set(profile.versions)


def test_a_deepseek_v4_target_is_measured_too():
    """Its compressors are rewound after every step, as in the loop."""
    target = golden_target()
    layers = DynamicCache(config=target.config).layers
    profile = measure_throughput(
        target, load_golden_drafter(), token_counts=[1, 3], context_length=20, repeats=2
    )
    assert profile.tokens == (1, 3)
    assert profile.draft_seconds > 0
    # The host's own layers are what the next cache is built of.
    assert list(map(type, DynamicCache(config=target.config).layers)) == list(map(type, layers))


def test_impossible_measurements_are_refused_first():
    """No forward is made for them."""
    target = make_target("qwen3")
    target.forward = None
    for counts in ([2, 4], [0, 1], []):
        with pytest.raises(ValueError, match="must begin with 1"):
            measure_throughput(target, token_counts=counts)
    for name in ("repeats", "rows", "context_length"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, found 0"):
            measure_throughput(target, **{name: 0})
    with pytest.raises(ValueError, match="multiples of rows=4"):
        measure_throughput(target, token_counts=[1, 6], rows=4)
    with pytest.raises(ValueError, match="this target has 256"):
        measure_throughput(target, token_counts=[1, 20], context_length=250)


def test_auto_measures_once_and_keeps_it(monkeypatch, tmp_path, caplog):
    """In memory, then on disk; for another dtype anew; a damaged file is measured again."""
    monkeypatch.setattr(profiling.constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(profiling, "AUTO_MAX_TOKENS", 3)
    monkeypatch.setattr(profiling, "AUTO_REPEATS", 1)
    monkeypatch.setattr(profiling, "_measured", {})
    measured = []
    real = profiling.measure_throughput

    def counting(*args, **kwargs):
        measured.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(profiling, "measure_throughput", counting)
    target, drafter = make_target("qwen3"), make_drafter()
    # Calls that start at once measure once, and not each other.
    found: list[ThroughputProfile] = []
    threads = [
        threading.Thread(target=lambda: found.append(automatic_profile(target, drafter)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profile = found[0]
    assert found == [profile] * 3
    assert profile.draft_seconds > 0
    assert automatic_profile(target, drafter) is profile
    profiling._measured.clear()
    assert automatic_profile(target, drafter) == profile
    assert len(measured) == 1
    automatic_profile(make_target("qwen3").bfloat16(), drafter)
    assert len(measured) == 2
    kept = sorted((tmp_path / "dspark-hf" / "profiles").iterdir())
    assert len(kept) == 2
    for i, rubbish in enumerate(("{}", json.dumps(profile.as_dict() | {"target": "another"})), 3):
        for file in kept:
            json.loads(file.read_text())
            file.write_text(rubbish)
        profiling._measured.clear()
        caplog.clear()
        automatic_profile(target, drafter)
        assert len(measured) == i
        assert any("measured again" in record.message for record in caplog.records)
    monkeypatch.setattr(profiling.transformers, "__version__", "another")
    automatic_profile(target, drafter)
    assert len(measured) == 5


def test_auto_works_without_a_folder_to_keep_it_in(monkeypatch, tmp_path, caplog):
    """What cannot be read or written is measured and said, not raised."""
    monkeypatch.setattr(profiling, "AUTO_MAX_TOKENS", 2)
    monkeypatch.setattr(profiling, "AUTO_REPEATS", 1)
    (tmp_path / "file").touch()

    def denied(*args, **kwargs):
        raise PermissionError("denied")

    for home, patches in (("file", ()), ("home", ("load", "save"))):
        monkeypatch.setattr(profiling.constants, "HF_HOME", str(tmp_path / home))
        monkeypatch.setattr(profiling, "_measured", {})
        caplog.clear()
        with monkeypatch.context() as patched:
            for name in patches:
                patched.setattr(ThroughputProfile, name, denied)
            assert automatic_profile(make_target("qwen3"), make_drafter()).tokens == (1, 2)
        assert any("could not be kept" in record.message for record in caplog.records)
