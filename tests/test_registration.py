"""Importing the package: cheap, in any order, and reversible."""

import subprocess
import sys

import pytest
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import dspark_hf
from checkpoints import GOLDEN, VANILLA
from dspark_hf import DSparkConfig, DSparkDrafter, _registration, auto, pipelines
from tiny import make_drafter, make_target


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_lazy():
    """B103: no torch, no modeling code; the hook waits for the host's module."""
    code = """
import sys, dspark_hf
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import GenerationMixin, GenerationConfig
assert hasattr(GenerationMixin._assisted_decoding, "dspark_original")
assert GenerationConfig().dspark_verification is None
assert "dspark_hf.modeling_dspark" not in sys.modules
print("ok")
"""
    assert run(code).strip() == "ok"


@pytest.mark.parametrize(
    "first",
    [
        "from dspark_hf import DSparkConfig",
        "from dspark_hf import DSparkDrafter",
        "from dspark_hf import DSparkCandidateGenerator",
        "from dspark_hf import collect_statistics",
        "from dspark_hf.generation import settings",
        "from transformers import pipeline, AutoModelForCausalLM; import dspark_hf",
    ],
)
def test_any_name_can_be_the_first_import(first):
    """No import cycle between the host's lazy modules and ours."""
    code = f"""
{first}
import transformers
assert hasattr(transformers.GenerationMixin._assisted_decoding, "dspark_original")
assert "dspark" in transformers.models.auto.configuration_auto.CONFIG_MAPPING
"""
    run(code)


def test_string_form_in_a_fresh_process(tmp_path):
    """B076: one documented import, and the class is found."""
    from test_stopping import character_tokenizer

    make_target("qwen3").save_pretrained(tmp_path / "target")
    character_tokenizer().save_pretrained(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "drafter")
    code = f"""
import dspark_hf
from transformers import pipeline
generator = pipeline(
    "text-generation", model={str(tmp_path / "target")!r}, device="cpu",
    assistant_model={str(tmp_path / "drafter")!r},
)
assert type(generator.assistant_model).__name__ == "DSparkDrafter"
print(generator("buoy", max_new_tokens=5, do_sample=False)[0]["generated_text"])
"""
    assert run(code).strip()


def test_auto_classes_resolve_our_layout(tmp_path):
    """B075: config and model, dtype and all."""
    make_drafter().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    for auto_class in (AutoModel, AutoModelForCausalLM):
        model = auto_class.from_pretrained(tmp_path, dtype="bfloat16")
        assert type(model) is DSparkDrafter
        assert str(model.dtype) == "torch.bfloat16"


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_a_published_drafter_is_not_an_ordinary_small_model(auto_class):
    """B075, M9: the call that works is named."""
    with pytest.raises(ValueError, match=r"DSparkDrafter\.from_pretrained"):
        auto_class.from_pretrained(GOLDEN / VANILLA)


def test_ordinary_models_load_as_before(tmp_path):
    """B103."""
    make_target("qwen3").save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("hooks", "module_name", "function"),
    [
        (auto, "transformers.models.auto.auto_factory", "_get_model_class"),
        (pipelines, "transformers.pipelines.base", "load_assistant_model"),
    ],
)
def test_other_hooks_are_reversible_and_idempotent(hooks, module_name, function):
    """B103."""
    import importlib

    module = importlib.import_module(module_name)
    wrapped = getattr(module, function)
    hooks.install(module)
    assert getattr(module, function) is wrapped
    hooks.uninstall(module)
    assert getattr(module, function) is wrapped.dspark_original
    hooks.uninstall(module)
    hooks.install(module)
    assert getattr(module, function).dspark_original is wrapped.dspark_original


def test_registering_again_changes_nothing():
    """B103: one finder, whatever is called how often."""
    before = list(sys.meta_path)
    _registration.register()
    assert sys.meta_path == before
    assert hasattr(transformers.GenerationMixin._assisted_decoding, "dspark_original")


def test_public_names():
    """Every name is there, in order, and nothing else answers."""
    assert dspark_hf.__all__ == sorted(dspark_hf.__all__)
    for name in dspark_hf.__all__:
        assert getattr(dspark_hf, name) is not None
    assert set(dspark_hf.__all__) <= set(dir(dspark_hf))
    with pytest.raises(AttributeError, match="NoSuchThing"):
        getattr(dspark_hf, "NoSuchThing")  # noqa: B009
