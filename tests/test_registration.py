"""Importing the package: cheap, in any order, and nothing else of the host changes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils as modeling_utils
import transformers.models.auto.auto_factory as auto_factory
import transformers.models.auto.configuration_auto as configuration_auto
import transformers.pipelines.base as pipelines_base
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.generation import GenerationMixin

import dspark_hf
from checkpoints import DFLASH, GEMMA4, GOLDEN, LAYOUTS, VANILLA, copy_checkpoint
from dspark_hf import DSparkDrafter, UnsupportedCheckpointError, auto, pipelines
from dspark_hf._registration import HOOKS, _HookFinder, register
from dspark_hf.generation import hook
from tiny import make_drafter, make_prompt, make_target

ROOT = Path(__file__).parents[1]


def start(code, *arguments):
    """Run code in a fresh process."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(code, *arguments):
    """Run code in a fresh process; returns what it printed, as JSON."""
    return result_of(start(code, *arguments))


def result_of(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def test_importing_the_package_imports_nothing_heavy():
    """B103: neither torch nor the host's modeling code, and every name all the same."""
    found = run(
        """
        import json, sys
        import dspark_hf
        print(json.dumps({
            "heavy": [name for name in ("torch", "transformers", "numpy") if name in sys.modules],
            "names": sorted(set(dspark_hf.__all__) - set(dir(dspark_hf))),
            "version": dspark_hf.__version__,
        }))
        """
    )
    assert found == {"heavy": [], "names": [], "version": dspark_hf.__version__}


def test_transformers_stays_lazy_with_the_package():
    """B103: `import transformers` after it does not pull in what it would not without it."""
    found = run(
        """
        import json, sys
        import dspark_hf
        import transformers
        print(json.dumps([name for name in sys.modules if name.startswith((
            "transformers.models.qwen3", "transformers.generation.utils",
            "transformers.pipelines.base", "transformers.modeling_utils",
        ))]))
        """
    )
    assert found == []


IMPORT_ORDERS = {
    "package_first": "import dspark_hf; import transformers",
    "host_in_use_first": (
        "import transformers; transformers.GenerationConfig(); transformers.AutoModelForCausalLM; "
        "transformers.pipeline; transformers.Qwen3ForCausalLM; import dspark_hf"
    ),
}


@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_every_import_order_registers_everything(tmp_path, order):
    """B094, B103: hook, generation fields, auto classes and pipelines, each once."""
    make_drafter().save_pretrained(tmp_path)
    found = run(
        IMPORT_ORDERS[order]
        + """
import json, sys
import torch
config = transformers.GenerationConfig(dspark_confidence_threshold=0.5)
drafter = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
from tiny import make_prompt, make_target
target, prompt = make_target(), make_prompt()
plain = target.generate(prompt, max_new_tokens=4, do_sample=False)
with dspark_hf.collect_statistics() as statistics:
    out = target.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=drafter)
pipe = transformers.pipelines.base.load_assistant_model
print(json.dumps({
    "config": type(transformers.AutoConfig.from_pretrained(sys.argv[1])).__name__,
    "drafter": type(drafter).__name__,
    "field": config.dspark_confidence_threshold,
    "exact": torch.equal(out, plain),
    "drafted": statistics.drafted > 0,
    "pipeline": hasattr(pipe, "dspark_original"),
    "pipeline_twice": hasattr(pipe.dspark_original, "dspark_original"),
}))
        """,
        str(tmp_path),
    )
    assert found == {
        "config": "DSparkConfig",
        "drafter": "DSparkDrafter",
        "field": 0.5,
        "exact": True,
        "drafted": True,
        "pipeline": True,
        "pipeline_twice": False,
    }


def test_any_name_can_be_the_first_import():
    """B103: no import cycle between the host's lazy modules and the two of ours importing them."""
    first_imports = (
        "from dspark_hf import DSparkConfig",
        "from dspark_hf.generation import settings",
    )
    check = """
import json, transformers
print(json.dumps([
    hasattr(transformers.GenerationMixin._assisted_decoding, "dspark_original"),
    "dspark" in transformers.models.auto.configuration_auto.CONFIG_MAPPING,
]))
"""
    processes = [start(first + check) for first in first_imports]
    for process in processes:
        assert result_of(process) == [True, True], process.args


def test_the_string_form_of_a_pipeline_needs_one_import_only(tmp_path):
    """B076: in a fresh process, nothing but `import dspark_hf` before."""
    from test_pipelines import make_tokenizer

    make_target().save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "drafter")
    found = run(
        """
        import json, sys
        import dspark_hf
        from transformers import pipeline
        options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
        texts = []
        for assistant in (None, sys.argv[2]):
            pipe = pipeline("text-generation", model=sys.argv[1], assistant_model=assistant)
            texts.append(pipe("w5 w7 w9", **options)[0]["generated_text"])
        print(json.dumps([type(pipe.assistant_model).__name__, len(texts[0]) > 0, *texts]))
        """,
        str(tmp_path / "target"),
        str(tmp_path / "drafter"),
    )
    assert found[:2] == ["DSparkDrafter", True]
    assert found[2] == found[3]


def test_public_names():
    """Sorted, importable, and documented."""
    assert dspark_hf.__all__ == sorted(dspark_hf.__all__)
    for name in dspark_hf.__all__:
        value = getattr(dspark_hf, name)
        assert value.__doc__, name
        assert value.__name__ == name
    assert set(dspark_hf.__all__) <= set(dir(dspark_hf))
    with pytest.raises(AttributeError, match="no attribute 'Drafter'"):
        dspark_hf.Drafter  # noqa: B018


# -- auto classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_drafter_is_not_mistaken_for_a_small_model(name, auto_class):
    """B075: the error names the architecture and the right call."""
    folder = str(GOLDEN / name)
    message = rf"is a drafter .*DSparkModel.*DSparkDrafter\.from_pretrained\('{folder}'\)"
    with pytest.raises(ValueError, match=message):
        auto_class.from_pretrained(folder)


def test_the_error_names_what_to_call_when_built_from_a_config():
    """B075: no folder is known then."""
    config = AutoConfig.from_pretrained(GOLDEN / VANILLA)
    config.name_or_path = ""
    with pytest.raises(ValueError, match="this checkpoint is a drafter"):
        AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_our_layout_builds_from_a_config(auto_class):
    """`from_config` too."""
    assert type(auto_class.from_config(make_drafter().config)) is DSparkDrafter


def test_ordinary_checkpoints_still_load(tmp_path):
    """B075, B103: the same family, the host's own class."""
    target = make_target()
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is Qwen3ForCausalLM
    assert torch.equal(loaded.lm_head.weight, target.lm_head.weight)


# -- undoing ---------------------------------------------------------------------------------------


def test_registering_again_changes_nothing():
    """B103: one finder, one wrapper around each function."""
    functions = (
        GenerationMixin._assisted_decoding,
        GenerationMixin._validate_generation_mode,
        auto_factory._get_model_class,
        AutoConfig.from_pretrained,
        modeling_utils.log_state_dict_report,
        pipelines_base.load_assistant_model,
    )
    for _ in range(2):
        register()
    assert functions == (
        GenerationMixin._assisted_decoding,
        GenerationMixin._validate_generation_mode,
        auto_factory._get_model_class,
        AutoConfig.from_pretrained,
        modeling_utils.log_state_dict_report,
        pipelines_base.load_assistant_model,
    )
    for function in functions:
        assert hasattr(function, "dspark_original")
        assert not hasattr(function.dspark_original, "dspark_original")
    assert sum(isinstance(finder, _HookFinder) for finder in sys.meta_path) == 1
    assert all(name in sys.modules for name in HOOKS)


def uninstall_auto():
    auto.uninstall(auto_factory)
    auto.uninstall_config(configuration_auto)
    auto.uninstall_report(modeling_utils)


def test_uninstalling_puts_the_hosts_functions_back(tmp_path):
    """B103: as if the package had not been imported; then installed again."""
    folder = copy_checkpoint(tmp_path)
    originals = {
        "decode": GenerationMixin._assisted_decoding.dspark_original,
        "validate": GenerationMixin._validate_generation_mode.dspark_original,
        "auto": auto_factory._get_model_class.dspark_original,
        "config": AutoConfig.from_pretrained.dspark_original,
        "report": modeling_utils.log_state_dict_report.dspark_original,
        "pipeline": pipelines_base.load_assistant_model.dspark_original,
    }
    try:
        hook.uninstall(GenerationMixin)
        uninstall_auto()
        pipelines.uninstall(pipelines_base)
        assert originals == {
            "decode": GenerationMixin._assisted_decoding,
            "validate": GenerationMixin._validate_generation_mode,
            "auto": auto_factory._get_model_class,
            "config": AutoConfig.from_pretrained,
            "report": modeling_utils.log_state_dict_report,
            "pipeline": pipelines_base.load_assistant_model,
        }
        # The host's own behaviour, which our hook is there to prevent.
        mistaken = AutoModelForCausalLM.from_pretrained(folder)
        assert type(mistaken) is Qwen3ForCausalLM
        # Twice is the same as once.
        hook.uninstall(GenerationMixin)
        uninstall_auto()
        pipelines.uninstall(pipelines_base)
    finally:
        register()
    assert hasattr(GenerationMixin._assisted_decoding, "dspark_original")
    with pytest.raises(ValueError, match="is a drafter"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_importing_the_package_changes_no_output():
    """B103: plain `generate` with and without the hook, sampled with the same seed."""
    target, prompt = make_target(), make_prompt()
    outputs = []
    for undo in (False, True):
        if undo:
            hook.uninstall(GenerationMixin)
        try:
            torch.manual_seed(0)
            outputs.append(target.generate(prompt, max_new_tokens=12, do_sample=True))
        finally:
            register()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", [DFLASH, GEMMA4])
def test_the_host_reads_a_published_config_as_before(name):
    """B103: `AutoConfig` alone refuses nothing."""
    assert AutoConfig.from_pretrained(GOLDEN / name).model_type in ("qwen3", "gemma4_text")


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DSparkDraftModel", "K3DSparkModel"])
def test_other_published_drafters_are_no_small_models_either(architecture, tmp_path):
    """B075: also where this version cannot read them."""
    from checkpoints import copy_checkpoint

    folder = copy_checkpoint(tmp_path / "drafter", architectures=[architecture])
    with pytest.raises(ValueError, match=rf"drafter \({architecture}\)"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("architectures", [..., ["Qwen3ForCausalLM"]], ids=["none", "plain"])
def test_a_drafter_that_only_its_weights_give_away(tmp_path, architectures):
    """B075, T19: also for a class that is named and not looked for, as pipelines do."""
    from checkpoints import copy_checkpoint

    folder = copy_checkpoint(tmp_path, architectures=architectures)
    message = (
        r"fc\.weight and hidden_norm\.weight\).*in part random.*DSparkDrafter\.from_pretrained"
    )
    for loader in (AutoModelForCausalLM, Qwen3ForCausalLM):
        with pytest.raises(ValueError, match=message):
            loader.from_pretrained(folder)
    with pytest.raises(UnsupportedCheckpointError, match=r"keys of a drafter \(markov_rank"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("loader", [AutoConfig, AutoModelForCausalLM])
def test_a_drafter_without_a_model_type_names_its_call(tmp_path, loader):
    """B075: speculators files; another unknown file, and a target, keep the host's words."""
    from checkpoints import copy_checkpoint

    folder = copy_checkpoint(tmp_path, model_type=..., speculators_model_type="eagle3")
    with pytest.raises(ValueError, match=r"no class for\. .*Eagle3Drafter\.from_pretrained"):
        loader.from_pretrained(folder)
    for raw in ("{}", '{"dspark_block_size": 5}'):
        (folder / "config.json").write_text(raw, encoding="utf-8")
        with pytest.raises(ValueError, match="Unrecognized model"):
            loader.from_pretrained(pretrained_model_name_or_path=folder)


@pytest.mark.parametrize("key", ["dflash_config", "speculators_model_type"])
def test_a_drafter_that_lost_its_class_name_is_no_small_model(tmp_path, key):
    """B075, T19: copies without `architectures` are published too."""
    from checkpoints import copy_checkpoint

    folder = copy_checkpoint(tmp_path, architectures=..., **{key: {"mask_token_id": 3}})
    with pytest.raises(ValueError, match=rf"is a drafter \({key}\)"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_our_model_type_in_another_layout_is_said(tmp_path):
    """B075, T19: some of SpecForge's files have it."""
    from checkpoints import copy_checkpoint

    folder = copy_checkpoint(tmp_path, architectures=["DSparkDraftModel"], model_type="dspark")
    with pytest.raises(ValueError, match=r"another library's layout.*DSparkDrafter"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert DSparkDrafter.from_pretrained(folder).config.block_size == 5


def test_the_hosts_own_assistants_are_not_foreign():
    """B103: what the host loads and runs itself goes to the host."""
    from dspark_hf.loading.detection import is_foreign_drafter

    assert not is_foreign_drafter({"model_type": "muse_glimmer_assistant"})
    assert is_foreign_drafter({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]})
