"""The command line and the examples, on a tiny pair in folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_stopping import character_tokenizer
from typer.testing import CliRunner

from checkpoints import edit_config
from dspark_hf import export_drafter
from dspark_hf.cli import app, checking
from dspark_hf.cli import models as cli_models
from dspark_hf.cli.app import main
from dspark_hf.exporting.deepseek_v4 import merge_into_target
from dspark_hf.losslessness import first_divergence, greedy_gaps, sampling_distance
from published import deepspec
from tiny import make_drafter, make_eagle3, make_prompt, make_scripted, make_target
from tiny_v4 import make_v4_drafter, make_v4_target

ROOT = Path(__file__).parents[1]
RUNNER = CliRunner()
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target with tokenizer and of a drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target, tokenizer = make_target("qwen3"), character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter().save_pretrained(folder / "drafter")
    prompts = folder / "tiny.jsonl"
    rows = [{"turns": ["lighthouse", "ignored"]}, {"prompt": "waves"}]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "models": ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")],
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "prompts": str(prompts),
    }


def run(*arguments, code=0):
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_inspect_reads_no_weights(pair, monkeypatch):
    """B100: table and JSON say the same."""
    import safetensors.torch

    monkeypatch.setattr(safetensors.torch, "load_file", None)
    described = json.loads(run("inspect", pair["drafter"], "--json"))
    assert described["block_size"] == 4
    assert described["target_layer_ids"] == [0, 2]
    assert described["markov_head"] == "vanilla"
    assert described["num_parameters"] == sum(p.numel() for p in make_drafter().parameters())
    assert "taps" in run("inspect", pair["drafter"])


def test_generate_prints_the_targets_text_and_the_figures(pair):
    """B099, B100: the options reach `generate`."""
    output = run("generate", *pair["models"], "buoy", "--max-new-tokens", "12", "--compare",
                 "--dtype", "float32")  # fmt: skip
    tokenizer = character_tokenizer()
    ids = tokenizer("buoy", return_tensors="pt").input_ids
    text = make_target("qwen3").generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(text[0, 4:]) in output.replace("\n", "")
    assert "x plain" in output
    none = run("generate", *pair["models"], "buoy", "--max-new-tokens", "12",
               "--num-draft-tokens", "0", "--dtype", "float32")  # fmt: skip
    assert "τ 1.00 over 11 rounds" in none
    run("generate", *pair["models"], "buoy", "--max-new-tokens", "5", "--temperature", "0.7")


def test_check_passes_a_lossless_pair(pair, tmp_path):
    """B015, B017: exact in float32, gap in bfloat16, distance when sampling."""
    output = run("check", *pair["models"], "--max-new-tokens", "8", "--draws", "60",
                 "--num-prompts", "2", "--json", str(tmp_path / "check.json"))  # fmt: skip
    assert "2 of 2 texts identical" in output
    result = json.loads((tmp_path / "check.json").read_text())
    assert result["lossless"]
    assert result["sampling"]["distance"] <= result["sampling"]["bound"]
    assert result["bfloat16"]["worst_gap"] >= 0


def test_check_fails_a_pair_that_is_not_lossless(pair, monkeypatch):
    """The check can fail: a loop that commits unverified drafts is caught and located."""
    from dspark_hf.generation import judging
    from dspark_hf.generation.verification import Verification

    def accept_everything(scores, drafts, lengths):
        tokens = torch.cat((drafts, scores[:, -1:].argmax(-1)), dim=1)
        return Verification(tokens, lengths, torch.ones(1, dtype=torch.bool))

    monkeypatch.setattr(judging, "verify_greedy", accept_everything)
    output = run("check", *pair["models"], "--max-new-tokens", "8", "--draws", "0",
                 "--num-prompts", "1", "--dtype", "float32", code=1)  # fmt: skip
    assert "0 of 1 texts identical" in output
    assert "first divergence: new token" in output
    assert "NOT lossless" in output


def test_commands_take_an_eagle3_drafter(pair, tmp_path):
    """Nobody says which kind it is: the files do."""
    make_eagle3().save_pretrained(tmp_path)
    models = ["--target", pair["target"], "--drafter", str(tmp_path)]
    described = json.loads(run("inspect", str(tmp_path), "--json"))
    assert (described["family"], described["block_size"]) == ("eagle3", 4)
    assert "eagle3" in run("inspect", str(tmp_path))
    output = run("check", *models, "--max-new-tokens", "8", "--draws", "0", "--num-prompts", "1",
                 "--dtype", "float32")  # fmt: skip
    assert "1 of 1 texts identical" in output
    path = tmp_path / "bench.json"
    run("bench", *models, "--prompts", pair["prompts"], "--num-prompts", "1",
        "--max-new-tokens", "6", "--dtype", "float32", "--json", str(path))  # fmt: skip
    assert json.loads(path.read_text())["total"]["forward_seconds"]["draft"] > 0


def test_bench_of_a_pair_without_look_up(tmp_path):
    """The host has none for DeepSeek-V4, whose cache it cannot roll back; both from one folder."""
    folder, path = tmp_path / "v4", tmp_path / "bench.json"
    make_v4_target().save_pretrained(folder, max_shard_size="50KB")
    character_tokenizer().save_pretrained(folder)
    merge_into_target(make_v4_drafter(), folder)
    prompts = tmp_path / "tiny.jsonl"
    prompts.write_text('{"prompt": "lighthouse"}', encoding="utf-8")
    run("bench", "--target", str(folder), "--drafter", str(folder), "--prompts", str(prompts),
        "--max-new-tokens", "6", "--dtype", "float32", "--json", str(path))  # fmt: skip
    total = json.loads(path.read_text())["total"]
    assert total["lookup_speedup"] is None
    assert set(total["seconds"]) == {"plain", "drafter"}
    assert total["worst_gap"] < 1e-3


def test_bench_compares_three_ways(pair, tmp_path):
    """B152, B153: every set and the total, with the machine it was measured on."""
    path = tmp_path / "bench.json"
    output = run("bench", *pair["models"], "--prompts", pair["prompts"], "--num-prompts", "2",
                 "--max-new-tokens", "10", "--dtype", "float32", "--json", str(path))  # fmt: skip
    assert "tiny" in output
    result = json.loads(path.read_text())
    assert {"processor", "threads", "dtype", "torch", "transformers"} <= set(result["machine"])
    (row,) = result["sets"]
    assert row["num_prompts"] == 2
    assert row["accepted_length"] >= 1
    assert row["worst_gap"] < 1e-3
    ideal = row["accepted_length"] * row["forward_seconds"]["target_one"]
    ideal /= row["forward_seconds"]["target_verify"] + row["forward_seconds"]["draft"]
    assert row["loop_efficiency"] == pytest.approx(row["drafter_speedup"] / ideal)


def test_demo_runs_the_shipped_drafter(pair, monkeypatch):
    """The default pair is replaced by the tiny one; the shipped drafter's files are there."""
    from dspark_hf.cli import demonstrating

    assert (Path(cli_models.shipped_drafter()) / "model.safetensors").is_file()
    load = cli_models.load_pair
    monkeypatch.setattr(
        demonstrating,
        "load_pair",
        lambda target, drafter, *rest: load(pair["target"], pair["drafter"], *rest),
    )
    output = run("demo", "buoy", "--max-new-tokens", "8", "--dtype", "float32")
    assert "identical to plain decoding" in output


def test_expected_failures_are_one_line(pair, monkeypatch, capsys):
    """A wrong path ends in a sentence and exit code 1, not in a traceback."""
    monkeypatch.setattr(sys, "argv", ["dspark-hf", "inspect", "no-such-folder-or-repo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "Traceback" not in capsys.readouterr().err


def test_gaps_and_divergences():
    """B016: zero for the target's own text, positive where a token was replaced."""
    target, prompt = make_target("qwen3"), make_prompt(6)
    text = target.generate(prompt, max_new_tokens=8, do_sample=False)
    assert float(greedy_gaps(target, text, 6).max()) < 1e-4
    assert first_divergence(target, text, text, 6) is None
    other = text.clone()
    other[0, 9] = (other[0, 9] + 1) % 96
    assert float(greedy_gaps(target, other, 6)[0, 3]) > 0
    divergence = first_divergence(target, text, other, 6)
    assert (divergence.position, divergence.expected) == (3, int(text[0, 9]))
    assert divergence.logit_gap > 0


def test_sampling_distance_tells_a_biased_sampler_from_an_exact_one():
    """The bound holds for an exact sampler and not for one that is 0.15 off."""
    torch.manual_seed(0)
    probabilities = {(0, 0): 0.7, (0, 1): 0.2, (1, 0): 0.1}
    cells = list(probabilities)

    def draw(p):
        return [cells[i] for i in torch.multinomial(torch.tensor(p), 400, replacement=True)]

    distance, bound = sampling_distance(probabilities, draw([0.7, 0.2, 0.1]))
    assert distance <= bound
    distance, bound = sampling_distance(probabilities, draw([0.85, 0.1, 0.05]))
    assert distance > bound
    assert sampling_distance(probabilities, [(1, 1)] * 10)[0] == 1.0


def test_coloured_text_holds_back_half_characters(pair):
    """The printed text is the decoded text, whatever the rounds were."""
    from rich.console import Console

    from dspark_hf.cli.generating import run_generate

    loaded = cli_models.load_pair(pair["target"], pair["drafter"], "float32", 1)
    inputs = loaded.encode("buoy")
    text = loaded.target.generate(**inputs, max_new_tokens=9, do_sample=False)
    make_scripted(loaded.drafter, text, 2)
    console = Console(record=True, width=200)
    output, statistics = run_generate(
        console, loaded, inputs, {"max_new_tokens": 9, "do_sample": False}, compare=False
    )
    assert torch.equal(output, text)
    assert statistics.accepted == 5
    assert loaded.tokenizer.decode(text[0, 4:]) in console.export_text()
    assert checking.DEFAULT_PROMPTS


# The fifth one trains its own pair and has a test of its own.
@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "examples").glob("0[1-4]_*.py"))
)
def test_examples_run(pair, name):
    """Each example on the tiny pair, in a process of its own."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), pair["target"], pair["drafter"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_a_saved_threshold_is_used_and_a_check_verifies_all_the_same(pair, tmp_path):
    """B094, B100: the commands neither override the drafter's default nor pass on nothing."""
    drafter = make_drafter()
    drafter.generation_config.dspark_confidence_threshold = 0.99999
    drafter.save_pretrained(tmp_path / "drafter")
    models = ["--target", pair["target"], "--drafter", str(tmp_path / "drafter")]
    common = ["--max-new-tokens", "9", "--dtype", "float32"]
    assert "τ 1.00 over 8 rounds" in run("generate", *models, "buoy", *common)
    path = tmp_path / "check.json"
    run("check", *models, *common, "--draws", "0", "--num-prompts", "1", "--json", str(path))
    assert json.loads(path.read_text())["float32"]["verified"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "buoy", "--threads", "-3"),
        ("generate", "buoy", "--threshold", "7"),
        ("generate", "buoy", "--num-draft-tokens", "-1"),
        ("check", "--json", "no-such-folder/x.json"),
    ],
)
def test_impossible_arguments_end_before_a_model_loads(pair, arguments, monkeypatch):
    """One usage error, exit code 2."""
    monkeypatch.setattr(cli_models, "load_pair", None)
    run(arguments[0], *pair["models"], *arguments[1:], code=2)


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_export_writes_a_layout_and_prints_its_commands(pair, tmp_path, layout):
    """What `from_pretrained` reads as that layout; the card names the target."""
    options = ("--layout", layout, "--target-name", "o/t", "--license", "mit")
    output = run("export", pair["drafter"], str(tmp_path / "out"), *options)
    assert "vllm serve" in output
    assert json.loads(run("inspect", str(tmp_path / "out"), "--json"))["dialect"] == layout
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "`o/t`" in card
    assert "license: mit" in card


def test_export_copies_the_matrices_of_a_target(pair, tmp_path):
    """`--copy-from` loads the target and names it."""
    make_drafter(stored=False).save_pretrained(tmp_path / "bare")
    run("export", str(tmp_path / "bare"), str(tmp_path / "out"), "--copy-from", pair["target"])
    facts = json.loads(run("inspect", str(tmp_path / "out"), "--json"))
    assert facts["bound_from_target"] == []
    make_target(vocab_size=60).save_pretrained(tmp_path / "other")
    options = ("--copy-from", str(tmp_path / "other"))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "bare"), str(tmp_path), *options])
    assert "trained for another target" in str(result.exception)


def test_export_of_an_eagle3_drafter(tmp_path):
    """The class follows from the files; one chain in SGLang."""
    from test_speculators_eagle3 import GOLDEN, PER_TAP

    options = ("--layout", "eagle3", "--target-name", "o/t")
    output = run("export", str(GOLDEN / PER_TAP), str(tmp_path / "out"), *options)
    assert "--speculative-algorithm EAGLE3" in output
    assert json.loads(run("inspect", str(tmp_path / "out"), "--json"))["dialect"] == "eagle3"


def test_export_of_a_file_that_leaves_a_fact_out(pair, tmp_path):
    """T1, T2: the depth of the target, from `--copy-from` or told; the block layout, told."""
    out, files = str(tmp_path / "out"), tmp_path / "eagle3"
    export_drafter(make_eagle3(num_target_layers=None), files, "speculators", target_name="o/t")
    edit_config(files, eagle_aux_hidden_state_layer_ids=None)
    make_target(num_hidden_layers=8).save_pretrained(tmp_path / "target")
    arguments = ("export", str(files), out, "--layout", "speculators", "--target-name", "o/t")
    for told in (("--num-target-layers", "8"), ("--copy-from", str(tmp_path / "target"))):
        run(*arguments, *told)
        assert json.loads(run("inspect", out, "--json"))["target_layer_ids"] == [1, 3, 4]
    assert "num_target_layers=" in str(RUNNER.invoke(app, list(arguments)).exception)
    fork = tmp_path / "fork"
    deepspec(fork, architectures=["DFlashDraftModel"], training_block_size=9)
    told = ("--layout", "dspark", "--block-layout", "infill")
    run("export", str(fork), out, *told)
    assert json.loads(run("inspect", out, "--json"))["anchor_predicts"] is False


def test_probe_prints_its_evidence(pair, tmp_path):
    """Table and JSON; nothing is decided by a drafter of random weights."""
    path = tmp_path / "probe.json"
    output = run(
        "probe",
        *pair["models"],
        *("--max-new-tokens", "24", "--num-anchors", "8", "--json", str(path)),
    )
    assert "anchor_first ←" in output
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["stated"] == {"anchor_predicts": True, "tap_offset": 0, "causal": False}
    assert len(result["evidence"]) >= 5
    assert result["evidence"][0]["num_anchors"] == 8
    few = ("--max-new-tokens", "24", "--num-anchors", "2", "--num-prompts", "3")
    assert "anchor_first ←" in run("probe", *pair["models"], *few)


def test_a_silent_checkpoint_is_probed_once_and_it_is_said(pair, tmp_path, caplog):
    """A Markov head without a confidence head under a DFlash label may be either layout."""
    from published import deepspec

    folder, _ = deepspec(tmp_path, architectures=["DFlashDraftModel"], enable_confidence_head=False)
    from checkpoints import edit_tensors

    edit_tensors(folder, drop=("confidence_head.proj.weight", "confidence_head.proj.bias"))
    loaded = cli_models.load_pair(pair["target"], str(folder), "float32", 1)
    assert "does not say how its blocks are laid out" in caplog.text
    assert "block_layout=" in caplog.text
    used = "anchor_first" if loaded.drafter.config.anchor_predicts else "infill"
    assert f"{used} agreed best" in caplog.text


def test_inspect_can_be_told_the_layout(pair, tmp_path):
    from published import zlab

    folder, _ = zlab(tmp_path)
    told = json.loads(run("inspect", str(folder), "--layout", "anchor_first", "--json"))
    assert (told["block_size"], told["anchor_predicts"]) == (5, True)
    assert "anchor slot predicts" in run("inspect", str(folder))


def test_inspect_can_be_told_the_depth(tmp_path):
    """EAGLE-3 files of the original trainer leave their taps to a rule over it."""
    from test_speculators_eagle3 import LLAMA, chain_file

    folder = chain_file(tmp_path, LLAMA, architectures=["LlamaForCausalLM"], eagle_config=...)
    told = json.loads(run("inspect", str(folder), "--num-target-layers", "32", "--json"))
    assert (told["family"], told["target_layer_ids"]) == ("eagle3", [1, 15, 28])
