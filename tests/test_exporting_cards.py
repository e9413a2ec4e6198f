"""Cards of exported drafters: facts of the config, figures of results, commands of engines."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from checkpoints import read_json
from dspark_hf import export_drafter
from dspark_hf.evaluation.provenance import drafter_facts
from dspark_hf.exporting.cards import serve_commands
from tiny import make_drafter, make_eagle3, make_target

NAME = "somebody/target"


def test_our_own_layout_gets_a_card_too(tmp_path):
    drafter = make_drafter()
    export_drafter(drafter, tmp_path, "dspark", target_name=NAME)
    assert read_json(tmp_path / "config.json")["model_type"] == "dspark"
    assert f"`{NAME}`" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["/models/target", "a/b/c", None])
def test_a_folder_is_no_base_model(tmp_path, name):
    """The front matter of a card names repositories only."""
    export_drafter(make_drafter(), tmp_path / "out", "deepspec", target_name=name)
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model is None


def test_a_target_names_itself(tmp_path):
    """Its name and class come from the model, for the card and for the verifier entry."""
    target = make_target()
    target.config.name_or_path = NAME
    export_drafter(make_drafter(), tmp_path, "speculators", target=target)
    verifier = read_json(tmp_path / "config.json")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": NAME, "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_a_card_states_the_facts_and_the_commands(tmp_path, layout):
    """Every figure from the config; the exact commands; no figure that nobody measured."""
    folder = tmp_path / "drafter"
    export_drafter(make_drafter(), folder, layout, target_name=NAME, license="apache-2.0")
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == NAME
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "dspark_hf"
    sections = [line[3:] for line in card.text.splitlines() if line.startswith("## ")]
    assert sections == [
        "What it is",
        "Use it",
        "Facts",
        "Measured figures",
        "Training data and mode",
        "Limits",
        "Citation",
    ]
    assert "| γ | 4 |" in card.text
    assert "| taps | 0, 2 (layer outputs, from 0) |" in card.text
    elements = sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    assert f"{elements:,} elements" in card.text
    assert "made without a result file" in card.text
    snippet = card.text.split("```python\n")[1].split("```")[0]
    compile(snippet, "card", "exec")
    commands = serve_commands(make_drafter().config, layout, "drafter", NAME)
    assert commands
    assert all(command in card.text for command in commands)


def test_serving_commands():
    """T1, T3: γ for vLLM; DeepSpec's DFlash is anchor-first, which their `dflash` is not."""
    dspark, dflash = make_drafter().config, make_drafter(markov=None, confidence=False).config
    speculative = '{"method": "dspark", "model": "o/d", "num_speculative_tokens": 4}'
    assert serve_commands(dspark, "deepspec", "o/d", "o/t") == [
        f"vllm serve o/t --speculative-config '{speculative}'",
        "python -m sglang.launch_server --model-path o/t --speculative-algorithm DSPARK "
        "--speculative-draft-model-path o/d",
    ]
    assert serve_commands(dspark, "speculators", "o/d", "o/t") == [
        "vllm serve o/d",
        f"vllm serve o/t --speculative-config '{speculative}'",
    ]
    assert serve_commands(dflash, "deepspec", "o/d", "o/t") == []
    # An engine would read its blocks as infill ones, and has no other Markov head.
    assert serve_commands(dflash, "speculators", "o/d", "o/t") == []
    infill = make_drafter(markov=None, confidence=False, anchor_predicts=False).config
    assert serve_commands(infill, "speculators", "o/d", "o/t")[0] == "vllm serve o/d"
    gated = make_drafter(markov="gated").config
    assert serve_commands(gated, "speculators", "o/d", "o/t") == []
    assert "sglang" in serve_commands(gated, "deepspec", "o/d", "o/t")[0]
    assert serve_commands(dspark, "dspark", "o/d", "o/t") == []


FIGURES = {
    "sets": [{"name": "chat", "accepted_length": 2.345, "speedup": 1.5}],
    "macro": {"accepted_length": 2.5, "speedup": 1.25},
}


def bench(drafter):
    """What `dspark-hf bench` writes, in short."""
    return {
        "machine": {"processor": "a CPU", "dtype": "bfloat16"},
        "drafters": [drafter_facts("mine", drafter)],
        "temperature": 0.0,
        "sets": [{"name": "chat", "accepted_length": 2.345, "drafter_speedup": 1.5}],
        "total": {"accepted_length": 2.5, "drafter_speedup": 1.25},
    }


def evaluation(drafter, temperature=1.0, other=None):
    """What `dspark-hf evaluate` writes, in short, of the drafter beside another one."""
    other = other or make_eagle3()
    worse = {"drafter": "other", "temperature": 0.5, "sets": [], "macro": {"accepted_length": 9.0}}
    return {
        "settings": {"processor": "a CPU", "dtype": "float32"},
        "drafters": [drafter_facts("mine", drafter), drafter_facts("other", other)],
        "results": [{"drafter": "mine", "temperature": temperature, **FIGURES}, worse],
    }


def trained(drafter):
    """What a training run writes, in short."""
    return {"drafters": [drafter_facts("out", drafter)], "training": {"prompts": 1200}}


def test_a_card_has_the_figures_of_all_of_its_results(tmp_path):
    """From files and objects; of an evaluation of several drafters, its own rows."""
    drafter = make_drafter()
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench(drafter)), encoding="utf-8")
    results = [path, evaluation(drafter), evaluation(drafter, 0.7), trained(drafter)]
    export_drafter(drafter, tmp_path / "out", "deepspec", target_name=NAME, results=results)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for temperature in ("0", "1", "0.7"):
        assert text.count(f"| {temperature} | all | 2.50 | 1.25 |") == 1
        assert f"| {temperature} | chat | 2.35 | 1.50 |" in text or (
            f"| {temperature} | chat | 2.34 | 1.50 |" in text
        )
    assert "9.00" not in text
    assert text.count("Measured with: ") == text.count("processor a CPU") == 3
    assert "| prompts | 1200 |" in text
    export_drafter(drafter, tmp_path / "bare", "dspark", results=[trained(drafter)])
    text = (tmp_path / "bare" / "README.md").read_text(encoding="utf-8")
    assert "has no evaluation in it" in text


def moved(drafter):
    """The same after more training."""
    with torch.no_grad():
        drafter.fc.weight *= 1.5
    return drafter


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda d: [trained(make_drafter(seed=2))], r"result 1 is not of this drafter: .* \(out\)"),
        (lambda d: [trained(d), evaluation(make_drafter(seed=2))], r"\(mine\), .* \(other\)"),
        (lambda d: [bench(moved(make_drafter()))], "is not of this drafter"),
        (
            lambda d: [{**bench(moved(make_drafter())), "machine": {"dtype": "float16"}}],
            "measured in float16, which rounds",
        ),
        (lambda d: [{"sets": []}], "the result notes none"),
        (lambda d: [trained(d), trained(d)], "Several results say how"),
        (lambda d: "out.json", "results is 'out.json'; give a list"),
        (lambda d: [{"loss": 1}], "neither an evaluation nor a bench nor a training run, but loss"),
    ],
)
def test_results_that_are_not_the_drafters(tmp_path, results, message):
    drafter = make_drafter()
    with pytest.raises(ValueError, match=message):
        export_drafter(drafter, tmp_path / "out", "dspark", results=results(drafter))
    assert not (tmp_path / "out").exists()


def test_one_set_of_weights_that_drafts_in_two_ways(tmp_path):
    """Each has its own figures; how it was trained belongs to both."""
    drafter, short = make_drafter(), make_drafter()
    short.generation_config.num_assistant_tokens = 2
    for own, other, figure in ((drafter, short, "2.50"), (short, drafter, "9.00")):
        results = [evaluation(drafter, other=short), trained(drafter)]
        folder = tmp_path / figure
        export_drafter(own, folder, "dspark", results=results)
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert text.count("| all |") == 1
        assert f"| all | {figure} |" in text
        with pytest.raises(
            ValueError, match=r"drafting 4 tokens, sampled.*drafting 2|drafting 2.*4"
        ):
            export_drafter(own, tmp_path / "no", "dspark", results=[bench(other)])


def test_results_of_the_drafter_in_another_precision(tmp_path):
    drafter = make_drafter()
    results = [evaluation(drafter)]
    export_drafter(drafter.bfloat16(), tmp_path / "out", "dspark", results=results)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_result_file_that_is_none(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{path} .*JSON"):
        export_drafter(make_drafter(), tmp_path / "out", "deepspec", results=[path])
