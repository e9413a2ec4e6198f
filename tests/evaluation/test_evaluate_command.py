"""`dspark-hf evaluate` and `dspark-hf sweep`, and what they write."""

import io
import json

import pytest
from test_stopping import character_tokenizer
from typer.testing import CliRunner

from dspark_hf.cli import evaluating
from dspark_hf.cli.app import app
from dspark_hf.evaluation import provenance, running
from dspark_hf.evaluation.plotting import acceptance_figure, sweep_figure, wilson_interval
from dspark_hf.evaluation.reporting import read_evaluation
from tiny import make_drafter, make_target

RUNNER = CliRunner()
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders of a target, two drafters and two sets, and of what an evaluation wrote."""
    folder = tmp_path_factory.mktemp("evaluate")
    make_target("qwen3").save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    make_drafter().save_pretrained(folder / "first")
    make_drafter(markov=None, confidence=False, seed=2).save_pretrained(folder / "second")
    (folder / "data").mkdir()
    for name, texts in (("gsm8k", ("buoy", "reef")), ("mt-bench", ("sand", "kelp"))):
        rows = [json.dumps({"turns": [text]}) for text in texts]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def run(*arguments, code=0):
    result = RUNNER.invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def evaluate(files, *arguments, drafters=("first", "second"), output="out", code=0):
    return run(
        "evaluate", files / "target", *(files / name for name in drafters),
        "--data", files / "data", "--output", files / output, "--max-new-tokens", 7,
        "--dtype", "float32", "--threads", 1, *arguments, code=code,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(files):
    """Side by side, at two temperatures."""
    printed = evaluate(files, "--temperature", 0, "--temperature", 1)
    assert "temperature 0" in printed
    assert "macro" in printed
    return read_evaluation(files / "out" / "results.json")


def test_results_say_what_they_depend_on(results, files):
    """B152: machine, precision, attention, mode, versions, seed, command and revision."""
    settings = results["settings"]
    assert {"processor", "threads", "attention", "torch", "transformers"} <= set(settings)
    expected = {
        "target": "target", "dtype": "float32", "thinking": False, "seed": 980406,
        "max_new_tokens": 7, "confidence_threshold": 0.0, "temperatures": [0.0, 1.0],
    }  # fmt: skip
    assert expected.items() <= settings.items()
    assert set(results["provenance"]) == {"command", "revision", "started", "finished"}
    assert results["sources"] == {"gsm8k": "gsm8k.jsonl", "mt-bench": "mt-bench.jsonl"}
    first, second = results["drafters"]
    assert (first["name"], first["method"], first["block_size"]) == ("first", "DSpark (vanilla)", 4)
    assert (second["method"], second["num_layers"]) == ("DFlash", 2)
    figures = results["results"][0]
    assert (figures["drafter"], figures["temperature"]) == ("first", 0.0)
    assert figures["pooled"]["num_prompts"] == 4
    assert figures["pooled"]["same_text_as_plain"] == 4
    # Unknown figures are null: a NaN would make the file unreadable to others.
    assert "NaN" not in (files / "out" / "results.json").read_text()


def test_the_report_shows_the_figures_of_the_results(results, files):
    """Every set of every drafter, the macro average, and the plots that were drawn."""
    text = (files / "out" / "report.md").read_text(encoding="utf-8")
    for result in results["results"]:
        for figures in result["sets"]:
            assert f"{figures['accepted_length']:.2f} ±" in text
            assert f"{figures['tokens_per_second']:.1f} ({figures['speedup']:.2f} ×)" in text
        assert f"**{result['macro']['accepted_length']:.2f} ±" in text
        for rate in result["pooled"]["prefix_acceptance"]:
            assert f"{100 * rate:.1f} %" in text
    mean_ece = results["results"][0]["pooled"]["confidence"]["mean_ece"]
    assert f"{mean_ece:.3f} |" in text
    assert "first over it" in text
    assert "first 4 of 4, second 4 of 4" in text
    plots = [f"{name}_t{t}.png" for t in (0, 1) for name in ("acceptance", "reliability_first")]
    for name in plots:
        assert f"]({name})" in text
        assert (files / "out" / name).read_bytes().startswith(PNG)
    assert "reliability_second" not in text
    assert "bonus token included" in text


def test_a_second_call_runs_nothing_and_options_have_an_effect(results, files, monkeypatch):
    """B100: sets, prompts and temperatures are chosen, and answers are not made again."""
    monkeypatch.setattr(running, "timed_generate", None)
    evaluate(files, "--temperature", 0, "--task", "mt-bench", "--max-prompts", 1)
    chosen = read_evaluation(files / "out" / "results.json")["results"]
    assert [r["drafter"] for r in chosen] == ["first", "second"]
    assert [figures["name"] for figures in chosen[0]["sets"]] == ["mt-bench"]
    assert chosen[0]["pooled"]["num_prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", 3), "seed is 980406 there and 3 now"),
        (("--threshold", 0.5), "confidence_threshold is 0.0 there"),
        (("--task", "nonsense"), "has no set 'nonsense'. It has: gsm8k, mt-bench"),
    ],
)
def test_what_does_not_fit_is_refused(results, files, arguments, message, monkeypatch):
    """Before anything runs."""
    monkeypatch.setattr(running, "timed_generate", None)
    with pytest.raises(ValueError, match=message):
        RUNNER.invoke(app, list(map(str, (
            "evaluate", files / "target", files / "first", "--data", files / "data",
            "--output", files / "out", "--max-new-tokens", 7, "--dtype", "float32",
            "--threads", 1, *arguments,
        ))), catch_exceptions=False)  # fmt: skip


def test_unknown_tasks_of_the_hub_are_refused_before_a_model_loads(files, monkeypatch):
    """And the known ones are listed."""
    monkeypatch.setattr(evaluating, "load_models", None)
    with pytest.raises(ValueError, match=r"Unknown task 'gsm9k'\. Known: gsm8k, math500"):
        RUNNER.invoke(
            app, ["evaluate", "t", "d", "--task", "gsm9k", "--output", str(files / "hub")],
            catch_exceptions=False,
        )  # fmt: skip


def test_an_interrupt_says_how_to_continue(files, monkeypatch):
    """Exit code 130, and what was answered is kept."""
    timed, calls = running.timed_generate, []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(running, "timed_generate", interrupt)
    printed = evaluate(files, drafters=["first"], output="interrupted", code=130)
    assert "the same command continues" in " ".join(printed.split())
    monkeypatch.setattr(running, "timed_generate", timed)
    evaluate(files, "--no-plain", drafters=["first"], output="interrupted")
    lines = (files / "interrupted" / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    answered = [(row["drafter"] == "plain", row["set_name"], row["index"]) for row in rows]
    # Two calls warmed up, two answered, and the rest was asked for without plain decoding.
    assert len(answered) == len(set(answered)) == 5


def test_without_matplotlib_the_report_has_no_plots_and_says_so(files, monkeypatch):
    """Nothing is lost but the images."""
    monkeypatch.setattr(evaluating, "can_plot", lambda: False)
    printed = evaluate(files, "--no-plain", drafters=["second"], output="bare")
    assert "pip install matplotlib" in printed
    assert "png" not in (files / "bare" / "report.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="matplotlib"):
        evaluating.run_sweep(None, [], "layers", 0.0, files / "s.png")


def test_sets_stand_in_the_order_asked_for_or_in_the_papers(tmp_path):
    """Others of a folder come behind, by name."""
    for name in ("alpaca", "gsm8k", "own", "aaa", "mbpp"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "text"}')

    def order(*tasks):
        return [prompt_set.name for prompt_set in evaluating.load_sets(tmp_path, tasks, None)]

    assert order() == ["gsm8k", "mbpp", "alpaca", "aaa", "own"]
    assert order("own", "gsm8k") == ["own", "gsm8k"]


def test_drafters_are_named_by_what_tells_them_apart():
    """The last part of a path, or all of it."""
    assert evaluating.short_names(["a/x", "b/y/"]) == ["x", "y"]
    assert evaluating.short_names(["a/x", "b/x", "c"]) == ["a/x", "b/x", "c"]
    with pytest.raises(ValueError, match="each one once"):
        evaluating.short_names(["a/x", "a/x"])


def sweep_results(layers, tau, temperature=1.0, sets=("gsm8k", "mbpp"), gamma=7, n=5, **settings):
    drafter = {"name": "d", "method": "DSpark", "num_layers": layers, "block_size": gamma}
    same = {"max_new_tokens": 64, "confidence_threshold": 0.0, "thinking": False}
    rows = [
        {"name": name, "accepted_length": tau + i, "num_prompts": n} for i, name in enumerate(sets)
    ]
    return {
        "settings": {"target": "T", "target_fingerprint": "f", **same, **settings},
        "drafters": [drafter],
        "results": [{"drafter": "d", "temperature": temperature, "sets": rows}],
    }


def test_a_sweep_is_a_line_per_method_over_several_results(tmp_path):
    """Figures 3 and 4: sorted by the dimension, a panel per domain."""
    many = [sweep_results(3, 3.5), sweep_results(1, 3.0), sweep_results(5, 3.7)]
    axes = sweep_figure(many, "layers", 1.0).axes
    assert [axis.get_title() for axis in axes] == ["math", "code"]
    (line,) = axes[1].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 3, 5], [4.0, 4.5, 4.7])
    for i, result in enumerate(many):
        (tmp_path / f"{i}.json").write_text(json.dumps(result))
    output = tmp_path / "sweep.png"
    run("sweep", *(tmp_path / f"{i}.json" for i in range(3)), "--output", output,
        "--by", "block-size")  # fmt: skip
    assert output.read_bytes().startswith(PNG)


def test_four_methods_have_room_in_the_legend_of_one_panel():
    many = [sweep_results(1, 3.0, sets=("own",)) for _ in range(4)]
    for result, head in zip(many, ("vanilla", "gated", "rnn", "none"), strict=True):
        result["drafters"][0]["method"] = f"DSpark ({head})"
    figure = sweep_figure(many, "layers", 1.0)
    figure.savefig(io.BytesIO())
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("other", "temperature", "message"),
    [
        (sweep_results(2, 3, target_fingerprint="g"), 1.0, "different targets"),
        (sweep_results(2, 3, max_new_tokens=5), 1.0, r"different max_new_tokens \(5, 64\)"),
        (sweep_results(2, 3, confidence_threshold=0.7), 1.0, "different confidence_threshold"),
        (sweep_results(2, 3, sets=("gsm8k",)), 1.0, "different sets"),
        (sweep_results(2, 3, n=4), 1.0, r"gsm8k \(4\), mbpp \(4\); gsm8k \(5\), mbpp \(5\)"),
        (sweep_results(2, 3), 0.5, "nothing at temperature 0.5"),
        (sweep_results(None, 3), 1.0, "not known"),
    ],
)
def test_results_that_do_not_compare_are_refused(other, temperature, message):
    """Each with what differs."""
    with pytest.raises(ValueError, match=message):
        sweep_figure([sweep_results(1, 3.0), other], "layers", temperature)


def test_files_that_are_no_results_are_refused(tmp_path):
    """Named, with where to look."""
    path = tmp_path / "x.json"
    for text, message in (("{", "not JSON"), ("[]", "not the result"), ("{}", "results.json")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_evaluation(path)


def test_the_acceptance_plot_shows_conditional_rates():
    """Pooled over the sets of a domain; positions nobody reached have no point."""
    sets = [
        {"name": "gsm8k", "accepted_at": [8, 4, 0], "reached_at": [10, 8, 0]},
        {"name": "aime25", "accepted_at": [0, 0], "reached_at": [10, 0]},
    ]
    pooled = {"verified_at": [20, 20, 20]}
    result = {"drafter": "d", "sets": sets, "pooled": pooled}
    (axis,) = acceptance_figure([result], "T", 0.0).axes
    (line,) = axis.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [0.4, 0.5])
    assert axis.get_title() == "2 sets"


def test_wilson_intervals():
    """Textbook values; never outside [0, 1]."""
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1.0


def test_fingerprints_tell_weights_apart():
    """Equal weights are equal; one changed value is not, nor another precision."""
    model = make_drafter()
    before = provenance.fingerprint(model)
    assert before == provenance.fingerprint(make_drafter())
    model.norm.weight.data[3] += 1e-3
    assert provenance.fingerprint(model) != before
    assert provenance.fingerprint(make_drafter().bfloat16()) != before
