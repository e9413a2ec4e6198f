"""`DSparkConfig`: trained facts are checked, and published sizes come out of published configs."""

import copy

import pytest
import torch
from transformers import AutoConfig

from checkpoints import DFLASH, GEMMA4, GOLDEN, RNN, VANILLA, read_json
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.loading.detection import DEEPSPEC
from dspark_hf.loading.dialects import read_dialect
from tiny import make_drafter

REQUIRED = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_hidden_size",
    "vocab_size",
)
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def fields(**changes):
    """A drafter's config with some fields changed, nested ones by a dotted path."""
    raw = make_drafter().config.to_dict()
    for path, value in changes.items():
        *outer, key = path.split(".")
        section = raw
        for name in outer:
            section = section[name]
        section[key] = value
    return raw


@pytest.mark.parametrize("name", REQUIRED)
def test_trained_facts_have_no_default(name):
    """B069, B083."""
    with pytest.raises(ValueError, match=f"needs `{name}`.*cannot be guessed"):
        DSparkConfig(**fields(**{name: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, found 0"),
        ({"block_size": 2.5}, "block_size .* found 2.5"),
        ({"block_size": 10**9}, "block_size is 1000000000; .* at most 1024 tokens per round"),
        ({"num_target_layers": -4}, "num_target_layers .* found -4"),
        ({"target_hidden_size": "32"}, "target_hidden_size .* found '32'"),
        ({"vocab_size": 0}, "vocab_size .* found 0"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, found -1"),
        ({"target_layer_ids": []}, r"non-empty list of layer numbers, found \[\]"),
        ({"target_layer_ids": 3}, "non-empty list of layer numbers, found 3"),
        ({"target_layer_ids": [-2, 2]}, "target_layer_ids .* at least -1, found -2"),
        ({"target_layer_ids": [2, 0]}, r"strictly increasing, found \[2, 0\]"),
        ({"target_layer_ids": [1, 1]}, r"strictly increasing, found \[1, 1\]"),
        ({"markov_rank": -1}, "markov_rank must be an integer of at least 0, found -1"),
        ({"confidence_head": False}, "confidence_head_with_markov is set, .*head=False"),
        ({"final_logit_softcapping": -30.0}, "must be positive or None, found -30.0"),
        ({"final_logit_softcapping": float("inf")}, "must be positive or None, found inf"),
        ({"anchor_predicts": "false"}, "anchor_predicts must be true or false, found 'false'"),
        ({"stores_input_embeddings": 1}, "stores_input_embeddings must be true or false, found 1"),
        (
            {"backbone_config.rope_parameters": {**PLAIN, "rope_theta": -1.0}},
            "rope_theta must be a positive number, found -1.0",
        ),
        (
            {"backbone_config.rope_parameters": {**PLAIN, "rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic', whose frequencies depend on the length",
        ),
        (
            {"backbone_config.layer_types": ["chunked_attention"] * 2},
            r"layer_types has \['chunked_attention'\]; draft layers are full_attention or",
        ),
        ({"backbone_config": {}}, "model_type is None; draft layers can be built for"),
        ({"backbone_config": AutoConfig.for_model("llama")}, "model_type is 'llama'; draft"),
        ({"markov_head_type": "cond"}, "markov_head_type is 'cond'"),
        ({"markov_rank": 0}, "contradict each other"),
        ({"markov_head_type": None}, "contradict each other"),
        (
            {"markov_head_type": None, "markov_rank": 0},
            "confidence_head_with_markov is set, but",
        ),
        ({"final_logit_softcapping": 0.0}, "must be positive or None, found 0.0"),
        ({"target_layer_ids": [0, 4]}, "subtract 1 from each"),
        ({"target_layer_ids": [0, True]}, "target_layer_ids must be an integer"),
        ({"mask_token_id": 97}, "mask_token_id is 97, but the embedding has 97 rows"),
        ({"backbone_config": {"model_type": "llama"}}, "model_type is 'llama'"),
    ],
)
def test_contradictions_are_refused(changes, message):
    """B068, B070, B083, B089: the field, what was found and what fits."""
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**fields(**changes))


def test_dict_round_trip():
    """B097."""
    config = make_drafter().config
    again = DSparkConfig.from_dict(copy.deepcopy(config.to_dict()))
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("anchor_predicts", [True, False])
@pytest.mark.parametrize("name", [VANILLA, RNN, DFLASH, GEMMA4])
def test_every_fact_survives_saving(tmp_path, name, anchor_predicts):
    """B071, B074, B097: one layout is written, and it has everything; the layout flag too."""
    raw = read_json(GOLDEN / name / "config.json")
    config = read_dialect(raw, DEEPSPEC, name, dict.fromkeys(["confidence_head.proj.bias"])).config
    config.anchor_predicts = anchor_predicts
    config.save_pretrained(tmp_path)
    for loaded in (DSparkConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DSparkConfig
        loaded.name_or_path = ""
        assert loaded.to_dict() == config.to_dict()
        assert type(loaded.backbone_config) is type(config.backbone_config)
        assert loaded.block_width == raw["block_size"] + (not anchor_predicts)


def test_taps_reach_from_the_embedding_to_the_last_layer():
    """B067, B068: -1 is the input of the first layer; the last layer's raw output can be read."""
    assert DSparkConfig(**fields(target_layer_ids=[-1, 3])).target_layer_ids == [-1, 3]


def test_the_callers_backbone_is_kept_as_given():
    """B034: a dictionary handed in stays as it was, an object handed in is used."""
    given = fields()
    before = copy.deepcopy(given["backbone_config"])
    backbone = DSparkConfig(**given).backbone_config
    assert given["backbone_config"] == before
    assert DSparkConfig(**fields(backbone_config=backbone)).backbone_config is backbone


def published(name, **sizes):
    """A config.json with the published sizes, built on the golden one of the same layout."""
    return {**read_json(GOLDEN / name / "config.json"), **sizes}


QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 5,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention"] * 5,
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "block_size": 7,
    "mask_token_id": 151669,
    "markov_rank": 256,
}
QWEN3_4B = {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728}
QWEN3_8B = {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288}
QWEN3_14B = {
    **QWEN3,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_target_layers": 40,
    "target_layer_ids": [1, 10, 19, 28, 37],
}
HEADLESS = {"markov_rank": 0, "enable_confidence_head": False}
DFLASH_4B = {**QWEN3_4B, **HEADLESS}
GEMMA4_12B = {
    "vocab_size": 262144,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_target_layers": 48,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "block_size": 7,
    "mask_token_id": 4,
    "markov_rank": 256,
}


@pytest.mark.parametrize(
    ("name", "sizes", "tensors", "elements", "without_embedding_and_head"),
    [
        (VANILLA, QWEN3_4B, 64, 1_393_133_569, 615_221_249),
        (VANILLA, {**QWEN3_4B, "markov_head_type": "gated"}, 66, 1_393_854_721, None),
        (VANILLA, {**QWEN3_4B, "markov_head_type": "rnn"}, 66, 1_395_493_633, None),
        (VANILLA, QWEN3_8B, 64, 2_371_081_729, 1_126_422_017),
        (VANILLA, QWEN3_14B, 64, 3_416_263_169, 1_860_438_529),
        (VANILLA, DFLASH_4B, 60, 1_315_339_520, 537_427_200),
        (VANILLA, {**QWEN3_8B, **HEADLESS}, 60, 2_293_286_144, 1_048_626_432),
        (VANILLA, {**QWEN3_14B, **HEADLESS}, 60, 3_338_466_560, 1_782_641_920),
        (GEMMA4, GEMMA4_12B, 74, 3_430_444_550, 1_417_178_630),
        (GEMMA4, {**GEMMA4_12B, **HEADLESS}, 70, 3_296_222_725, 1_282_956_805),
    ],
    ids=["4B", "4B-gated", "4B-rnn", "8B", "14B"]
    + [f"{size}-dflash" for size in ("4B", "8B", "14B")]
    + ["gemma4-12B", "gemma4-12B-dflash"],
)
def test_published_sizes(name, sizes, tensors, elements, without_embedding_and_head):
    """B075, B147: tensor count and element totals of the released drafters, on the meta device."""
    stored = ("embed_tokens.weight", "lm_head.weight", "confidence_head.proj.bias")
    known = dict.fromkeys(stored)
    config = read_dialect(published(name, **sizes), DEEPSPEC, "published", known).config
    with torch.device("meta"):
        state = DSparkDrafter(config).state_dict()
    assert len(state) == tensors
    assert sum(tensor.numel() for tensor in state.values()) == elements
    if without_embedding_and_head:
        shared = ("embed_tokens.weight", "lm_head.weight")
        own = sum(t.numel() for key, t in state.items() if key not in shared)
        assert own == without_embedding_and_head


def gemma4_on_meta(**changes):
    raw = published(GEMMA4, **{**GEMMA4_12B, **changes})
    with torch.device("meta"):
        return DSparkDrafter(read_dialect(raw, DEEPSPEC, "published", {}).config).state_dict()


def test_published_head_widths_are_stated_not_derived():
    """B086, B087: 32 heads of 128 on a width of 2560; 16 global heads of 512 on 3840."""
    config = read_dialect(published(VANILLA, **QWEN3_4B), DEEPSPEC, "published", {}).config
    with torch.device("meta"):
        state = DSparkDrafter(config).state_dict()
    assert state["layers.0.self_attn.q_proj.weight"].shape == (4096, 2560)
    assert state["fc.weight"].shape == (2560, 5 * 2560)
    assert state["confidence_head.proj.weight"].shape == (1, 2816)
    state = gemma4_on_meta()
    assert state["layers.0.self_attn.q_proj.weight"].shape == (8192, 3840)
    assert state["layers.0.self_attn.k_proj.weight"].shape == (512, 3840)
    assert state["layers.0.self_attn.k_norm.weight"].shape == (512,)
    assert "layers.0.self_attn.v_proj.weight" not in state


def test_gemma_drafters_without_shared_key_values_have_both():
    """B086: a value projection, and the local number of heads."""
    state = gemma4_on_meta(attention_k_eq_v=False)
    assert state["layers.0.self_attn.v_proj.weight"].shape == (8 * 512, 3840)
    assert state["layers.0.self_attn.k_proj.weight"].shape == (8 * 512, 3840)


def test_both_names_of_gemma_text_configs_are_read():
    """B074."""
    assert gemma4_on_meta(model_type="gemma4_unified_text").keys() == gemma4_on_meta().keys()


def test_the_targets_layer_pattern_is_no_fact_about_the_drafter():
    """B089, B112: Gemma 4 draft layers are full-attention layers whatever the copied list says."""
    pattern = ["sliding_attention"] * 4 + ["full_attention"]
    raw = published(GEMMA4, **GEMMA4_12B, layer_types=pattern)
    config = read_dialect(raw, DEEPSPEC, "published", {}).config
    assert config.backbone_config.layer_types == ["full_attention"] * 5
