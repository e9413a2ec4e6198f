"""The sizes that were published come out of the published configs, on the meta device."""

import torch

from dspark_hf import DSparkDrafter
from dspark_hf.loading.dialects import read_dialect
from dspark_hf.loading.files import TensorInfo

SIZES_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "num_target_layers": 36,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "layer_types": ["full_attention"] * 5,
}
SIZES_8B = {**SIZES_4B, "hidden_size": 4096, "intermediate_size": 12288}
SECTION = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
HEADS = {"projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla"}


def on_meta(raw, dialect, tensors=()):
    stored = {name: TensorInfo("BF16", (1, 1), "model.safetensors", 0) for name in tensors}
    reading = read_dialect(raw, dialect, "published", stored)
    with torch.device("meta"):
        return reading, DSparkDrafter(reading.config).state_dict()


def total(state):
    return sum(tensor.numel() for tensor in state.values())


def test_released_sizes_of_the_dflash_family():
    """T7: DeepSpec's counts without embedding and head, which these files do not have."""
    zlab = {"architectures": ["DFlashDraftModel"], **SIZES_8B, "block_size": 16}
    _, state = on_meta({**zlab, "dflash_config": SECTION}, "dflash")
    assert (len(state), total(state)) == (58, 1_048_626_432)
    section = {**SECTION, **HEADS, "enable_confidence_head": True}
    section["confidence_head_with_markov"] = True
    specforge = {"architectures": ["DSparkDraftModel"], **SIZES_4B, "block_size": 7}
    bias = ("confidence_head.proj.bias",)
    _, state = on_meta({**specforge, "dflash_config": section}, "specforge", bias)
    assert (len(state), total(state)) == (62, 615_221_249)
    assert state["confidence_head.proj.weight"].shape == (1, 2816)
    flat = {**SECTION, **HEADS, "shift_label": True, "use_confidence_head": True}
    flat["confidence_head_with_markov"] = True
    names = ("confidence_proj.bias", "markov_w1.weight", "markov_w2.weight")
    modelopt = {**specforge, "architectures": ["DFlashDraftModel"], "block_size": 16}
    reading, state = on_meta({**modelopt, "dflash_config": flat}, "modelopt", names)
    assert (len(state), total(state)) == (62, 615_221_249)
    assert (reading.config.block_size, reading.config.block_width) == (16, 16)
    assert reading.renames["markov_w2.weight"] == "markov_head.markov_w2.weight"


def test_released_sizes_of_lfm2():
    """What Liquid AI's cards say: 327.7 million elements for LFM2.5-2.6B, 295.7 for the 1.2B."""
    raw = {
        **SIZES_4B,
        "architectures": ["Lfm2DSparkDraftModel"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "head_dim": 64,
        "num_target_layers": 30,
        "rope_is_neox_style": False,
        "block_size": 9,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
    }
    section = {"mask_token_id": 64402, "target_layer_ids": [2, 9, 17, 21, 27]}
    for vocab_size, millions in ((128_000, 327.7), (65_536, 295.7)):
        changed = {**raw, "vocab_size": vocab_size, "dflash_config": section}
        reading, state = on_meta(changed, "lfm2", ("confidence_head.proj.bias",))
        assert round(total(state) / 1e6, 1) == millions
        assert reading.config.block_size == reading.config.block_width == 9


def test_released_sizes_of_the_speculators_layout():
    """T16: 32,000 rows in head and W2, 151,936 in embedding and W1."""
    body = {key: SIZES_8B[key] for key in SIZES_8B if key != "num_target_layers"}
    raw = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": body,
        "block_size": 8,
        "mask_token_id": 151669,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "sample_from_anchor": True,
        "draft_vocab_size": 32000,
    }
    names = ("d2t", "embed_tokens.weight", "lm_head.weight", "confidence_head.proj.bias")
    reading, state = on_meta(raw, "speculators", names)
    assert reading.config.target_layer_ids == [1, 9, 17, 25, 33]
    # 64 tensors and the map; rank, both heads and their inputs are the container's defaults.
    assert len(state) == 65
    assert state["markov_head.markov_w1.weight"].shape == (151936, 256)
    assert state["markov_head.markov_w2.weight"].shape == (32000, 256)
    assert state["lm_head.weight"].shape == (32000, 4096)
    assert state["draft_to_target"].shape == (32000,)
    missing_rows = (151936 - 32000) * (4096 + 256)
    assert total(state) == 2_371_081_729 - missing_rows + 32000
