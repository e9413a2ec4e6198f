"""Drafters inside DeepSeek-V4 checkpoints: found, planned, read; all else refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GOLDEN, edit_config, no_weights_loaded, read_json
from dspark_hf import DSparkConfig, DSparkDrafter, Eagle3Drafter, UnsupportedCheckpointError
from dspark_hf.backbones.packed_experts import PackedExperts
from dspark_hf.loading.checkpoint import read_facts
from dspark_hf.loading.description import describe
from published_v4 import INDEX, SIZES, published_config, write_sparse_checkpoint
from tiny_v4 import V4, V4_QUANTISED, load_golden_drafter, make_v4_drafter, v4_config


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes", "billions", "gigabytes", "per_stage"),
    [
        ("flash", 4705, 10_862_838_300, 19.846, 11.3, (1568, 1565, 1572)),
        ("pro", 7009, 41_979_375_900, 77.498, 43.2, (2336, 2333, 2340)),
    ],
)
def test_the_plan_for_published_checkpoints(
    tmp_path, name, num_tensors, num_bytes, billions, gigabytes, per_stage
):
    """Tensor and byte counts as measured on the published files; no target shard is needed."""
    folder = write_sparse_checkpoint(tmp_path / name, published_config(name))
    found = describe(str(folder))
    assert found["dialect"] == "deepseek_v4"
    assert found["num_tensors"] == num_tensors
    assert found["num_bytes"] == num_bytes
    assert round(found["num_parameters"] / 1e9, 3) == billions
    assert round(found["num_bytes_in_memory"] / 1e9, 1) == gigabytes
    assert [file.split(" (")[0][6:11] for file in found["files"]] == ["00046", "00047", "00048"]
    counts = [int(file.split("(")[1].split(" ")[0].replace(",", "")) for file in found["files"]]
    assert tuple(counts) == per_stage
    assert found["num_draft_layers"] == 3
    assert found["target_layer_ids"] == SIZES[name]["dspark_target_layer_ids"]
    assert found["bound_from_target"] == ["embedding", "output head"]
    assert found["confidence_head_with_markov"]


def test_the_plan_is_what_is_loaded(tmp_path):
    """In memory to the byte, inside of a target and split from it."""
    folder = copy_repository(tmp_path / "v4")
    drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.bfloat16)
    drafter.save_pretrained(tmp_path / "split")
    inside, split = describe(str(folder)), describe(str(tmp_path / "split"))
    size = sum(tensor.nbytes for tensor in drafter.state_dict().values())
    assert inside["num_bytes_in_memory"] == split["num_bytes_in_memory"] == size
    assert inside["num_parameters"] == split["num_parameters"]
    assert inside["interleaved_rotary"]
    assert split["interleaved_rotary"]


def test_the_plan_counts_what_else_is_in_the_files(tmp_path):
    """They are fetched whole, with the target's weights that share them."""
    folder = copy_repository(tmp_path / "v4")
    edit_shard(folder, 3, **{"layers.5.padding": torch.zeros(30_000_000, dtype=torch.uint8)})
    files = describe(str(folder))["files"]
    assert files[0].endswith("tensors, 0.00 GB)")
    assert files[1].endswith("tensors, 0.00 GB of a file of 0.03 GB)")


def test_facts_of_a_published_config(tmp_path):
    """Every field that the draft layers are built from, and none of the target's own."""
    folder = write_sparse_checkpoint(tmp_path / "flash", published_config("flash"))
    config = read_facts(DSparkDrafter, str(folder), download_weights=False).config
    backbone = config.backbone_config
    assert backbone.rope_parameters["main"] == {
        "rope_type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.125,
    }
    assert backbone.qk_rope_head_dim == 64
    assert set(backbone.layer_types) == {"sliding_attention"}
    assert set(backbone.mlp_layer_types) == {"moe"}
    assert backbone.expert_dtype == "fp4"
    assert (config.block_size, config.block_width, config.mask_token_id) == (5, 5, 128799)
    assert config.anchor_predicts
    assert not config.confidence_head_bias
    assert (config.markov_head_type, config.markov_rank) == ("vanilla", 256)
    assert getattr(backbone, "quantization_config", None) is None


# -- which files and which stages


def copy_repository(folder, name=V4):
    return shutil.copytree(GOLDEN / name, folder)


def edit_shard(folder, number, drop=(), **changes):
    path = folder / f"model-0000{number}-of-00004.safetensors"
    tensors = {name: t for name, t in {**load_file(path), **changes}.items() if name not in drop}
    save_file(tensors, path, metadata={"format": "pt"})
    index = read_json(folder / INDEX)
    others = {n: f for n, f in index["weight_map"].items() if f != path.name}
    index["weight_map"] = others | dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def test_the_target_need_not_be_there(tmp_path):
    """Three of 48 shards are enough; the index may list the others."""
    folder = copy_repository(tmp_path / "v4")
    (folder / "model-00001-of-00004.safetensors").unlink()
    (folder / "golden_target.safetensors").unlink()
    assert DSparkDrafter.from_pretrained(folder).config.backbone_config.num_hidden_layers == 3


def test_a_missing_shard_of_the_drafter_is_named(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(OSError, match=r"incomplete: its index lists model-00003-of-00004"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("nextn", [1, 3])
def test_stages_are_not_counted_by_nextn(tmp_path, nextn):
    """`num_nextn_predict_layers` is 1 in most published files and 3 in one."""
    folder = copy_repository(tmp_path / "v4")
    edit_config(folder, num_nextn_predict_layers=nextn)
    assert DSparkDrafter.from_pretrained(folder).config.backbone_config.num_hidden_layers == 3


@pytest.mark.parametrize("place", ["inference", "compress_ratios"])
def test_stages_that_are_stated_and_not_stored(tmp_path, place):
    folder = copy_repository(tmp_path / "v4")
    if place == "inference":
        (folder / "inference").mkdir()
        (folder / "inference" / "config.json").write_text('{"n_mtp_layers": 4}', encoding="utf-8")
    else:
        edit_config(folder, compress_ratios=[0, 0, 4, 128, 4, 128, 0, 0, 0, 0])
    with (
        no_weights_loaded(),
        pytest.raises(ValueError, match=r"\[0, 1, 2\] are stored.* 4 of them"),
    ):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", r"inference.config\.json is not valid JSON"),
        ("[1]", "holds a JSON list, expected an object"),
        ('{"n_mtp_layers": 0}', "0 of them, counted from 0, are stated"),
    ],
)
def test_a_damaged_statement_of_the_stages(tmp_path, text, match):
    folder = copy_repository(tmp_path / "v4")
    (folder / "inference").mkdir()
    (folder / "inference" / "config.json").write_text(text, encoding="utf-8")
    refuse(folder, match)


def test_stages_without_any_statement_are_those_stored(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    edit_config(folder, compress_ratios=...)
    assert DSparkDrafter.from_pretrained(folder).config.backbone_config.num_hidden_layers == 3


def test_one_file_with_everything(tmp_path):
    """A checkpoint in one file, with tensors of the target in it."""
    folder = copy_repository(tmp_path / "v4")
    tensors = {}
    for shard in sorted(folder.glob("model-0*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    drafter = DSparkDrafter.from_pretrained(folder)
    expected = load_golden_drafter(bound=False).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hosts_loading_options(tmp_path, dtype):
    """Precision and placement are the host's business; packed bytes are left alone."""
    folder = copy_repository(tmp_path / "v4", V4_QUANTISED)
    (folder / "generation_config.json").write_text('{"temperature": 0.3}', encoding="utf-8")
    drafter, info = DSparkDrafter.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert drafter.dtype == dtype
    experts = drafter.layers[2].mlp.experts
    assert {value.dtype for value in experts.state_dict().values()} == {torch.uint8}
    expected = load_golden_drafter(V4_QUANTISED, bound=False).layers[2].mlp.experts
    assert torch.equal(experts.down_proj, expected.down_proj)
    assert drafter.name_or_path == drafter.config.name_or_path == str(folder)
    # The generation config beside the target is the target's.
    assert drafter.generation_config.temperature != 0.3


def test_no_confidence_head_is_a_drafter_without_one(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    edit_shard(folder, 4, drop=("mtp.2.confidence_head.proj.weight",))
    assert DSparkDrafter.from_pretrained(folder).confidence_head is None


def test_fp8_experts_are_decoded(tmp_path):
    """Without packed experts the layers are the host's own throughout."""
    folder = copy_repository(tmp_path / "v4", V4_QUANTISED)
    changes, drop = {}, []
    values = torch.randint(-8, 8, (64, 256)).float()
    for stage, number in enumerate((2, 3, 4)):
        changes = {}
        for expert in range(4):
            for part, shape in (("w1", (64, 256)), ("w3", (64, 256)), ("w2", (256, 64))):
                name = f"mtp.{stage}.ffn.experts.{expert}.{part}"
                blocks = [-(-size // 128) for size in shape]
                changes[f"{name}.weight"] = values.reshape(shape).to(torch.float8_e4m3fn)
                scale = torch.full(blocks, 124, dtype=torch.uint8)
                changes[f"{name}.scale"] = scale.view(torch.float8_e8m0fnu)
        edit_shard(folder, number, drop, **changes)
    drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.float32)
    assert drafter.config.backbone_config.expert_dtype is None
    assert torch.equal(drafter.layers[1].mlp.experts.gate_up_proj[2, :64], values / 8)


# -- refusals


def refuse(folder, match, error=ValueError):
    with no_weights_loaded(), pytest.raises(error, match=match):
        DSparkDrafter.from_pretrained(folder)


def test_a_base_checkpoint_is_refused_before_its_index_is_read(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    (folder / INDEX).unlink()
    edit_config(
        folder, **{key: ... for key in read_json(folder / "config.json") if "dspark" in key}
    )
    refuse(folder, "without dspark_block_size.*ends in -DSpark", UnsupportedCheckpointError)


def test_an_ordinary_mtp_block_is_refused(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    edit_shard(
        folder, 2, drop=("mtp.0.main_proj.weight",), **{"mtp.0.e_proj.weight": torch.ones(4, 4)}
    )
    refuse(
        folder, "lack mtp.0.main_proj.weight, an ordinary multi-token", UnsupportedCheckpointError
    )


def test_a_target_saved_by_the_host_has_lost_its_drafter(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    for number in (2, 3, 4):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    index = read_json(folder / INDEX)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if "mtp." not in n}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    refuse(
        folder, "without mtp.* tensors: Transformers leaves them out", UnsupportedCheckpointError
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]},
        {"model_type": "deepseek_v4", "text_config": {"model_type": "deepseek_v41_text"}},
    ],
)
def test_v41_is_refused_by_name(tmp_path, changes):
    folder = copy_repository(tmp_path / "v4")
    edit_config(folder, **changes)
    refuse(folder, "a DeepSeek-V4.1 checkpoint.*built otherwise", UnsupportedCheckpointError)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"o_groups": ...}, "lacks o_groups"),
        ({"dspark_noise_token_id": ...}, "lacks dspark_noise_token_id"),
        ({"n_shared_experts": 2}, "n_shared_experts 2.*1 only"),
        ({"norm_topk_prob": False}, "norm_topk_prob False.*True only"),
        ({"qk_rope_head_dim": ...}, "lacks qk_rope_head_dim"),
        ({"dspark_noise_token_id": 256}, "mask_token_id is 256"),
        ({"dspark_target_layer_ids": [3, 4, 6]}, "contains 6"),
        (
            {"dspark_target_layer_ids": [-1, 4, 5]},
            "what a negative one was trained on cannot be told",
        ),
        ({"q_lora_rank": 16}, r"wq_a.weight has shape \(32, 64\), expected \(16, 64\)"),
        ({"n_routed_experts": 4}, r"unexpected mtp.0.ffn.experts.4.w1.weight"),
        (
            {"n_routed_experts": 10**9},
            r"n_routed_experts 1000000000, and .* mtp\.\* tensors in all",
        ),
        ({"num_experts_per_tok": 100}, "num_experts_per_tok is 100, and .* routed experts"),
        ({"q_lora_rank": 0}, "q_lora_rank must be an integer of at least 1, found 0"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, found 0"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, changes, match):
    folder = copy_repository(tmp_path / "v4")
    edit_config(folder, **changes)
    refuse(folder, match)


@pytest.mark.parametrize(
    ("changes", "drop", "match"),
    [
        ({}, "mtp.1.attn.wkv.scale", r"missing mtp.1.attn.wkv.scale \(1, 2\)"),
        ({}, "mtp.1.ffn.experts.3.w2.weight", "missing mtp.1.ffn.experts.3.w2.weight"),
        ({"mtp.1.extra": torch.ones(2)}, None, r"unexpected mtp.1.extra \(2,\)"),
        ({"mtp.norm.weight": torch.ones(2)}, None, r"stages \[0, 1, 2, norm\] are stored"),
        (
            {"mtp.1.ffn.experts.2.w1.weight": torch.ones(64, 128)},
            None,
            "mtp.1.ffn.experts.2.w1.weight is stored as F32, which is not read",
        ),
        (
            {"mtp.1.attn.wkv.scale": torch.ones(1, 2)},
            None,
            "mtp.1.attn.wkv.scale is stored as F32, which is not read",
        ),
        (
            {"mtp.1.attn.wkv.weight": torch.ones(64, 256, dtype=torch.int8)},
            None,
            "mtp.1.attn.wkv.weight is stored as I8",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, changes, drop, match):
    folder = copy_repository(tmp_path / "v4", V4_QUANTISED)
    edit_shard(folder, 3, drop=(drop,), **changes)
    refuse(folder, match)


def test_a_truncated_shard_is_refused(tmp_path):
    folder = copy_repository(tmp_path / "v4")
    path = folder / "model-00003-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(folder, "is damaged")


def test_the_other_class_is_refused():
    with pytest.raises(UnsupportedCheckpointError, match=r"DSparkDrafter\.from_pretrained"):
        Eagle3Drafter.from_pretrained(GOLDEN / V4)


def test_a_backbone_with_layers_of_the_target_is_refused():
    drafter = make_v4_drafter()
    fields = {**drafter.config.to_dict(), "backbone_config": v4_config()}
    with pytest.raises(ValueError, match=r"layer_types has .*copied from the target"):
        DSparkConfig(**{k: v for k, v in fields.items() if k in drafter.config.to_diff_dict()})


def test_packed_experts_need_widths_of_32():
    with pytest.raises(ValueError, match=r"scale for each 32 columns.*moe_intermediate_size is 16"):
        PackedExperts(v4_config(moe_intermediate_size=16))
