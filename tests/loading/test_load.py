"""Loading and saving what is right: every layout, option and way to store it."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig

from checkpoints import (
    DFLASH,
    GATED,
    GEMMA4,
    GOLDEN,
    LAYOUTS,
    RNN,
    VANILLA,
    copy_checkpoint,
    edit_config,
    edit_tensors,
    read_json,
    same_drafts,
    same_weights,
    shard,
)
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.loading.description import describe
from dspark_hf.loading.detection import is_foreign_drafter
from dspark_hf.loading.dialects import read_dialect
from tiny import make_drafter, make_target

# -- published layouts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_a_published_layout_is_read(name):
    """B074, B075: the right class, no key missing, unexpected or random."""
    drafter, info = DSparkDrafter.from_pretrained(GOLDEN / name, output_loading_info=True)
    assert type(drafter) is DSparkDrafter
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    stored = load_file(GOLDEN / name / "model.safetensors")
    loaded = drafter.state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[tensor], stored[tensor]) for tensor in stored)
    assert not drafter.training
    assert not any(parameter.is_meta for parameter in drafter.parameters())


@pytest.mark.parametrize(
    ("name", "head", "confidence", "with_markov"),
    [
        (VANILLA, "vanilla", True, True),
        (GATED, "gated", True, True),
        (RNN, "rnn", True, False),
        (DFLASH, None, False, False),
        (GEMMA4, "vanilla", True, True),
    ],
)
def test_the_heads_of_published_layouts(name, head, confidence, with_markov):
    """B071, B114, B115: DFlash of this layout is anchor-first too."""
    config = DSparkDrafter.from_pretrained(GOLDEN / name).config
    raw = read_json(GOLDEN / name / "config.json")
    assert (config.markov_head_type, config.markov_rank) == (head, raw["markov_rank"])
    assert (config.confidence_head, config.confidence_head_with_markov) == (
        confidence,
        with_markov,
    )
    assert config.anchor_predicts
    assert config.block_width == config.block_size == raw["block_size"]
    assert config.target_layer_ids == raw["target_layer_ids"]
    assert config.mask_token_id == raw["mask_token_id"]
    assert config.num_target_layers == raw["num_target_layers"]


@pytest.mark.parametrize("key", ["enable_confidence_head", "markov_rank"])
def test_keys_that_only_a_head_needs_may_be_absent_without_it(tmp_path, key):
    """The published DFlash files have neither of them."""
    raw = read_json(GOLDEN / DFLASH / "config.json")
    assert not raw[key]
    assert "markov_head_type" not in raw
    assert "confidence_head_with_markov" not in raw
    DSparkDrafter.from_pretrained(GOLDEN / DFLASH)


def test_a_path_object_and_a_string_are_the_same(tmp_path):
    """Both spellings of a folder."""
    folder = copy_checkpoint(tmp_path)
    one, other = DSparkDrafter.from_pretrained(folder), DSparkDrafter.from_pretrained(str(folder))
    assert same_weights(one, other)


def test_a_subfolder_is_read(tmp_path):
    """`subfolder` is the host's argument."""
    copy_checkpoint(tmp_path / "drafter")
    drafter = DSparkDrafter.from_pretrained(tmp_path, subfolder="drafter")
    assert same_weights(drafter, DSparkDrafter.from_pretrained(GOLDEN / VANILLA))


@pytest.mark.parametrize("name", [VANILLA, GEMMA4])
def test_shards_with_an_index_are_read(tmp_path, name):
    """B074."""
    folder = copy_checkpoint(tmp_path, name)
    names = shard(folder)
    assert len(names) == 3
    drafter = DSparkDrafter.from_pretrained(folder)
    assert same_weights(drafter, DSparkDrafter.from_pretrained(GOLDEN / name))
    assert describe(str(folder))["files"] == names


def test_no_code_of_a_repository_is_run(tmp_path):
    """An `auto_map` beside a known architecture is not followed (B112)."""
    folder = copy_checkpoint(tmp_path, auto_map={"AutoModel": "evil.Evil"})
    (folder / "evil.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    drafter = DSparkDrafter.from_pretrained(folder)
    assert not hasattr(drafter.config, "auto_map")


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        (torch.float32, torch.float32),
        ("auto", torch.float32),
        (None, torch.float32),
    ],
)
def test_dtype(dtype, expected):
    """B092: asked for, or as stored."""
    options = {} if dtype is None else {"dtype": dtype}
    drafter = DSparkDrafter.from_pretrained(GOLDEN / VANILLA, **options)
    assert {parameter.dtype for parameter in drafter.parameters()} == {expected}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_auto_is_the_stored_one(tmp_path, key):
    """B092, B112: both names of the key; own checkpoints keep it."""
    folder = copy_checkpoint(tmp_path / "published", **{"dtype": ..., key: "bfloat16"})
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(folder, **{name: value.bfloat16() for name, value in tensors.items()})
    drafter = DSparkDrafter.from_pretrained(folder, dtype="auto")
    assert drafter.dtype == torch.bfloat16
    drafter.save_pretrained(tmp_path / "own")
    loaded = DSparkDrafter.from_pretrained(tmp_path / "own", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert same_weights(drafter, loaded)


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": "cpu"},
        {"device_map": "auto"},
        {"device_map": {"": "cpu"}},
        {"low_cpu_mem_usage": True},
        {"low_cpu_mem_usage": True, "device_map": "cpu", "dtype": "auto"},
    ],
)
@pytest.mark.parametrize("name", [VANILLA, GEMMA4])
def test_placement_options_give_the_same_drafter(name, options):
    """The host's arguments; buffers that no checkpoint stores are right too (rotary, scale)."""
    plain = DSparkDrafter.from_pretrained(GOLDEN / name)
    drafter = DSparkDrafter.from_pretrained(GOLDEN / name, **options)
    assert drafter.device.type == "cpu"
    assert same_weights(drafter, plain)
    assert same_drafts(drafter, plain)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_kernel_reaches_the_draft_layers(attention):
    """The layers read their own config."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / VANILLA, attn_implementation=attention)
    assert {layer.self_attn.config._attn_implementation for layer in drafter.layers} == {attention}


@pytest.mark.parametrize("name", [VANILLA, GEMMA4])
def test_two_loads_give_two_equal_drafters(name):
    """B096: nothing is shared between them."""
    one, other = (DSparkDrafter.from_pretrained(GOLDEN / name) for _ in range(2))
    assert same_weights(one, other)
    assert one.config is not other.config
    assert one.generation_config is not other.generation_config


def test_generation_defaults_travel_with_the_drafter(tmp_path):
    """B094, B097: read from a published folder, written and read again."""
    folder = copy_checkpoint(tmp_path / "published")
    defaults = {"dspark_confidence_threshold": 0.3, "num_assistant_tokens": 2}
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    drafter = DSparkDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "own")
    for one in (drafter, DSparkDrafter.from_pretrained(tmp_path / "own")):
        assert isinstance(one.generation_config, GenerationConfig)
        assert one.generation_config.dspark_confidence_threshold == 0.3
        assert one.generation_config.num_assistant_tokens == 2


def test_without_a_generation_config_nothing_is_set():
    """B117: neutral defaults."""
    config = DSparkDrafter.from_pretrained(GOLDEN / VANILLA).generation_config
    assert config.dspark_confidence_threshold is None
    assert config.dspark_verification is None


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", [None, "10kB"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_through_our_layout(tmp_path, name, shard_size):
    """B074, B084, B147: one layout is written, whole or in shards, and read back bit for bit."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / name)
    drafter.save_pretrained(tmp_path, **({"max_shard_size": shard_size} if shard_size else {}))
    files = {file.name for file in tmp_path.iterdir()}
    assert ("model.safetensors.index.json" in files) == bool(shard_size)
    assert ("model.safetensors" in files) == (not shard_size)
    assert {"config.json", "generation_config.json"} < files
    raw = read_json(tmp_path / "config.json")
    assert (raw["model_type"], raw["architectures"]) == ("dspark", ["DSparkDrafter"])
    loaded, info = DSparkDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same_weights(drafter, loaded)
    assert same_drafts(drafter, loaded)
    assert describe(str(tmp_path))["dialect"] == "dspark"


@pytest.mark.parametrize("sizes", [("10kB", "1GB"), ("1GB", "10kB"), ("5kB", "20kB")])
def test_saving_over_another_checkpoint_leaves_nothing_of_it(tmp_path, sizes):
    """B084: no stale file is left that the host would load instead of the new weights."""
    note = tmp_path / "README.md"
    note.write_text("kept", encoding="utf-8")
    for seed, size in enumerate(sizes):
        drafter = make_drafter(seed=seed)
        drafter.save_pretrained(tmp_path, max_shard_size=size)
    weights = {file.name for file in tmp_path.iterdir() if ".safetensors" in file.name}
    index = tmp_path / "model.safetensors.index.json"
    listed = set(read_json(index)["weight_map"].values()) | {index.name} if index.exists() else None
    assert weights == (listed or {"model.safetensors"})
    assert same_weights(DSparkDrafter.from_pretrained(tmp_path), drafter)
    assert note.read_text(encoding="utf-8") == "kept"


def test_a_single_file_beside_a_stale_index_is_what_is_checked_and_loaded(tmp_path):
    """Check and load look at the same file, also where another tool left both."""
    folder = copy_checkpoint(tmp_path)
    shard(folder)
    copy_checkpoint(folder)
    edit_tensors(folder, **{"norm.weight": torch.full((32,), 7.0)})
    drafter = DSparkDrafter.from_pretrained(folder)
    assert (drafter.norm.weight == 7).all()
    assert describe(str(folder))["files"] == ["model.safetensors"]


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_auto_classes_load_our_layout(tmp_path, auto):
    """B075, B076."""
    drafter = make_drafter()
    drafter.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is DSparkDrafter
    assert same_weights(loaded, drafter)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig


# -- what a config says ----------------------------------------------------------------------------


def rotary_table(**changes):
    raw = {**read_json(GOLDEN / VANILLA / "config.json"), **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    drafter = DSparkDrafter(read_dialect(raw, "deepspec", "here", {}).config)
    return drafter._rotary(torch.zeros(1, 1, 32), 0, 40)[0]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}},
        {"rope_parameters": ..., "rope_theta": 5e4},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e4},
        {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": None},
        {"rope_parameters": ..., "rope_scaling": {"rope_theta": 5e4, "rope_type": "default"}},
    ],
    ids=["nested", "flat", "both", "flat_with_nulls", "rope_scaling"],
)
def test_every_spelling_of_the_rotary_base_gives_the_same_table(spelling):
    """B087: nested, flat or in `rope_scaling`; by value, so that no default slips in."""
    exponent = torch.arange(0, 8, 2).float() / 8
    angles = torch.arange(40.0)[:, None] / 5e4**exponent
    expected = torch.cat((angles, angles), dim=-1).cos()
    torch.testing.assert_close(rotary_table(**spelling)[0], expected)


def test_the_nested_rotary_base_wins():
    """B087: where an old flat value was left beside the nested one."""
    nested = {"rope_theta": 5e4, "rope_type": "default"}
    both = rotary_table(rope_parameters=nested, rope_theta=1e4)
    assert torch.equal(both, rotary_table(rope_parameters=nested))


def test_keys_copied_from_the_target_are_not_inherited(tmp_path):
    """B112, B087, T9: the config of a published drafter is a copy of its target's."""
    residue = {
        "quantization_config": {"quant_method": "fp8"},
        "auto_map": {"AutoModel": "code.Model"},
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 2],
        "attn_output_gate": True,
        "num_experts": 8,
    }
    folder = copy_checkpoint(tmp_path, **residue)
    # Newer configs carry these inside; a plain rotary embedding reads neither.
    nested = {"rope_parameters.partial_rotary_factor": 0.25, "rope_parameters.mrope_section": [1]}
    edit_config(folder, **nested)
    drafter = DSparkDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "own")
    text = (tmp_path / "own" / "config.json").read_text(encoding="utf-8")
    for key in residue:
        assert not hasattr(drafter.config, key)
        assert key not in text
    assert same_drafts(drafter, DSparkDrafter.from_pretrained(GOLDEN / VANILLA))
    assert set(describe(str(folder))["ignored_config_keys"]) >= set(residue)


def test_sliding_draft_layers_of_a_published_config(tmp_path):
    """B089: `layer_types` and the window are honoured; null and absent mean full attention."""
    sliding = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    drafter = DSparkDrafter.from_pretrained(copy_checkpoint(tmp_path / "sliding", **sliding))
    context = drafter.new_context(batch_size=1)
    assert [layer.window for layer in context.cache.layers] == [8, None]
    drafter.save_pretrained(tmp_path / "own")
    loaded = DSparkDrafter.from_pretrained(tmp_path / "own")
    assert [layer.window for layer in loaded.new_context(1).cache.layers] == [8, None]
    for name, value in (("null", None), ("absent", ...)):
        folder = copy_checkpoint(tmp_path / name, sliding_window=value)
        context = DSparkDrafter.from_pretrained(folder).new_context(1)
        assert [layer.window for layer in context.cache.layers] == [None, None]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_description_reads_no_weights(name):
    """What `inspect` prints."""
    facts = describe(str(GOLDEN / name))
    raw = read_json(GOLDEN / name / "config.json")
    tensors = load_file(GOLDEN / name / "model.safetensors")
    assert facts["dialect"] == "deepspec"
    assert facts["family"] == ("dflash" if name == DFLASH else "dspark")
    assert facts["num_tensors"] == len(tensors)
    assert facts["num_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert facts["num_bytes"] == 4 * facts["num_parameters"]
    assert facts["stored_dtypes"] == ["F32"]
    assert facts["bound_from_target"] == []
    assert facts["block_size"] == raw["block_size"]
    json.dumps(facts)


def test_foreign_drafters_are_known_by_their_config():
    """B075: what a pipeline and an auto class ask."""
    published = read_json(GOLDEN / VANILLA / "config.json")
    assert is_foreign_drafter(published)
    assert not is_foreign_drafter({**published, "architectures": ["Qwen3ForCausalLM"]})
    assert not is_foreign_drafter(make_drafter().config.to_dict())


def test_a_config_given_by_an_auto_class_is_used(tmp_path):
    """The caller may have changed it on purpose."""
    make_drafter().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.eos_token_id = 41
    assert DSparkDrafter.from_pretrained(tmp_path, config=config).config.eos_token_id == 41


def test_the_folder_of_a_config_edit_is_the_one_loaded(tmp_path):
    """The helper above edits what is read: a negative control of this file."""
    folder = copy_checkpoint(tmp_path)
    edit_config(folder, mask_token_id=3)
    assert DSparkDrafter.from_pretrained(folder).config.mask_token_id == 3


@pytest.mark.parametrize("bound", [False, True])
def test_a_drafter_can_be_copied(bound):
    """B034: deepcopy gives an equal drafter with weights of its own, bound modules included."""
    target = make_target("qwen3")
    drafter = make_drafter(stored=not bound)
    if bound:
        drafter.bind(target)
    copied = copy.deepcopy(drafter)
    assert same_weights(drafter, copied)
    assert copied.fc.weight is not drafter.fc.weight
    features, anchor = torch.randn(1, 6, 64), torch.tensor([7])
    assert torch.equal(copied(features, anchor).logits, drafter(features, anchor).logits)


def test_a_generation_config_given_on_loading_is_kept(tmp_path):
    """B094: over the one in the folder."""
    make_drafter().save_pretrained(tmp_path)
    given = GenerationConfig(num_assistant_tokens=1)
    loaded = DSparkDrafter.from_pretrained(tmp_path, generation_config=given)
    assert loaded.generation_config.num_assistant_tokens == 1
