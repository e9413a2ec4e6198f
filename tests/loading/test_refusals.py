"""Bad input: one error that names what was found and what to do, before any weight is read."""

import errno
import json

import pytest
import torch

from checkpoints import (
    GEMMA4,
    VANILLA,
    copy_checkpoint,
    edit_config,
    edit_tensors,
    no_weights_loaded,
    read_json,
    same_weights,
    shard,
)
from dspark_hf import DSparkDrafter, UnsupportedCheckpointError
from tiny import make_drafter


def assert_refused(source, message, kind=ValueError, **options):
    with no_weights_loaded(), pytest.raises(kind, match=message):
        DSparkDrafter.from_pretrained(source, **options)


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(tmp_path / "drafter")


REQUIRED = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "vocab_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_trained_fact_is_named(folder, key):
    """B069, B083, B143: nothing is guessed."""
    edit_config(folder, **{key: ...})
    assert_refused(folder, rf"lacks {key}.*not guessed")


def test_a_missing_rope_theta_is_named(folder):
    """B087: no default of 10000 or 1e6."""
    edit_config(folder, rope_parameters=...)
    assert_refused(folder, "no rope_theta")


@pytest.mark.parametrize("key", ["global_head_dim", "attention_k_eq_v", "rope_parameters"])
def test_a_missing_gemma4_fact_is_named(tmp_path, key):
    """B069, for the other family."""
    edit_config(copy_checkpoint(tmp_path / "gemma", GEMMA4), **{key: ...})
    assert_refused(tmp_path / "gemma", f"lacks {key}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, found 0"),
        ({"block_size": "7"}, "block_size must be an integer"),
        ({"mask_token_id": 160}, "mask_token_id is 160.*160 rows"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0"),
        ({"target_layer_ids": [1, 3, 8]}, "contains 8.*layers 0 to 7"),
        ({"target_layer_ids": [3, 1, 6]}, "strictly increasing"),
        ({"target_layer_ids": [1, 1, 6]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 3, 6]}, "at least -1"),
        ({"target_layer_ids": []}, "non-empty list"),
        ({"markov_head_type": "ngram"}, "markov_head_type is 'ngram'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"model_type": "llama"}, "goes with model_type qwen3, found 'llama'"),
    ],
)
def test_impossible_facts_are_refused(folder, changes, message):
    """B070, B083, B089: both values named."""
    edit_config(folder, **changes)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"drop": ("fc.weight",)}, r"missing fc\.weight \(32, 96\)"),
        ({"drop": ("confidence_head.proj.weight",)}, r"missing confidence_head\.proj\.weight"),
        ({"extra.weight": torch.zeros(2)}, r"unexpected extra\.weight \(2,\)"),
        ({"norm.weight": torch.zeros(8)}, r"norm\.weight has shape \(8,\).*asks for \(32,\)"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int8)}, "stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(folder, edit, message):
    """B115, B143: compared before loading, with both shapes."""
    edit_tensors(folder, **edit)
    assert_refused(folder, message)


def test_more_taps_than_the_projection_was_trained_for(folder):
    """B067: the width of `fc` decides."""
    edit_config(folder, target_layer_ids=[1, 3, 5, 6])
    assert_refused(folder, r"fc\.weight has shape \(32, 96\), config\.json asks for \(32, 128\)")


def test_damaged_files(folder):
    """Cut short, foreign bytes, an absurd header length."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert_refused(folder, "damaged.*bytes found.*expected")
    path.write_bytes(b"not a safetensors file at all")
    assert_refused(folder, "damaged.*header claims")
    path.write_bytes((4).to_bytes(8, "little") + b"abcd")
    assert_refused(folder, "damaged.*not a safetensors header")
    path.write_bytes(b"")
    assert_refused(folder, "damaged")


def test_missing_shard_and_contradicting_index(folder):
    """The file is named."""
    names = shard(folder)
    (folder / names[1]).rename(folder / "elsewhere")
    assert_refused(folder, f"index lists {names[1]}", OSError)
    (folder / "elsewhere").rename(folder / names[1])
    index = read_json(folder / "model.safetensors.index.json")
    index["weight_map"]["ghost.weight"] = names[0]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, "disagree about 1 tensors.*ghost.weight")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert_refused(folder, "not a safetensors index")


def test_pickled_weights_are_not_opened(folder):
    """safetensors only, with the reason."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "Only safetensors weights are read.*run code", OSError)
    assert_refused(folder, "only safetensors", use_safetensors=False)


def test_code_of_a_repository_is_never_run(folder):
    """Not on request, and not where nothing else is known."""
    assert_refused(folder, "never runs code", trust_remote_code=True)
    edit_config(folder, architectures=["TheirModel"], auto_map={"AutoModel": "theirs.TheirModel"})
    assert_refused(folder, "ships its own code", UnsupportedCheckpointError)


FOREIGN = {
    "speculators": ({"speculators_model_type": "dspark"}, "speculators checkpoint"),
    "embedded": ({"dspark_block_size": 5}, "embedded DSpark drafter"),
    "eagle3": ({"architectures": ["Qwen3Eagle3Model"]}, "DeepSpec Eagle3"),
    "eagle3-gemma": ({"architectures": ["Gemma4Eagle3Model"]}, "DeepSpec Eagle3"),
    "eagle3-eval": ({"architectures": ["Eagle3DraftModel"], "ttt_length": 7}, "DeepSpec Eagle3"),
    "specforge": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
        "projector_type 'dspark'",
    ),
    "domino": (
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "domino"}},
        "projector_type 'domino'",
    ),
    "lfm2": ({"architectures": ["Lfm2DSparkDraftModel"]}, "LiquidAI"),
    "k3": ({"architectures": ["K3DSparkModel"]}, "Kimi K3"),
    "k3-bare": ({"architectures": ..., "model_type": "k3_dspark"}, "Kimi K3"),
    "qwen35": ({"architectures": ["Qwen35DSparkModel"]}, "gated-attention"),
    "z-lab": ({"architectures": ["DFlashDraftModel"]}, "z-lab DFlash"),
    "other-dspark": ({"architectures": ["DSparkDraftModel"]}, "another trainer"),
    "muse": (
        {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"},
        "Muse Glimmer",
    ),
    "eagle-llama": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
    "eagle-deepseek": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "EAGLE-3"),
    "eagle-plain": (
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100},
        "EAGLE-3",
    ),
    "nested-dflash": ({"architectures": ["Other"], "dflash_config": {"x": 1}}, "DFlash drafter"),
    "ordinary": ({"architectures": ["Qwen3ForCausalLM"]}, "AutoModelForCausalLM"),
    "nothing": ({"architectures": ...}, "unknown layout"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_every_other_layout_is_refused_by_name(folder, name):
    """B074, B075: named, with what this version reads."""
    changes, message = FOREIGN[name]
    edit_config(folder, **changes)
    assert_refused(folder, message, UnsupportedCheckpointError)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [("mtp.0.norm.weight", "embedded DSpark"), ("midlayer.norm.weight", "EAGLE-3")],
)
def test_layouts_told_by_their_tensors(folder, tensor, message):
    """B075: the config alone would pass for another layout."""
    edit_config(folder, architectures=["Unnamed"])
    edit_tensors(folder, **{tensor: torch.zeros(2)})
    from dspark_hf.loading.dialects import detect_dialect
    from dspark_hf.loading.files import read_tensors

    with pytest.raises(UnsupportedCheckpointError, match=message):
        detect_dialect(read_json(folder / "config.json"), "x", read_tensors(str(folder)))


def test_config_json_that_is_none(folder):
    """Absent, not JSON, not an object; a path that is a file or nothing."""
    path = folder / "config.json"
    assert_refused(path, "is a file", OSError)
    path.write_text("{")
    assert_refused(folder, "not valid JSON")
    path.write_text("[]")
    assert_refused(folder, "JSON list, expected an object")
    path.unlink()
    assert_refused(folder, r"No config\.json", OSError)
    assert_refused("nobody/no-such-drafter", "nobody/no-such-drafter", OSError)


def test_a_drafter_is_not_quantised_on_loading(folder):
    """B112: that is the target's business."""
    assert_refused(folder, "leave quantization_config to the target", quantization_config={"a": 1})


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, existing):
    """An earlier checkpoint in the folder stays whole; a new folder is gone."""
    target = tmp_path / "save"
    old = make_drafter(seed=1)
    if existing:
        old.save_pretrained(target)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match=r"No space left.*save again"):
        make_drafter(seed=2).save_pretrained(target)
    monkeypatch.undo()
    if existing:
        assert same_weights(DSparkDrafter.from_pretrained(target), old)
        assert not [path for path in target.iterdir() if path.name.startswith(".")]
    else:
        assert not target.exists()


def test_saving_to_a_file(tmp_path):
    """A folder is asked for."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="is a file; give a folder"):
        make_drafter().save_pretrained(tmp_path / "file")


def test_missing_weights_do_not_become_random(folder, monkeypatch):
    """B143: should the host ever load less than the header check promised."""
    import transformers

    host = transformers.PreTrainedModel.from_pretrained.__func__

    def forgetful(cls, *args, **kwargs):
        model, info = host(cls, *args, **kwargs)
        info["missing_keys"] = {"fc.weight"}
        return model, info

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(forgetful))
    with pytest.raises(ValueError, match=r"did not find \['fc.weight'\]"):
        DSparkDrafter.from_pretrained(folder)


def test_copying_vanilla_changes_nothing(folder):
    """The fixture itself is fine: every refusal above is due to its change."""
    assert DSparkDrafter.from_pretrained(folder).config.block_size == 5
    assert VANILLA
