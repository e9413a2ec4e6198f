"""`DSparkConfig`: trained facts are required, checked and kept."""

import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from checkpoints import DFLASH, GEMMA4, GOLDEN, RNN, VANILLA, read_json
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.loading.dialects import detect_dialect, normalise


def facts(**changes):
    fields = {
        "backbone_config": {
            "model_type": "qwen3",
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "target_hidden_size": 32,
        "vocab_size": 97,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {**fields, **changes}


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "target_hidden_size",
        "vocab_size",
    ],
)
def test_a_missing_trained_fact_is_named(name):
    """B069, B083: never guessed."""
    with pytest.raises(ValueError, match=rf"needs `{name}`.*cannot be guessed.*config\.json"):
        DSparkConfig(**facts(**{name: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, found 0"),
        ({"block_size": 2.5}, "block_size .* found 2.5"),
        ({"block_size": True}, "block_size .* found True"),
        ({"num_target_layers": -4}, "num_target_layers .* found -4"),
        ({"target_hidden_size": "32"}, "target_hidden_size .* found '32'"),
        ({"vocab_size": 0}, "vocab_size .* found 0"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, found -1"),
        ({"mask_token_id": 97}, r"mask_token_id is 97, but the embedding has 97 rows \(0 to 96\)"),
        ({"target_layer_ids": []}, r"non-empty list of layer numbers, found \[\]"),
        ({"target_layer_ids": 3}, "non-empty list of layer numbers, found 3"),
        ({"target_layer_ids": [0, 2.0]}, "target_layer_ids must be an integer .* found 2.0"),
        ({"target_layer_ids": [-2, 2]}, "target_layer_ids .* at least -1, found -2"),
        ({"target_layer_ids": [2, 0]}, r"strictly increasing, found \[2, 0\]"),
        ({"target_layer_ids": [1, 1]}, r"strictly increasing, found \[1, 1\]"),
        (
            {"target_layer_ids": [0, 4]},
            "contains 4, but a target of 4 layers has layers 0 to 3.*subtract 1",
        ),
        ({"markov_rank": -1}, "markov_rank must be an integer of at least 0, found -1"),
        ({"markov_rank": 0}, "markov_head_type='vanilla' and markov_rank=0 contradict"),
        ({"markov_head_type": None}, "markov_head_type=None and markov_rank=8 contradict"),
        ({"markov_head_type": "ngram"}, "'ngram'; known types are 'vanilla', 'gated', 'rnn'"),
        ({"confidence_head": False}, "confidence_head_with_markov is set, .*head=False"),
        (
            {"markov_head_type": None, "markov_rank": 0},
            "confidence_head_with_markov is set, .*markov_head_type=None",
        ),
        ({"final_logit_softcapping": 0.0}, "must be positive or None, found 0.0"),
        ({"final_logit_softcapping": -30.0}, "must be positive or None, found -30.0"),
        ({"backbone_config": {"model_type": "llama"}}, "'llama'; draft layers .*'gemma4_text'"),
        ({"backbone_config": {}}, "model_type is None; draft layers"),
    ],
)
def test_a_value_out_of_range_is_refused(changes, message):
    """B068, B070, B083, B089: the message has the field, what was found and what fits."""
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**facts(**changes))


def test_a_backbone_object_of_another_family_is_refused():
    """B074."""
    backbone = AutoConfig.for_model("llama")
    with pytest.raises(ValueError, match="model_type is 'llama'; draft layers can be built for"):
        DSparkConfig(**facts(backbone_config=backbone))


def test_taps_reach_from_the_embedding_to_the_last_layer():
    """B067, B068: -1 is the input of the first layer; the last layer's raw output can be read."""
    assert DSparkConfig(**facts(target_layer_ids=[-1, 3])).target_layer_ids == [-1, 3]


def test_the_block_is_one_slot_wider_where_the_anchor_does_not_predict():
    """B071, B073."""
    assert DSparkConfig(**facts()).block_width == 4
    assert DSparkConfig(**facts(anchor_predicts=False)).block_width == 5


def test_a_config_without_a_drafter_can_be_built():
    """The host does so to find the defaults."""
    assert DSparkConfig().backbone_config is None


@pytest.mark.parametrize("anchor_predicts", [True, False])
@pytest.mark.parametrize("name", [VANILLA, RNN, DFLASH, GEMMA4])
def test_every_fact_survives_saving(tmp_path, name, anchor_predicts):
    """B071, B074, B097: one layout is written, and it has everything."""
    raw = read_json(GOLDEN / name / "config.json")
    config = normalise(raw, "deepspec", name, ["confidence_head.proj.bias"])
    config.anchor_predicts = anchor_predicts
    config.save_pretrained(tmp_path)
    for loaded in (DSparkConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DSparkConfig
        loaded.name_or_path = ""
        assert loaded.to_dict() == config.to_dict()
        assert type(loaded.backbone_config) is type(config.backbone_config)
        assert loaded.block_width == raw["block_size"] + (not anchor_predicts)


def test_the_callers_backbone_is_kept_as_given():
    """B034: an object handed in is used; a dictionary handed in stays as it was."""
    fields = facts()
    before = dict(fields["backbone_config"])
    DSparkConfig(**fields)
    assert fields["backbone_config"] == before
    backbone = Qwen3Config(**{key: value for key, value in before.items() if key != "model_type"})
    assert DSparkConfig(**facts(backbone_config=backbone)).backbone_config is backbone


# -- published sizes, on the meta device -----------------------------------------------------------


def qwen3(hidden, ffn, heads, layers, taps, **changes):
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 7,
        "bos_token_id": 151643,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "layer_types": ["full_attention"] * 5,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 151669,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_anchors": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": taps,
        "tie_word_embeddings": False,
        "transformers_version": "5.10.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **changes,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def qwen3_4b(**changes):
    return qwen3(2560, 9728, 32, 36, [1, 9, 17, 25, 33], **changes)


DFLASH_CHANGES = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "markov_head_type": ...,
    "confidence_head_with_markov": ...,
}
GEMMA4_12B = {
    "architectures": ["Gemma4DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "block_size": 7,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 4,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_unified_text",
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 48,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "tie_word_embeddings": False,
    "vocab_size": 262144,
}
BIG = ("embed_tokens.weight", "lm_head.weight")
PUBLISHED = {
    "qwen3_4b": (qwen3_4b(), 64, 1_393_133_569, 615_221_249),
    "qwen3_4b_gated": (qwen3_4b(markov_head_type="gated"), 66, 1_393_854_721, 615_942_401),
    "qwen3_4b_rnn": (qwen3_4b(markov_head_type="rnn"), 66, 1_395_493_633, 617_581_313),
    "qwen3_8b": (
        qwen3(4096, 12288, 32, 36, [1, 9, 17, 25, 33]),
        64,
        2_371_081_729,
        1_126_422_017,
    ),
    "qwen3_14b": (
        qwen3(5120, 17408, 40, 40, [1, 10, 19, 28, 37]),
        64,
        3_416_263_169,
        1_860_438_529,
    ),
    "dflash_qwen3_4b": (qwen3_4b(**DFLASH_CHANGES), 60, 1_315_339_520, 537_427_200),
    "gemma4_12b": (GEMMA4_12B, 74, 3_430_444_550, 1_417_178_630),
}


def built(raw, stored):
    names = ["confidence_head.proj.bias", *(BIG if stored else ())]
    dialect = detect_dialect(raw, "published", names)
    with torch.device("meta"):
        return DSparkDrafter(normalise(raw, dialect, "published", names)).state_dict()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters_have_their_tensors(name):
    """B075, B084, B147: counts and elements, with and without embedding and head."""
    raw, count, elements, elements_without = PUBLISHED[name]
    tensors = built(raw, stored=True)
    assert len(tensors) == count
    assert sum(tensor.numel() for tensor in tensors.values()) == elements
    bare = built(raw, stored=False)
    assert set(tensors) - set(bare) == set(BIG)
    assert sum(tensor.numel() for tensor in bare.values()) == elements_without
    expected_bytes = {"qwen3_4b": 2.79e9, "qwen3_8b": 4.74e9}.get(name)
    if expected_bytes:
        assert abs(2 * elements - expected_bytes) < 0.01e9


def test_published_shapes():
    """B086, B087: head widths are stated, not derived from the hidden size."""
    tensors = built(PUBLISHED["qwen3_4b"][0], stored=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["layers.4.self_attn.k_norm.weight"] == (128,)
    assert shapes["fc.weight"] == (2560, 5 * 2560)
    assert shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 2816)
    tensors = built(GEMMA4_12B, stored=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (8192, 3840)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (512, 3840)
    assert shapes["layers.0.self_attn.k_norm.weight"] == (512,)
    assert shapes["layers.0.layer_scalar"] == (1,)
    assert shapes["fc.weight"] == (3840, 19200)
    assert shapes["confidence_head.proj.weight"] == (1, 4096)
    assert "layers.0.self_attn.v_proj.weight" not in shapes


def test_gemma_drafters_without_shared_key_values_have_both():
    """Where `attention_k_eq_v` is false, values have a projection and the heads are the local."""
    tensors = built({**GEMMA4_12B, "attention_k_eq_v": False}, stored=False)
    assert tensors["layers.0.self_attn.v_proj.weight"].shape == (8 * 512, 3840)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (8 * 512, 3840)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_both_names_of_gemma_text_configs_are_read(model_type):
    """B074."""
    assert len(built({**GEMMA4_12B, "model_type": model_type}, stored=True)) == 74


def test_the_targets_layer_pattern_is_no_fact_about_the_drafter():
    """B089, B112: Gemma 4 draft layers are full-attention layers whatever the copied list says."""
    pattern = ["sliding_attention"] * 4 + ["full_attention"]
    raw = {**GEMMA4_12B, "layer_types": pattern}
    config = normalise(raw, "deepspec", "published", [])
    assert set(config.backbone_config.layer_types) == {"full_attention"}
