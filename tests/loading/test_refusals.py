"""Bad inputs: each is refused before weights are read, with what was found and what to do."""

import re

import pytest
import safetensors.torch
import torch
import transformers

from checkpoints import (
    DFLASH,
    GEMMA4,
    GOLDEN,
    VANILLA,
    copy_checkpoint,
    edit_config,
    edit_tensors,
    no_weights_loaded,
    shard,
)
from dspark_hf import DSparkDrafter, UnsupportedCheckpointError
from dspark_hf.loading.description import describe
from dspark_hf.loading.detection import detect_dialect
from tiny import make_drafter


def refuse(source, message, error=ValueError, **options):
    with no_weights_loaded(), pytest.raises(error, match=message) as caught:
        DSparkDrafter.from_pretrained(source, **options)
    return str(caught.value)


# -- config.json -----------------------------------------------------------------------------------

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


@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_of_a_published_config(tmp_path, key, value):
    """B069, B083: named, and never filled with a default."""
    folder = copy_checkpoint(tmp_path, **{key: value})
    refuse(
        folder, rf"config\.json lacks {key}( or \S+)?\. .*not guessed; take them from the original"
    )


@pytest.mark.parametrize(
    "key",
    ["global_head_dim", "attention_k_eq_v", "rope_parameters", "num_global_key_value_heads"],
)
def test_a_missing_key_of_a_published_gemma_config(tmp_path, key):
    """B069, B086."""
    folder = copy_checkpoint(tmp_path, GEMMA4, **{key: ...})
    refuse(folder, rf"config\.json lacks {key}\.")


@pytest.mark.parametrize(
    "key",
    [
        "backbone_config",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "target_hidden_size",
        "vocab_size",
    ],
)
def test_a_missing_key_of_our_config(tmp_path, key):
    """B069, B083."""
    make_drafter().save_pretrained(tmp_path)
    edit_config(tmp_path, **{key: ...})
    refuse(tmp_path, f"{key}.*guessed")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ...},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": ..., "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_a_config_without_a_rotary_base(tmp_path, changes):
    """B087: the host would use a default of its own."""
    folder = copy_checkpoint(tmp_path, **changes)
    refuse(folder, "states no rope_theta .*value the drafter was trained with; add it")


def test_a_gemma_config_without_its_rotary_base(tmp_path):
    """B087: that of the full-attention layers counts."""
    rope = {"sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    folder = copy_checkpoint(tmp_path, GEMMA4, rope_parameters=rope)
    refuse(folder, r"rope_parameters\.full_attention\.rope_theta is missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1 .*found 0"),
        ({"block_size": -5}, "block_size .* found -5"),
        ({"block_size": "5"}, "block_size .* found '5'"),
        ({"block_size": 10**9}, "block_size is 1000000000; .* at most 1024 tokens"),
        ({"target_layer_ids": [1, 3, 8]}, "contains 8, but a target of 8 layers .* 0 to 7"),
        ({"target_layer_ids": [-2, 3, 6]}, "target_layer_ids .* at least -1, found -2"),
        ({"target_layer_ids": [3, 1, 6]}, r"strictly increasing, found \[3, 1, 6\]"),
        ({"target_layer_ids": []}, "non-empty list"),
        ({"mask_token_id": 160}, r"mask_token_id is 160, but the embedding has 160 rows"),
        ({"mask_token_id": -1}, "mask_token_id .* found -1"),
        ({"markov_head_type": "ngram"}, "'ngram'; known types are"),
        ({"markov_rank": "8"}, "markov_rank .* found '8'"),
        ({"model_type": "llama"}, "goes with model_type qwen3 or .*, found 'llama'"),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            "goes with model_type gemma4_text or gemma4_unified_text, found 'qwen3'",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "sliding_window is None and use_sliding_window is False. Give the window",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
            "sliding_window is 8 and use_sliding_window is False.",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "'linear_attention'.; Qwen3 draft layers are full_attention or",
        ),
        ({"layer_types": ["full_attention"]}, r"cannot be built .*`layer_types` \(1\)"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and the weights hold 2 draft layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer of at least 1, found -1"),
        ({"intermediate_size": -2}, "intermediate_size must be an integer of at least 1, found -2"),
        ({"rms_norm_eps": "small"}, "cannot be built "),
        ({"hidden_size": "32"}, "cannot be built .*'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "num_attention_heads must be .* at least 1, found 0"),
        ({"hidden_act": "nonsense"}, "cannot be built .*nonsense"),
        ({"enable_confidence_head": "false"}, "enable_confidence_head = 'false', and it can be"),
        ({"confidence_head_with_markov": 1}, "confidence_head_with_markov = 1, and it can be true"),
        ({"dtype": 5}, "dtype 5; drafters are in one of torch.float16"),
        ({"dtype": "float8_e4m3fn"}, "dtype torch.float8_e4m3fn; drafters are in one of"),
        (
            {"rope_parameters": {"rope_theta": 0, "rope_type": "default"}},
            "rope_theta must be a positive number, found 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rotary type 'default' in rope_parameters and 'yarn' in rope_scaling",
        ),
        ({"rope_parameters": [1e6]}, r"rope_parameters = \[1000000.0\], expected an object"),
    ],
)
def test_a_config_that_contradicts_itself(tmp_path, changes, message):
    """B068, B070, B074, B083, B089: found by reading it, before any tensor is."""
    refuse(copy_checkpoint(tmp_path, **changes), f"(?s){message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "no MoE blocks.*enable_moe_block=True"),
        ({"hidden_size_per_layer_input": 256}, "no per-layer inputs.*=256"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping must be positive"),
    ],
)
def test_a_gemma_config_of_another_kind(tmp_path, changes, message):
    """B085, B086."""
    refuse(copy_checkpoint(tmp_path, GEMMA4, **changes), message)


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "layers.1.self_attn.k_norm.weight",
        "markov_head.markov_w2.weight",
        "norm.weight",
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_missing_tensor(tmp_path, name, sharded):
    """B075, B143: never random."""
    folder = copy_checkpoint(tmp_path)
    edit_tensors(folder, drop=(name,))
    if sharded:
        shard(folder)
    refuse(folder, rf"do not fit config\.json: missing {name} \(.*different checkpoints")


@pytest.mark.parametrize("name", ["extra.weight", "d2t", "layers.1.mlp.fourth_proj.weight"])
def test_an_unexpected_tensor(tmp_path, name):
    """B075, B081, B115: a weight that nothing would read means another layout."""
    folder = copy_checkpoint(tmp_path)
    edit_tensors(folder, **{name: torch.zeros(160, dtype=torch.long)})
    refuse(folder, rf"do not fit config\.json: unexpected {name} \(160,\)")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (32, 64)),
        ("embed_tokens.weight", (159, 32)),
        ("lm_head.weight", (40, 32)),
        ("confidence_head.proj.weight", (1, 32)),
        ("layers.0.self_attn.q_proj.weight", (64, 32)),
    ],
)
def test_a_misshapen_tensor(tmp_path, name, shape):
    """B070, B081, B111, B115: both shapes are told."""
    folder = copy_checkpoint(tmp_path)
    expected = tuple(safetensors.torch.load_file(folder / "model.safetensors")[name].shape)
    edit_tensors(folder, **{name: torch.zeros(shape)})
    text = f"{name} has shape {shape}, config.json asks for {expected}"
    refuse(folder, re.escape(text))


def test_config_and_weights_of_two_checkpoints(tmp_path):
    """Many differences: some are listed, the rest are counted."""
    folder = copy_checkpoint(tmp_path)
    copy_checkpoint(tmp_path / "other", DFLASH)
    (folder / "model.safetensors").write_bytes(
        (tmp_path / "other" / "model.safetensors").read_bytes()
    )
    edit_config(folder, intermediate_size=40)
    text = refuse(folder, r"do not fit config\.json.*… and \d+ more\. The two come from different")
    assert text.count(";") == 7


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])
def test_quantised_weights(tmp_path, dtype):
    """B112: told as what they are, not loaded as numbers of another scale."""
    folder = copy_checkpoint(tmp_path)
    edit_tensors(folder, **{"fc.weight": torch.zeros(32, 96).to(dtype)})
    refuse(folder, r"1 tensors are stored as \w+, for example fc\.weight.*unquantised checkpoint")


# -- other layouts ---------------------------------------------------------------------------------

FOREIGN = {
    "speculators_unknown_algorithm": (
        {"speculators_model_type": "peagle", "architectures": ["DSparkDraftModel"]},
        "a P-EAGLE drafter in a speculators checkpoint .*'peagle'",
    ),
    "embedded": ({"dspark_block_size": 5}, "target with an embedded DSpark drafter"),
    "embedded_taps": (
        {"dspark_target_layer_ids": [40], "architectures": ["DeepseekV4ForCausalLM"]},
        "target with an embedded DSpark drafter",
    ),
    "domino": (
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {"projector_type": "domino"},
        },
        "projector_type 'domino'",
    ),
    "k3": ({"architectures": ["K3DSparkModel"]}, "Kimi K3 DSpark drafter"),
    "k3_by_model_type": (
        {"architectures": ..., "model_type": "k3_dspark"},
        "Kimi K3 DSpark drafter .*K3DSparkModel",
    ),
    "gated_qwen": ({"architectures": ["Qwen35DSparkModel"]}, "gated-attention Qwen3.5 DSpark"),
    "dflash_without_architecture": (
        {"architectures": ["Unheard"], "dflash_config": {"mask_token_id": 3}},
        "DFlash drafter without a known architecture",
    ),
    "bonsai": ({"log_snr_conditioning": True}, "Bonsai drafter .log_snr_conditioning"),
    "muse": (
        {"architectures": ["MuseGlimmer"], "model_type": "muse_glimmer_assistant"},
        "Muse Glimmer assistant, which is not read: the host library loads",
    ),
    "eagle3_deepseek": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "EAGLE-3 drafter"),
    "eagle3_draft": ({"architectures": ["Eagle3DraftModel"]}, "EAGLE-3 drafter"),
    "own_code": (
        {"architectures": ["Mystery"], "auto_map": {"AutoModel": "code.Mystery"}},
        r"unknown layout \(architectures \['Mystery'\].*never runs code of a repository",
    ),
    "ordinary": (
        {"architectures": ["Qwen3ForCausalLM"], "markov_rank": ..., "target_layer_ids": ...},
        "unknown layout .*'qwen3'.*ordinary model, load it with AutoModelForCausalLM",
    ),
    "nameless": ({"architectures": ...}, "unknown layout .architectures None"),
    "empty_list": ({"architectures": []}, r"unknown layout .architectures \[\]"),
    "odd_list": ({"architectures": [["Qwen3DSparkModel"]]}, "unknown layout"),
    "a_string": ({"architectures": "Qwen3DSparkModel"}, "unknown layout"),
}


@pytest.mark.parametrize("layout", FOREIGN)
def test_another_layout_is_refused_by_name(tmp_path, layout):
    """B071, B074, B075: and the weights of a published repository are not even fetched."""
    changes, name = FOREIGN[layout]
    folder = copy_checkpoint(tmp_path, **changes)
    # The config decides, before weight files are looked for.
    (folder / "model.safetensors").unlink()
    text = refuse(folder, name, UnsupportedCheckpointError)
    assert str(folder) in text
    assert (
        "This version reads its own layout, DeepSpec DSpark, DFlash and Eagle3, speculators" in text
    )


@pytest.mark.parametrize("tensor", ["mtp.0.fc.weight", "mtp_dspark.fc.weight"])
def test_an_embedded_drafter_that_only_its_tensors_tell(tmp_path, tensor):
    """B075: the architecture says one thing, `mtp.*` another."""
    folder = copy_checkpoint(tmp_path)
    edit_tensors(folder, **{tensor: torch.zeros(4)})
    refuse(folder, "target with an embedded DSpark drafter", UnsupportedCheckpointError)


def test_a_plain_config_without_drafter_tensors():
    """B075: an ordinary one-layer model is no EAGLE-3 drafter."""
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    assert detect_dialect(raw, "here", ["midlayer.input_layernorm.weight"]) == "eagle3"
    with pytest.raises(UnsupportedCheckpointError, match="unknown layout"):
        detect_dialect(raw, "here", ["model.norm.weight"])


def test_a_repository_description_is_refused_alike(tmp_path):
    """`inspect` says the same as loading."""
    folder = copy_checkpoint(tmp_path, architectures=["K3DSparkModel"])
    with pytest.raises(UnsupportedCheckpointError, match="Kimi K3"):
        describe(str(folder))


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": True}, "never runs code of a repository"),
        ({"use_safetensors": False}, "only safetensors weights are read"),
        ({"variant": "fp16"}, "variant='fp16' is not supported"),
        ({"state_dict": {}}, "state_dict is not supported"),
        (
            {"quantization_config": transformers.BitsAndBytesConfig()},
            "leave quantization_config to the target",
        ),
    ],
)
def test_options_that_are_not_supported(options, message):
    """B112."""
    refuse(GOLDEN / VANILLA, message, **options)


@pytest.mark.parametrize(
    "options", [{"trust_remote_code": False}, {"use_safetensors": True}, {"use_safetensors": None}]
)
def test_the_same_options_with_the_values_we_use(options):
    """They are the host's own and may be given."""
    assert DSparkDrafter.from_pretrained(GOLDEN / VANILLA, **options).config.block_size == 5


def test_a_broken_generation_config(tmp_path):
    """Read before the weights are."""
    folder = copy_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    refuse(folder, r"generation_config\.json.* is not a valid JSON file", OSError)
