"""
Eagle3 drafters compute what the speculators package (0.9.0) computed from the same files, in that
layout and in those of SafeAILab, SpecForge and ModelOpt.

`expected.safetensors` holds four tokens that the package's unrolled forward drafted greedily behind
an anchor, with their logits.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from checkpoints import copy_folder, edit_config, read_json
from dspark_hf import DSparkDrafter, Eagle3Drafter, UnsupportedCheckpointError
from dspark_hf.loading.description import describe
from tiny import make_target

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden_speculators"
LLAMA, QWEN3, PER_TAP = "eagle3_llama_reduced", "eagle3_qwen3_full", "eagle3_llama_fc_norm"
NAMES = (LLAMA, QWEN3, PER_TAP)
TOLERANCE, CLEARLY = 2e-5, 1e-3


def expected_of(name):
    return load_file(GOLDEN / name / "expected.safetensors")


def draft(drafter, record):
    """Four tokens behind the last context row, the context given in two parts."""
    if drafter.embed_tokens is None:
        embedding = nn.Embedding.from_pretrained(record["embed_tokens.weight"])
        drafter.bind(input_embeddings=embedding)
    context = drafter.new_context(1)
    for part in (slice(0, 6), slice(6, None)):
        drafter.extend(context, record["features"][:, part], record["token_ids"][:, part])
    return drafter.draft(context, record["token_ids"][:, -1])


def difference(drafter, record):
    block = draft(drafter, record)
    return (block.base_logits[0, :4] - record["logits"]).abs().max().item()


def chain_file(folder, name, **changes):
    """The same weights as the original trainers name them, with a flat Llama config."""
    tensors = load_file(GOLDEN / name / "model.safetensors")
    tensors.pop("embed_tokens.weight")
    renamed = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    body = read_json(GOLDEN / name / "config.json")["transformer_layer_config"]
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    raw = {key: body[key] for key in (*keys, "rms_norm_eps", "vocab_size", "head_dim")}
    raw |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 23,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
    }
    (folder / "config.json").write_text("{}", encoding="utf-8")
    edit_config(folder, **{**raw, **changes})
    return folder


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_every_token_equals_the_package(name, attention):
    """T2, T16, T22: norms in three places, reduced vocabularies, Llama and Qwen3 layers."""
    record = expected_of(name)
    loaded, info = Eagle3Drafter.from_pretrained(
        GOLDEN / name, output_loading_info=True, attn_implementation=attention
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(draft(loaded, record).tokens[0], record["tokens"])
    assert difference(loaded, record) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (LLAMA, {"norm_before_residual": False}),
        (QWEN3, {"norm_output": False}),
        (PER_TAP, {"norm_before_residual": True}),
        (LLAMA, {"transformer_layer_config.rope_parameters": {"rope_theta": 50.0}}),
    ],
)
def test_the_facts_that_make_the_difference(tmp_path, name, change):
    """Negative controls."""
    folder, record = copy_folder(GOLDEN / name, tmp_path), expected_of(name)
    edit_config(folder, **change)
    assert difference(Eagle3Drafter.from_pretrained(folder), record) > CLEARLY


@pytest.mark.parametrize("name", [LLAMA, PER_TAP])
def test_files_of_the_original_trainers(tmp_path, name):
    """The same drafter as `midlayer.*` with a flat config drafts the same tokens."""
    record = expected_of(name)
    original = Eagle3Drafter.from_pretrained(GOLDEN / name)
    loaded, info = Eagle3Drafter.from_pretrained(
        chain_file(tmp_path, name), output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.block_size == 7
    # These trainers keep the residual un-normed.
    original.config.norm_before_residual = False
    for layer in original.layers:
        layer.norm_before_residual = False
    expected = draft(original, record)
    found = draft(loaded, record)
    torch.testing.assert_close(
        found.base_logits[:, :4], expected.base_logits[:, :4], rtol=0, atol=TOLERANCE
    )
    if name == PER_TAP:
        assert torch.equal(found.tokens[0, :4], record["tokens"])


def test_taps_by_the_references_rule_need_the_depth(tmp_path):
    """B069: SafeAILab's files do not say how deep the target is, and it is not guessed."""
    folder = chain_file(
        tmp_path, LLAMA, architectures=["LlamaForCausalLM"], eagle_config=..., head_dim=...
    )
    with pytest.raises(ValueError, match=r"does not give L\. Pass num_target_layers="):
        Eagle3Drafter.from_pretrained(folder)
    config = Eagle3Drafter.from_pretrained(folder, num_target_layers=32).config
    # Inputs of layers 2, 16 and 29 are outputs of 1, 15 and 28; the heads divide the width.
    assert config.backbone_config.head_dim == 8
    assert config.target_layer_ids == [1, 15, 28]
    assert config.backbone_config.rope_parameters["rope_theta"] == 10_000
    facts = describe(str(folder), num_target_layers=32)
    assert (facts["dialect"], facts["target_layer_ids"]) == ("eagle3", [1, 15, 28])
    with pytest.raises(ValueError, match=r"drafter .LlamaForCausalLM with draft_vocab_size"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_the_packages_own_converter_leaves_the_taps_to_the_rule(tmp_path):
    """T2: hidden states 2, L / 2 and L - 3."""
    folder = copy_folder(GOLDEN / LLAMA, tmp_path)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=None)
    told = Eagle3Drafter.from_pretrained(folder, num_target_layers=36)
    assert told.config.target_layer_ids == [1, 17, 32]
    assert told.config.num_target_layers == 36
    assert difference(told, expected_of(LLAMA)) < TOLERANCE


@pytest.mark.parametrize(
    ("flat", "nested", "taps"),
    [([2, 4, 7], ..., [1, 3, 6]), ([2, 4, 7], [1, 3, 6], [1, 3, 6]), ([1, 3, 6], [1, 3, 6], None)],
)
def test_the_two_places_of_tap_ids_count_differently(tmp_path, flat, nested, taps):
    """T2: hidden states at the top level, as engines count, layer outputs in `eagle_config`."""
    section = {} if nested is ... else {"eagle_aux_hidden_state_layer_ids": nested}
    folder = chain_file(
        tmp_path,
        LLAMA,
        eagle_config=section,
        eagle_aux_hidden_state_layer_ids=flat,
        num_target_layers=36,
    )
    if taps is None:
        with pytest.raises(ValueError, match="counts hidden states and should be one more each"):
            Eagle3Drafter.from_pretrained(folder)
    else:
        assert Eagle3Drafter.from_pretrained(folder).config.target_layer_ids == taps


def test_tap_ids_that_may_count_hidden_states_are_said(tmp_path):
    """T2: a list that begins with 2, as engines' own default does."""
    for ids, said in (([1, 3, 6], False), ([2, 4, 7], True)):
        section = {"eagle_aux_hidden_state_layer_ids": ids}
        facts = describe(str(chain_file(tmp_path, LLAMA, eagle_config=section)))
        assert facts["target_layer_ids"] == ids
        assert bool(facts["warnings"]) == said


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"use_aux_hidden_state": False}, "last hidden state alone"),
        ({"parallel_draft_step": 4}, r"eagle_config\.parallel_draft_step 4, which is not read"),
        ({"use_last_layernorm": False}, r"eagle_config\.use_last_layernorm false, which is not"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, -2]}, "count the target's layers from 0"),
        ({"norm_before_fc": True}, "norm_before_fc = True, and the weights lack"),
        ({"norm_before_residual": "no"}, r"eagle_config\.norm_before_residual = 'no', and it can"),
    ],
)
def test_what_eagle_config_says_is_not_passed_over(tmp_path, section, message):
    """T2, T22."""
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    folder = chain_file(tmp_path, LLAMA, eagle_config={**taps, **section})
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.from_pretrained(folder)


def test_keys_of_a_chain_file_that_do_not_count_are_said(tmp_path):
    """T2, T13: a copied target's layers, a key that nobody knows; tap ids in DeepSpec's place."""
    taps = {"eagle_config": {"unheard": 1}, "target_layer_ids": [1, 3, 6]}
    copied = {"num_hidden_layers": 36, "layer_types": ["sliding_attention"] * 36}
    window = {"sliding_window": 4, "use_sliding_window": True}
    facts = describe(str(chain_file(tmp_path, LLAMA, **taps, **copied, **window)))
    assert facts["target_layer_ids"] == [1, 3, 6]
    assert "eagle_config.unheard" in facts["ignored_config_keys"]
    depth, kinds = facts["warnings"]
    assert "num_hidden_layers is 36" in depth
    assert "attends to all positions" in kinds
    with pytest.raises(ValueError, match=r"target_layer_ids = \[1, 3, 5\]"):
        describe(str(chain_file(tmp_path, LLAMA, target_layer_ids=[1, 3, 5])))


@pytest.mark.parametrize("name", NAMES)
def test_it_saves_as_ours_and_comes_back(tmp_path, name):
    record = expected_of(name)
    loaded = Eagle3Drafter.from_pretrained(GOLDEN / name)
    loaded.save_pretrained(tmp_path)
    again = Eagle3Drafter.from_pretrained(tmp_path)
    assert read_json(tmp_path / "config.json")["model_type"] == "dspark_eagle3"
    assert torch.equal(draft(again, record).base_logits, draft(loaded, record).base_logits)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_is_exact(name):
    """Lossless in float32."""
    target = make_target(vocab_size=61, num_hidden_layers=8)
    prompt = torch.tensor([[3, 5, 4, 6, 11]])
    expected = target.generate(prompt, max_new_tokens=16, do_sample=False)
    drafter = Eagle3Drafter.from_pretrained(GOLDEN / name)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=16, do_sample=False)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"speculators_config": {}}, "how many tokens are proposed"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"does not give L\. Pass num_target_layers="),
        ({"transformer_layer_config.rope_is_neox_style": False}, "Qwen3 draft layers only, not of"),
        ({"transformer_layer_config.num_hidden_layers": 2}, "weights hold 1 draft layers"),
    ],
)
def test_what_is_refused(tmp_path, change, message):
    folder = copy_folder(GOLDEN / LLAMA, tmp_path)
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.from_pretrained(folder)


def test_an_absent_residual_flag_is_said(tmp_path):
    """T22: the class of the package, its trainer and vLLM disagree about it."""
    folder = copy_folder(GOLDEN / LLAMA, tmp_path)
    edit_config(folder, norm_before_residual=...)
    facts = describe(str(folder))
    assert "norm_before_residual is absent" in facts["warnings"][0]
    assert difference(Eagle3Drafter.from_pretrained(folder), expected_of(LLAMA)) < TOLERANCE


def test_the_other_class_names_the_right_one(tmp_path):
    for folder in (GOLDEN / LLAMA, chain_file(tmp_path, LLAMA)):
        with pytest.raises(UnsupportedCheckpointError, match=r"Load it with dspark_hf\.Eagle3"):
            DSparkDrafter.from_pretrained(folder)
    with pytest.raises(ValueError, match="no blocks; leave block_layout out"):
        Eagle3Drafter.from_pretrained(GOLDEN / LLAMA, block_layout="infill")
