"""`dspark-hf profile`, `calibrate` and `recommend` on a tiny pair: files, tables, pictures."""

import json
from dataclasses import replace

import pytest
from test_stopping import character_tokenizer
from typer.testing import CliRunner

from dspark_hf import DSparkDrafter
from dspark_hf.cli import app, plots
from dspark_hf.cli.calibrating import split_prompts
from dspark_hf.scheduling.acceptance import AcceptanceRecords
from dspark_hf.scheduling.calibration import Calibration
from dspark_hf.scheduling.throughput_profile import ThroughputProfile
from tiny import make_drafter, make_target

PNG = b"\x89PNG"
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target with tokenizer and of a drafter, and a file of prompts."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    make_target("qwen3").save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter().save_pretrained(folder / "drafter")
    rows = [{"prompt": text} for text in ("lighthouse", "waves", "buoy")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def run(*arguments, code=0):
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_measure_calibrate_recommend(pair, tmp_path):
    """The three commands in the order of the documentation; each reads what the last one wrote."""
    models = ["--target", pair / "target", "--drafter", pair / "drafter"]
    profile_path, records_path = tmp_path / "profile.json", tmp_path / "rounds.safetensors"
    output = run("profile", *models, "-o", profile_path, "--max-tokens", 5, "--context-length", 8,
                 "--repeats", 1, "--threads", 1, "--cpu-time", "--dtype", "float32",
                 "--plot", tmp_path / "profile.png").output  # fmt: skip
    profile = ThroughputProfile.load(profile_path)
    assert profile.tokens == (1, 2, 3, 4, 5)
    assert profile.draft_seconds > 0
    assert "drafting one block" in output

    output = run("calibrate", *models, "--prompts", pair / "prompts.jsonl", "--num-prompts", 2,
                 "--num-held-out", 1, "--max-new-tokens", 24, "--dtype", "float32",
                 "--batch-size", 2, "--offsets",
                 "-o", tmp_path / "calibration.json", "--records", records_path,
                 "--save-into", tmp_path / "calibrated", "--plot", tmp_path / "reliability.png",
                 "--sweep-plot", tmp_path / "sweep.svg").output  # fmt: skip
    calibration = Calibration.load(tmp_path / "calibration.json")
    assert "mean ECE" in output
    assert f"would show {100 * calibration.facts['ece_of_perfect_confidences']:.1f} %" in output
    assert calibration.num_rounds > 0
    assert calibration.facts["temperature"] == 1.0
    saved = DSparkDrafter.from_pretrained(tmp_path / "calibrated").generation_config
    assert saved.dspark_sts_temperatures == list(calibration.temperatures)
    assert saved.dspark_confidence_offsets == list(calibration.offsets)
    assert AcceptanceRecords.load(records_path).block_size == 4

    output = run("recommend", "--profile", profile_path, "--records", records_path,
                 "--calibration", tmp_path / "calibration.json", "--rows", 2, "--load", 3,
                 "--plot", tmp_path / "loads.png",
                 "--json", tmp_path / "advice.json").output  # fmt: skip
    Calibration.save(replace(calibration, drafter="another"), tmp_path / "foreign.json")
    result = run("recommend", "--profile", profile_path, "--records", records_path,
                 "--calibration", tmp_path / "foreign.json", code=1)  # fmt: skip
    assert "with confidence head another" in str(result.exception)
    replace(profile, target="another").save(tmp_path / "foreign.json")
    result = run("recommend", "--profile", tmp_path / "foreign.json",
                 "--records", records_path, code=1)  # fmt: skip
    assert "measured for another target" in str(result.exception)
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert (advice["rows"], advice["load"]) == (2, 3)
    assert len(advice["speedups"]) >= 4
    if advice["recommended"] is None:
        assert "No drafter pays here" in output
    else:
        assert "x plain decoding" in output
    for name in ("profile.png", "reliability.png", "loads.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


def test_no_prompt_is_both_fitted_and_judged_on(tmp_path):
    """Repeated prompts, in one file or across files, would be judged by what was fitted to them."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, texts in zip(files, (("x", "y", "x", "z"), ("v", "w", "y", "u")), strict=True):
        path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    assert split_prompts(files, 2, 2) == (["x", "y", "v", "w"], ["z", "u"])
    with pytest.raises(ValueError, match="repeated prompts"):
        split_prompts(files[:1], 2, 1)


def test_what_cannot_work_ends_before_a_model_runs(pair, tmp_path, monkeypatch):
    """Missing folders, impossible clocks, no prompts left, a profile without the drafter's cost."""
    target = ["--target", pair / "target"]
    both = [*target, "--drafter", pair / "drafter"]
    run("profile", *target, "-o", "no/such/folder/p.json", code=2)
    run("profile", *target, "-o", tmp_path / "p.json", "--cpu-time", "--threads", 2, code=2)
    run("profile", *target, "-o", tmp_path, code=2)
    run("profile", *target, "-o", tmp_path / "p.json", "--plot", tmp_path / "p.jason", code=2)
    run("calibrate", *both, "--prompts", pair / "prompts.jsonl", "-o", tmp_path / "c.json",
        "--save-into", pair / "prompts.jsonl", code=2)  # fmt: skip
    result = run("calibrate", *both, "--prompts", pair / "prompts.jsonl", "--num-prompts", 3,
                 "-o", tmp_path / "c.json", code=1)  # fmt: skip
    assert "are left to judge the temperatures on" in str(result.exception)
    ThroughputProfile((1,), (1.0,)).save(tmp_path / "target.json")
    result = run("recommend", "--profile", tmp_path / "target.json",
                 "--records", tmp_path / "none.safetensors", code=1)  # fmt: skip
    assert "does not say what a draft costs" in str(result.exception)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(OSError, match="needs matplotlib"):
        plots.plotting()
