"""A drafter taken out of its target and put back is the same, tensor for tensor."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import GOLDEN, read_json, same_weights
from dspark_hf import DSparkDrafter
from dspark_hf.exporting.deepseek_v4 import merge_into_target
from dspark_hf.quantised import dequantise_fp8
from published_v4 import write_quantised_target
from tiny import make_drafter, make_prompt, make_scripted
from tiny_v4 import V4, V4_QUANTISED, load_golden_drafter, make_v4_drafter

INDEX = "model.safetensors.index.json"


def stored_tensors(folder):
    tensors = {}
    for file in sorted(set(read_json(folder / INDEX)["weight_map"].values())):
        tensors |= load_file(folder / file)
    return tensors


def assert_same_values(found, expected):
    """Every value in its number format, packed experts bit by bit."""
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.dtype == expected[key].dtype, key
        if value.dtype == torch.float8_e4m3fn:
            # 224 at one scale is 448 at half of it.
            scale = key.removesuffix("weight") + "scale"
            assert torch.equal(
                dequantise_fp8(value, found[scale]),
                dequantise_fp8(expected[key], expected[scale]),
            ), key
        elif value.dtype != torch.float8_e8m0fnu or "experts" in key.replace("shared_experts", ""):
            one, other = (t.contiguous().view(torch.uint8) for t in (value, expected[key]))
            assert torch.equal(one, other), key


def target_without_drafter(folder, name):
    """The golden repository with its drafter cut out."""
    shutil.copytree(GOLDEN / name, folder)
    for number in (2, 3, 4):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    index = read_json(folder / INDEX)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if "mtp." not in n}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    raw = {k: v for k, v in read_json(folder / "config.json").items() if "dspark" not in k}
    raw["compress_ratios"] = raw["compress_ratios"][: raw["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
@pytest.mark.parametrize("name", [V4, V4_QUANTISED])
def test_split_and_merge(tmp_path, name, dtype):
    """Ours in between; every value comes back in its number format, packed experts bit by bit."""
    DSparkDrafter.from_pretrained(GOLDEN / name, dtype=dtype).save_pretrained(tmp_path / "own")
    drafter = DSparkDrafter.from_pretrained(tmp_path / "own", dtype=dtype)
    folder = target_without_drafter(tmp_path / "target", name)
    files = merge_into_target(drafter, folder)
    assert files == [f"mtp-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    found, expected = stored_tensors(folder), stored_tensors(GOLDEN / name)
    assert_same_values(found, expected)
    merged, original = read_json(folder / "config.json"), read_json(GOLDEN / name / "config.json")
    assert merged == original
    again = DSparkDrafter.from_pretrained(folder, dtype=dtype)
    assert same_weights(again, DSparkDrafter.from_pretrained(GOLDEN / name, dtype=dtype))


def test_a_merged_target_still_loads(tmp_path):
    folder = target_without_drafter(tmp_path / "target", V4)
    merge_into_target(load_golden_drafter(bound=False), folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(GOLDEN / V4, dtype=torch.float32)
    assert same_weights(target, expected)


def test_a_merge_replaces_the_drafter_that_was_there(tmp_path):
    """Its shards go, the target's stay."""
    folder = shutil.copytree(GOLDEN / V4, tmp_path / "target")
    drafter = load_golden_drafter(bound=False)
    drafter.norm.weight.data += 1
    merge_into_target(drafter, folder)
    merge_into_target(drafter, folder)
    weights = {file.name for file in folder.glob("*.safetensors")} - {
        "golden.safetensors",
        "golden_target.safetensors",
    }
    assert weights == {
        "model-00001-of-00004.safetensors",
        *(f"mtp-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    }
    assert same_weights(DSparkDrafter.from_pretrained(folder, dtype=torch.float32), drafter)
    assert not list(folder.glob(".*.partial"))


def test_a_quantised_target_with_its_drafter_split_and_merged(tmp_path):
    """FP8 and FP4 throughout, which the host decodes on a CPU: the same files, the same text."""
    folder = write_quantised_target(tmp_path / "target")
    before = stored_tensors(folder)
    assert {before[f"{part}.0.ffn.experts.0.w1.weight"].dtype for part in ("layers", "mtp")} == {
        torch.int8
    }
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    DSparkDrafter.from_pretrained(folder, dtype="auto").save_pretrained(tmp_path / "own")
    merge_into_target(DSparkDrafter.from_pretrained(tmp_path / "own", dtype="auto"), folder)
    assert_same_values(stored_tensors(folder), before)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert same_weights(merged, target)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = target.generate(make_prompt(20), **options)
    for num_right in (0, 3):
        drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.float32).eval()
        if num_right:
            make_scripted(drafter, expected, num_right)
        found = merged.generate(make_prompt(20), assistant_model=drafter, **options)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("complete", [True, False])
def test_a_merge_states_the_new_total_size(tmp_path, complete):
    """Bytes of all tensors of the index; nothing is stated of files that are not there."""
    folder = target_without_drafter(tmp_path / "target", V4)
    index = read_json(folder / INDEX)
    index["metadata"] = {"total_size": 12, "origin": "kept"}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    if not complete:
        (folder / "model-00001-of-00004.safetensors").unlink()
    merge_into_target(load_golden_drafter(bound=False), folder)
    metadata = read_json(folder / INDEX)["metadata"]
    if complete:
        size = sum(tensor.nbytes for tensor in stored_tensors(folder).values())
        assert metadata == {"origin": "kept", "total_size": size}
    else:
        assert metadata == {"origin": "kept"}


def test_what_the_released_code_reads_is_changed_with_the_index(tmp_path):
    """A base target states one stage there, and loading believes it."""
    folder = target_without_drafter(tmp_path / "target", V4)
    (folder / "inference").mkdir()
    path = folder / "inference" / "config.json"
    path.write_text(json.dumps({"n_layers": 6, "n_mtp_layers": 1}), encoding="utf-8")
    drafter = load_golden_drafter(bound=False)
    merge_into_target(drafter, folder)
    assert same_weights(DSparkDrafter.from_pretrained(folder, dtype=torch.float32), drafter)
    stated, config = read_json(path), read_json(folder / "config.json")
    assert (stated["n_layers"], stated["n_mtp_layers"]) == (6, 3)
    assert stated["dspark_target_layer_ids"] == config["dspark_target_layer_ids"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not a safetensors index"),
        ('{"weight_map": {"mtp.0.x": "../other.safetensors"}}', "is no file of the checkpoint"),
    ],
)
def test_an_index_that_lies_deletes_nothing(tmp_path, text, match):
    folder = target_without_drafter(tmp_path / "target", V4)
    (folder / INDEX).write_text(text, encoding="utf-8")
    other = tmp_path / "other.safetensors"
    other.touch()
    with pytest.raises(ValueError, match=match):
        merge_into_target(load_golden_drafter(bound=False), folder)
    assert other.is_file()


def test_changed_weights_have_no_published_form(tmp_path):
    folder = shutil.copytree(GOLDEN / V4_QUANTISED, tmp_path / "target")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, match in (
        ("fc.weight", "mtp.0.main_proj.weight has no exact FP8"),
        ("hidden_norm.weight", "mtp.0.main_norm.weight has no exact bfloat16"),
        # In the last shard, when the others are ready.
        ("norm.weight", "mtp.2.norm.weight has no exact bfloat16"),
    ):
        drafter = load_golden_drafter(V4_QUANTISED, bound=False)
        drafter.get_parameter(name).data *= 1.0001
        with pytest.raises(ValueError, match=match):
            merge_into_target(drafter, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_wrong_folders_are_refused(tmp_path):
    drafter = load_golden_drafter(bound=False)
    with pytest.raises(OSError, match=r"has no config\.json"):
        merge_into_target(drafter, tmp_path)
    folder = target_without_drafter(tmp_path / "target", V4)
    with pytest.raises(ValueError, match="its vocab_size is 256, the drafter was trained for 97"):
        merge_into_target(make_v4_drafter(), folder)
    with pytest.raises(ValueError, match="this one has 'qwen3' layers"):
        merge_into_target(make_drafter(), folder)
    raw = read_json(folder / "config.json")
    (folder / "config.json").write_text(
        json.dumps({**raw, "model_type": "qwen3"}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="of type 'qwen3'"):
        merge_into_target(drafter, folder)
    (folder / INDEX).unlink()
    with pytest.raises(OSError, match="has no index of sharded weights"):
        merge_into_target(drafter, folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts_per_tok": 3},
        {"routed_scaling_factor": 2.5},
        {"n_routed_experts": 4},
        {"rope_theta": 20000.0},
        {"sliding_window": 4},
        {"hc_mult": 2},
        {"num_hidden_layers": 7},
    ],
    ids=str,
)
def test_targets_that_would_make_another_drafter_are_refused(tmp_path, change):
    """One config.json serves both, so the drafter would be read back with the target's facts."""
    folder = shutil.copytree(GOLDEN / V4, tmp_path / "target")
    raw = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**raw, **change}), encoding="utf-8")
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    name = "rope_parameters" if "rope_theta" in change else next(iter(change))
    with pytest.raises(ValueError, match=rf"not this drafter's target: its {name} is"):
        merge_into_target(load_golden_drafter(bound=False), folder)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_calibration_that_stays_behind_is_said(tmp_path, caplog):
    folder = target_without_drafter(tmp_path / "target", V4)
    drafter = load_golden_drafter(bound=False)
    merge_into_target(drafter, folder)
    assert not caplog.records
    drafter.generation_config.dspark_sts_temperatures = [2.0] * drafter.config.block_size
    merge_into_target(drafter, folder)
    assert "dspark_sts_temperatures of the drafter's" in caplog.text
