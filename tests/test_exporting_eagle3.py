"""Eagle3 drafters in the layouts of others: what is written comes back, number by number."""

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pipelines import base

from checkpoints import (
    EAGLE3,
    GOLDEN,
    check_written_again,
    edit_config,
    edit_tensors,
    read_json,
    same_weights,
)
from dspark_hf import Eagle3Config, Eagle3Drafter, export_drafter
from dspark_hf.exporting.cards import serve_commands
from dspark_hf.loading.description import describe
from tiny import HIDDEN, VOCAB, make_drafter, make_eagle3, make_prompt, make_target

SPECULATORS = GOLDEN.parent / "golden_speculators"
LLAMA, QWEN3, PER_TAP = "eagle3_llama_reduced", "eagle3_qwen3_full", "eagle3_llama_fc_norm"
NAME = "somebody/target"


def make_llama(**options):
    """A drafter with the layer of the original EAGLE-3, none of whose norms does nothing."""
    body = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    fields = make_eagle3(**options).config.to_dict()
    drafter = Eagle3Drafter(Eagle3Config(**{**fields, "backbone_config": body})).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    if drafter.config.draft_vocab_size is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
        drafter.draft_to_target.copy_(ids[: len(drafter.draft_to_target)])
    return drafter


def logits_of(drafter, target=None):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 9, drafter.fc.in_features, generator=generator)
    ids = torch.randint(VOCAB, (1, 9), generator=generator)
    context = drafter.new_context(1, target=target)
    drafter.extend(context, features, ids)
    return drafter.draft(context, ids[:, -1]).logits


def facts_of(config):
    """Every trained fact; where a file came from is none, nor a list that every layer fills."""
    raw = config.to_dict()
    for place in (raw, raw["backbone_config"]):
        for key in (
            "_name_or_path",
            "architectures",
            "dtype",
            "initializer_range",
            "transformers_version",
        ):
            place.pop(key, None)
    raw["backbone_config"].pop("layer_types", None)
    return raw


@pytest.mark.parametrize("name", [LLAMA, QWEN3, PER_TAP])
def test_speculators_round_trip(tmp_path, name):
    """Files of the package itself, read, written and read again: tensors, keys and facts."""
    drafter = Eagle3Drafter.from_pretrained(SPECULATORS / name)
    export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    check_written_again(tmp_path, SPECULATORS / name, NAME)
    assert facts_of(Eagle3Drafter.from_pretrained(tmp_path).config) == facts_of(drafter.config)
    assert describe(str(tmp_path))["warnings"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"draft_vocab_size": 40, "feature_norm": "per_tap"},
        {"recycles_normed_output": True, "block_size": 5},
    ],
    ids=str,
)
def test_the_original_layout_round_trip(tmp_path, options):
    """`midlayer.*`, tap ids of layer outputs, offsets; γ and the target's depth travel too."""
    drafter = make_llama(**options)
    export_drafter(drafter, tmp_path, "eagle3", target_name=NAME)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {name for name in names if name.startswith("layers.")} == set()
    assert "midlayer.self_attn.q_proj.weight" in names
    assert {"d2t", "t2d"} & names == ({"d2t", "t2d"} if drafter.config.draft_vocab_size else set())
    raw = read_json(tmp_path / "config.json")
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (raw["rope_theta"], raw["rope_scaling"]) == (5e4, None)
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert describe(str(tmp_path))["dialect"] == "eagle3"
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    assert facts_of(loaded.config) == facts_of(drafter.config)
    torch.testing.assert_close(logits_of(loaded), logits_of(drafter), rtol=0, atol=2e-5)


def test_deepspec_round_trip(tmp_path):
    """The published file again."""
    drafter = Eagle3Drafter.from_pretrained(GOLDEN / EAGLE3)
    export_drafter(drafter, tmp_path, "deepspec", target_name=NAME)
    again = Eagle3Drafter.from_pretrained(tmp_path)
    assert same_weights(again, drafter)
    assert facts_of(again.config) == facts_of(drafter.config)
    found, expected = describe(str(tmp_path)), describe(str(GOLDEN / EAGLE3))
    assert found["origins"] == expected["origins"]
    stored, published = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, GOLDEN / EAGLE3)
    )
    assert stored.keys() == published.keys()


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_matrices_that_the_target_lends(tmp_path, layout):
    """Copies of them, or a file without, for engines that lend them; one drafter both ways."""
    target = make_target()
    drafter = make_llama(stored=False)
    expected = logits_of(drafter, target)
    for folder, lender in ((tmp_path / "full", target), (tmp_path / "bare", None)):
        export_drafter(drafter, folder, layout, target=lender, target_name=NAME)
        loaded = Eagle3Drafter.from_pretrained(folder)
        assert (loaded.lm_head is None) == (loaded.embed_tokens is None) == (lender is None)
        found = logits_of(loaded, target)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    output = target.generate(
        make_prompt(), assistant_model=loaded, max_new_tokens=12, do_sample=False
    )
    plain = target.generate(make_prompt(), max_new_tokens=12, do_sample=False)
    assert torch.equal(output, plain)


@pytest.mark.parametrize(
    ("layout", "make", "options", "message"),
    [
        ("eagle3", make_eagle3, {}, r"a qwen3 layer \(the layer of this layout is Llama's"),
        ("eagle3", make_llama, {"taps": (0, 1)}, r"2 taps \(the layout has 3\)"),
        ("eagle3", make_llama, {"feature_norm": "joint"}, "one norm over all taps"),
        ("eagle3", make_llama, {"norm_before_residual": True}, "starts from the normed state"),
        ("speculators", make_llama, {"target_hidden_size": 48}, "features of another width"),
        ("deepspec", make_llama, {}, r"llama layers .*3 taps \(DeepSpec's Eagle3 has 5\)"),
        ("deepspec", make_eagle3, {"draft_vocab_size": 40}, "a reduced draft vocabulary"),
        ("deepspec", make_eagle3, {"recycles_normed_output": True}, "output that is recycled"),
        ("deepspec", make_eagle3, {"taps": (-1, 0, 1, 2, 3)}, "a tap of the embedding"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path, layout, make, options, message):
    """Nothing is dropped: the reason is named and no file is left."""
    with pytest.raises(ValueError, match=f"(?i)cannot be written in the {layout}.*{message}"):
        export_drafter(make(**options), tmp_path / "out", layout, target_name=NAME)
    assert not (tmp_path / "out").exists()


def test_a_map_of_the_full_vocabulary(tmp_path):
    """T16: SpecForge stores one beside every drafter; it may not move a token."""
    drafter = make_llama()
    export_drafter(drafter, tmp_path, "eagle3")
    offsets = torch.zeros(VOCAB, dtype=torch.long)
    edit_tensors(tmp_path, d2t=offsets, t2d=torch.ones(VOCAB, dtype=torch.bool))
    loaded, info = Eagle3Drafter.from_pretrained(tmp_path, output_loading_info=True)
    assert loaded.config.draft_vocab_size is None
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits_of(loaded), logits_of(drafter), rtol=0, atol=2e-5)
    offsets[3] = 1
    edit_tensors(tmp_path, d2t=offsets)
    with pytest.raises(ValueError, match="every token can be drafted, and d2t moves 1 of them"):
        Eagle3Drafter.from_pretrained(tmp_path)
    edit_tensors(tmp_path, drop=("d2t",))
    assert Eagle3Drafter.from_pretrained(tmp_path).config.draft_vocab_size is None


def test_only_eagle3_drafters_have_its_layout(tmp_path):
    with pytest.raises(ValueError, match="eagle3 layout is for Eagle3 drafters; a DSparkDrafter"):
        export_drafter(make_drafter(), tmp_path / "out", "eagle3")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is not a drafter"):
        export_drafter(make_target(), tmp_path / "out", "speculators")


def test_card_and_commands(tmp_path):
    """One chain in SGLang; vLLM counts the ids of that layout otherwise and gets speculators."""
    config = make_llama().config
    speculative = '{"method": "eagle3", "model": "o/d", "num_speculative_tokens": 4}'
    assert serve_commands(config, "speculators", "o/d", "o/t") == [
        "vllm serve o/d",
        f"vllm serve o/t --speculative-config '{speculative}'",
    ]
    assert serve_commands(config, "eagle3", "o/d", "o/t") == [
        "python -m sglang.launch_server --model-path o/t --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path o/d --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    ]
    assert serve_commands(config, "deepspec", "o/d", "o/t") == []
    export_drafter(make_llama(), tmp_path, "eagle3", target_name=NAME)
    card = ModelCard.load(tmp_path / "README.md")
    assert "eagle3" in card.data.tags
    assert "arXiv 2503.01840" in card.text
    assert "mask token" not in card.text
    snippet = card.text.split("```python\n")[1].split("```")[0]
    assert "Eagle3Drafter.from_pretrained" in snippet
    compile(snippet, "card", "exec")


# -- what the original layout says -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "recycles"), [(..., False), (False, False), (True, True)], ids=str
)
def test_norm_output_is_read_as_the_engines_read_it(tmp_path, stated, recycles):
    """T22: SpecForge changed what the key means in its pull request 879, so it is said."""
    export_drafter(make_llama(), tmp_path, "eagle3")
    edit_config(tmp_path, norm_output=stated)
    assert Eagle3Drafter.from_pretrained(tmp_path).config.recycles_normed_output is recycles
    warnings = describe(str(tmp_path))["warnings"]
    assert [f"norm_output is {stated}" in warning for warning in warnings] == (
        [] if stated is ... else [True]
    )


@pytest.mark.parametrize("key", ["fc_norm", "norm_before_fc"])
def test_a_stated_norm_without_its_tensors(tmp_path, key):
    """An engine would leave that norm random."""
    export_drafter(make_llama(), tmp_path, "eagle3")
    edit_config(tmp_path, **{key: True})
    with pytest.raises(ValueError, match=f"{key} = True, and the weights lack the tensors"):
        Eagle3Drafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], ...], ids=["plain", "none"])
def test_a_drafter_under_the_config_of_a_plain_llama(tmp_path, layer, architectures):
    """B075, T19: its tensors tell; every way to it reads it, and no host class takes it."""
    drafter = make_llama(num_target_layers=8, block_size=7)
    target = make_target(num_hidden_layers=8)
    export_drafter(drafter, tmp_path, "eagle3", target=target, target_name=NAME)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", layer): value for name, value in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = ("draft_vocab_size", "eagle_config", "fc_norm", "num_target_layers", "ttt_length")
    dropped = dict.fromkeys((*ours, "target_hidden_size"), ...)
    edit_config(tmp_path, architectures=architectures, **dropped)
    folder = str(tmp_path)
    loaded = Eagle3Drafter.from_pretrained(folder, num_target_layers=8)
    assert loaded.config.target_layer_ids == [1, 3, 4]
    torch.testing.assert_close(logits_of(loaded), logits_of(drafter, target))
    assert describe(folder, num_target_layers=8)["dialect"] == "eagle3"
    assert type(base.load_assistant_model(target, folder, None)[0]) is Eagle3Drafter
    for loader in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises(ValueError, match=r"is a drafter \(its weights.*Eagle3Drafter\.from"):
            loader.from_pretrained(folder)
