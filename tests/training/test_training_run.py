"""Run files and the commands `data` and `train`, from prompts to a drafter."""

import json
import shutil

import pytest
import torch
import yaml
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from typer.testing import CliRunner

from dspark_hf import DSparkDrafter, export_drafter
from dspark_hf.cli import app
from dspark_hf.cli.app import main
from dspark_hf.training import run as run_module
from dspark_hf.training.run import RunConfig, run_training
from dspark_hf.training.run_folder import RESULT, STARTED_WITH, remember_run
from dspark_hf.training.sources import DatasetRows
from small_runs import assert_same_weights, make_examples, weights
from small_tokenizer import make_tokenizer
from tiny import make_prompt, make_target

DRAFTER = {
    "mask_token_id": 4,
    "num_layers": 1,
    "block_size": 3,
    "markov_rank": 4,
    "target_layer_ids": [0, 2],
}
TRAINER = {
    "max_steps": 2,
    "learning_rate": "1e-2",
    "save_steps": 1,
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target folder with its tokenizer, prompts, and the data folder that `data` made of them."""
    folder = tmp_path_factory.mktemp("world")
    target = make_target(vocab_size=80)
    target.generation_config.eos_token_id = 2
    target.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    questions = [{"prompt": f"{word} {i}"} for i in range(5) for word in ("why", "how")]
    lines = "\n".join(map(json.dumps, questions))
    (folder / "prompts.jsonl").write_text(lines + "\n{\n", encoding="utf-8")
    (folder / "starters.txt").write_text("Who \nWhat\\n", encoding="utf-8")
    arguments = [
        *("data", "--target", str(folder / "target"), "--output", str(folder / "data")),
        *("--prompts", str(folder / "prompts.jsonl"), "--skip-malformed"),
        *("--temperature", "1.0", "--max-new-tokens", "12", "--batch-size", "4"),
        *("--validation-share", "0.3", "--dtype", "float32", "--seed", "5"),
    ]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "prompts.jsonl:11" in result.output
    return folder


def make_config(world, output, **changes):
    fields = {
        "target": str(world / "target"),
        "data": str(world / "data"),
        "output": str(output),
        "drafter": DRAFTER,
        "dtype": "float32",
        "num_anchors": 4,
        "trainer": TRAINER,
    }
    return {**fields, **changes}


def write(path, fields):
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def train(world, output, **changes):
    console = Console(record=True, width=200)
    config = RunConfig(**make_config(world, output, **changes))
    return run_training(config, console, assume_yes=True), console.export_text()


def test_the_commands_make_a_drafter_that_drafts(world, tmp_path):
    trainer = {**TRAINER, "report_to": "tensorboard", "eval_strategy": "epoch"}
    path = write(tmp_path / "run.yaml", make_config(world, tmp_path / "out", trainer=trainer))
    result = RUNNER.invoke(app, ["train", str(path), "--threads", "1"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "expected_tau" in result.output
    facts = json.loads((tmp_path / "out" / RESULT).read_text(encoding="utf-8"))
    assert facts["steps"] == 2
    (events,) = (tmp_path / "out").glob("runs/*")
    curves = EventAccumulator(str(events)).Reload()
    assert {"train/loss", "eval/expected_tau"} <= set(curves.Tags()["scalars"])
    assert facts["config"]["drafter"] == DRAFTER
    assert facts["evaluation"]["eval_expected_tau"] >= 1
    assert facts["training"]["target"] == "target"
    assert facts["training"]["temperatures of the answers"] == "1.0"
    assert facts["training"]["answers"] == "the target's own"
    card = ["export", str(tmp_path / "out"), str(tmp_path / "served")]
    result = RUNNER.invoke(app, [*card, "--result", str(tmp_path / "out" / RESULT)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "| steps | 2 |" in (tmp_path / "served" / "README.md").read_text(encoding="utf-8")
    assert {"dspark_hf", "transformers", "torch"} == set(facts["versions"])
    drafter = DSparkDrafter.from_pretrained(tmp_path / "out")
    target, prompt = make_target(vocab_size=80), make_prompt(vocab_size=80)
    expected = target.generate(prompt, max_new_tokens=8, do_sample=False)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert torch.equal(output, expected)
    # A second call finds the run finished and touches nothing.
    before = {file: file.read_bytes() for file in (tmp_path / "out").glob("*.*")}
    result = RUNNER.invoke(app, ["train", str(path)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "is finished: 2 steps" in " ".join(result.output.split())
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").glob("*.*")}


def test_the_card_says_whose_answers_and_which_steps(world, tmp_path):
    """Another model's answers, and weights that are the best ones and not the last."""
    data = shutil.copytree(world / "data", tmp_path / "data")
    made = json.loads((data / "provenance.json").read_text(encoding="utf-8"))
    assert made["target_weights"]
    text = json.dumps({**made, "target": "Qwen/Qwen3-0.6B", "target_weights": "c0ffee"})
    (data / "provenance.json").write_text(text, encoding="utf-8")
    # A step so large that the last one is not the best.
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"metric_for_best_model": "loss", "learning_rate": 1.0}
    result, said = train(world, tmp_path / "out", data=str(data), trainer={**TRAINER, **best})
    facts = result["training"]
    assert "are those of Qwen/Qwen3-0.6B, with other weights than the target's; a" in said
    assert facts["answers"] == "those of Qwen/Qwen3-0.6B, with other weights than the target's"
    assert (facts["steps"], facts["steps of the weights kept (the best)"]) == (2, 1)
    kept = DSparkDrafter.from_pretrained(tmp_path / "out" / "checkpoint-1")
    assert_same_weights(kept, DSparkDrafter.from_pretrained(tmp_path / "out"))
    # In half precision a target has other values.
    rounded = {**made, "dtype": "float16", "target_weights": "c0ffee"}
    (data / "provenance.json").write_text(json.dumps(rounded), encoding="utf-8")
    result, said = train(world, tmp_path / "other", data=str(data))
    assert result["training"]["answers"] == "the target's own, by its name"
    assert "a drafter does best" not in said


def test_more_steps_go_on_from_a_finished_run(world, tmp_path):
    """In the middle of an epoch; and a run that was cut off behind its last step ends the same."""
    steps = {**TRAINER, "lr_scheduler_type": "constant"}
    train(world, tmp_path / "two", trainer={**steps, "max_steps": 2})
    result, text = train(world, tmp_path / "two", trainer={**steps, "max_steps": 3})
    assert "checkpoint-2" in text
    assert result["steps"] == result["training"]["steps"] == 3
    # As if it had been killed in its last evaluation.
    (tmp_path / "two" / RESULT).unlink()
    two = weights(DSparkDrafter.from_pretrained(tmp_path / "two"))
    result, _ = train(world, tmp_path / "two", trainer={**steps, "max_steps": 3})
    assert result["steps"] == 3
    assert_same_weights(two, DSparkDrafter.from_pretrained(tmp_path / "two"))


@pytest.mark.parametrize("muon", [False, True])
def test_an_interrupted_run_goes_on_by_itself(world, tmp_path, monkeypatch, muon):
    """The newest checkpoint was cut off; the one before it is taken."""
    changes = {"trainer": {**TRAINER, "max_steps": 3}, "muon": muon}
    train(world, tmp_path / "whole", **changes)

    class Kill(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer_class = run_module.DSparkTrainer
    monkeypatch.setattr(
        run_module,
        "DSparkTrainer",
        lambda *args, **options: trainer_class(*args, callbacks=[Kill()], **options),
    )
    with pytest.raises(KeyboardInterrupt):
        train(world, tmp_path / "broken", **changes)
    monkeypatch.setattr(run_module, "DSparkTrainer", trainer_class)
    (tmp_path / "broken" / "checkpoint-2" / "trainer_state.json").write_text("")
    _, text = train(world, tmp_path / "broken", **changes)
    assert "checkpoint-1" in text
    whole, broken = (DSparkDrafter.from_pretrained(tmp_path / n) for n in ("whole", "broken"))
    assert_same_weights(whole, broken)


def test_dflash_warm_start_reduced_vocabulary_and_cache(world, tmp_path):
    """One run after the other: DFlash, then a DSpark drafter of 20 tokens from it, cached."""
    plain = {name: value for name, value in DRAFTER.items() if name != "markov_rank"}
    _, text = train(world, tmp_path / "dflash", family="dflash", drafter=plain)
    flash = DSparkDrafter.from_pretrained(tmp_path / "dflash")
    assert flash.markov_head is None
    assert flash.confidence_head is None
    result, text = train(
        world,
        tmp_path / "dspark",
        init_from=str(tmp_path / "dflash"),
        drafter={**DRAFTER, "draft_vocab_size": 20},
        feature_cache=str(tmp_path / "cache"),
        trainer={**TRAINER, "max_steps": 1, "learning_rate": 1e-9},
    )
    assert "The 20 draftable tokens cover" in text
    assert "markov_head.markov_w2.weight" in text
    assert "markov_head.markov_w2.weight" in result["warm_start"]["new"]
    assert result["warm_start"]["left_out"] == []
    assert " GB." in text
    assert any((tmp_path / "cache").glob("*.safetensors"))
    drafter = DSparkDrafter.from_pretrained(tmp_path / "dspark")
    torch.testing.assert_close(
        weights(drafter)["fc.weight"], weights(flash)["fc.weight"], atol=1e-6, rtol=0
    )
    assert drafter.config.draft_vocab_size == 20


def test_another_run_in_the_same_folder_is_refused(world, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    data = make_examples(3), make_examples(1)
    config = RunConfig(**make_config(world, folder))
    remember_run(RunConfig(**make_config(world, folder, num_anchors=6)), *data, 1)
    # Nothing was trained: a corrected run file may take its place.
    remember_run(config, *data, 1)
    assert json.loads((folder / STARTED_WITH).read_text())["num_anchors"] == 4
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "trainer_state.json").write_text("{}")
    remember_run(config, *data, 1)
    with pytest.raises(ValueError, match="num_anchors 4 there, 5 now"):
        train(world, folder, num_anchors=5)
    # The host would restore the rate of the checkpoint, and the card would name this one.
    with pytest.raises(ValueError, match=r"trainer {.*'learning_rate': 0.01.* there, .*0.02.* now"):
        train(world, folder, trainer={**TRAINER, "learning_rate": 0.02})
    with pytest.raises(ValueError, match="processes 1 there, 2 now"):
        remember_run(config, *data, 2)
    with pytest.raises(ValueError, match=r"examples {'train': 3, .* there, {'train': 2, .* now"):
        remember_run(config, make_examples(2), data[1], 1)
    with pytest.raises(ValueError, match=r"examples {'train': 3, .* there, {'train': 3, .* now"):
        remember_run(config, make_examples(3, seed=1), data[1], 1)
    for text in ("{", "[1]"):
        (folder / STARTED_WITH).write_text(text)
        with pytest.raises(ValueError, match=rf"{STARTED_WITH} cannot be read .* another output"):
            train(world, folder)
    (folder / STARTED_WITH).unlink()
    with pytest.raises(ValueError, match=rf"{STARTED_WITH} cannot be read .* another output"):
        train(world, folder)


def test_a_run_goes_on_where_it_was_moved_to_and_not_for_another_target(world, tmp_path):
    target = shutil.copytree(world / "target", tmp_path / "target")
    steps = {**TRAINER, "max_steps": 3, "lr_scheduler_type": "constant"}
    fields = {"target": str(target), "trainer": {**steps, "max_steps": 2}}
    train(world, tmp_path / "out", **fields)
    (tmp_path / "out").rename(tmp_path / "moved")
    for name in (RESULT, STARTED_WITH):
        # From before there was a choice of optimisers.
        path = tmp_path / "moved" / name
        facts = json.loads(path.read_text(encoding="utf-8"))
        (facts["config"] if name == RESULT else facts).pop("muon")
        path.write_text(json.dumps(facts), encoding="utf-8")
    _, text = train(world, tmp_path / "moved", **fields)
    assert "is finished: 2 steps" in text
    # Fine-tuned where it lies.
    make_target(vocab_size=80, seed=5).save_pretrained(target)
    for now in (fields, {**fields, "trainer": steps}):
        with pytest.raises(ValueError, match="holds other weights now than when"):
            train(world, tmp_path / "moved", **now)
    shutil.copytree(world / "target", target, dirs_exist_ok=True)
    result, text = train(world, tmp_path / "moved", **{**fields, "trainer": steps})
    assert (result["steps"], result["training"]["answers"]) == (3, "the target's own")
    drafter = DSparkDrafter.from_pretrained(tmp_path / "moved")
    export_drafter(drafter, tmp_path / "served", "dspark", results=[result])


def test_a_finished_run_without_checkpoints_does_not_begin_anew(world, tmp_path):
    """It would train from random weights and write over the drafter."""
    once = {**TRAINER, "save_strategy": "no"}
    train(world, tmp_path / "out", trainer=once)
    before = weights(DSparkDrafter.from_pretrained(tmp_path / "out"))
    with pytest.raises(ValueError, match="no checkpoint to go on from"):
        train(world, tmp_path / "out", trainer={**once, "max_steps": 3})
    after = weights(DSparkDrafter.from_pretrained(tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_data_that_does_not_fit_the_run_is_an_error(world, tmp_path):
    """Tokens of another vocabulary, and reports without anything to report on."""
    path = tmp_path / "rows.jsonl"
    row = {"input_ids": [*range(5, 25), 79], "assistant_spans": [[2, 21]]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    make_target(vocab_size=60).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="token id 79, and the target embeds 60"):
        train(world, tmp_path / "one", data=str(path), target=str(tmp_path / "target"))
    trainer = {**TRAINER, "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ValueError, match="eval_strategy is 'steps', and the data has no valid"):
        train(world, tmp_path / "two", data=str(path), trainer=trainer)


def nobody_answers(text):
    raise EOFError


@pytest.mark.parametrize("answer", [lambda text: "n", nobody_answers])
def test_a_cache_is_only_written_when_confirmed(world, tmp_path, monkeypatch, answer):
    """B139: its size is printed first."""
    asked = []
    console = Console(record=True, width=200)
    monkeypatch.setattr(console, "input", lambda text, **_: asked.append(text) or answer(text))
    config = RunConfig(
        **make_config(world, tmp_path / "out", feature_cache=str(tmp_path / "cache"))
    )
    with pytest.raises(ValueError, match="Not confirmed"):
        run_training(config, console)
    assert asked
    assert "GB" in console.export_text()
    assert not (tmp_path / "cache").exists()


def test_malformed_rows_are_fatal_or_skipped_by_choice(world, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(world / "data", data)
    with (data / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "long enough text"}\nbroken\n{"text": "a"}\n')
    number = len((data / "train.jsonl").read_text(encoding="utf-8").splitlines()) - 1
    with pytest.raises(ValueError, match=rf"train\.jsonl:{number}: not JSON"):
        train(world, tmp_path / "one", data=str(data))
    _, text = train(
        world,
        tmp_path / "two",
        data=str(data),
        on_error="skip",
        trainer={**TRAINER, "max_steps": 1},
    )
    assert f"train.jsonl:{number}" in text
    assert "left out" in text
    assert "no more than 3 answer tokens" in text


def test_data_without_a_usable_row_is_an_error(world, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="holds no row that can be trained on"):
        train(world, tmp_path / "out", data=str(path))


def test_commands_say_what_is_missing(world, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"Wof\xfcr ")
    prompts = world / "prompts.jsonl"
    target = ["--target", str(world / "target"), "--output", str(tmp_path / "data")]
    for arguments, message in (
        (["data", *target], "No prompts"),
        (["data", *target, "--prompts", str(empty)], "holds no prompt"),
        (
            ["data", *target, "--prompts", str(prompts), "--max-new-tokens", "9"],
            "prompts.jsonl:11: not JSON",
        ),
        (["data", *target, "--invent", "2", "--starters", str(empty)], "holds no starter"),
        (["data", *target, "--invent", "2", "--starters", str(latin)], "is not UTF-8"),
        (["data", *target, "--prompts", str(prompts), "--starters", str(empty)], "--invent N"),
        (["data", *target, "--invent", "2", "--top-p", "0"], "top_p is 0"),
        (
            ["data", *target, "--invent", "2", "--temperature", "1", "--temperature", "1"],
            "each one once",
        ),
        (["data", *target, "--prompts", str(prompts), "--max-new-tokens", "255"], ":1: 8 prompt"),
        (["data", *target[2:], "--target", str(empty), "--invent", "2"], "neither an existing"),
        (["data", *target[:3], str(empty), "--invent", "2"], "is a file; give a folder"),
        (["train", str(tmp_path / "no.yaml")], "No such file"),
    ):
        monkeypatch.setattr("sys.argv", ["dspark-hf", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        printed = " ".join(capsys.readouterr().err.split())
        assert message in printed, printed
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["data", "train"])
def test_an_interrupted_command_says_how_to_go_on(world, tmp_path, monkeypatch, command):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark_hf.cli.training.collect", interrupt)
    monkeypatch.setattr("dspark_hf.cli.training.run_training", interrupt)
    path = write(tmp_path / "run.yaml", make_config(world, tmp_path / "out"))
    arguments = {
        "data": ["--target", str(world / "target"), "--invent", "1", "--output", "rows"],
        "train": [str(path)],
    }
    result = RUNNER.invoke(app, [command, *arguments[command]])
    assert result.exit_code == 130
    assert "Interrupted." in result.output


def test_prompts_can_come_from_the_target_and_from_a_dataset(world, tmp_path, monkeypatch):
    table = DatasetRows("lab/chat:train", "c0ffee", [{"prompt": "why"}, {"prompt": "how"}])
    monkeypatch.setattr("dspark_hf.cli.training.open_source", lambda name: table)
    arguments = [
        *("data", "--target", str(world / "target"), "--output", str(tmp_path / "data")),
        *("--invent", "3", "--starters", str(world / "starters.txt"), "--temperature", "0"),
        *("--max-new-tokens", "4", "--batch-size", "8", "--dtype", "float32"),
        *("--prompts", "lab/chat:train"),
    ]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    facts = json.loads((tmp_path / "data" / "provenance.json").read_text(encoding="utf-8"))
    assert facts["sources"] == {
        "lab/chat:train": "prompts, revision c0ffee",
        "invented by the target": "3 from 2 starters",
    }
    files = [tmp_path / "data" / name for name in ("train.jsonl", "validation.jsonl")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) == 5
