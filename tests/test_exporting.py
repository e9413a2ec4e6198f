"""Writing the layouts that other engines serve: what is written comes back, number by number."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GEMMA4, GOLDEN, LAYOUTS, VANILLA, check_written_again, read_json
from dspark_hf import DSparkDrafter, export_drafter
from dspark_hf.loading.description import describe
from published import make_block_drafter
from tiny import HIDDEN, VOCAB, make_drafter, make_prompt, make_target

SPECULATORS = GOLDEN.parent / "golden_speculators"
NAME = "somebody/target"
LAYERS = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")),
}
BODY = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}" for i in range(2) for name in LAYERS
}
HEADS = {
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
}
MATRICES = {"embed_tokens.weight", "lm_head.weight"}


def block_of(drafter, target=None):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 9, drafter.fc.in_features, generator=generator)
    context = drafter.new_context(1, target=target)
    drafter.extend(context, features)
    return drafter.draft(context, torch.tensor([5]))


def facts_of(config):
    """Every trained fact; where a file came from and its class name are none."""
    raw = config.to_dict()
    body = {
        key: value
        for key, value in raw.pop("backbone_config").items()
        if not key.startswith(("_", "transformers", "architectures", "dtype"))
    }
    dropped = ("_name_or_path", "architectures", "transformers_version", "dtype")
    return {**{k: v for k, v in raw.items() if k not in dropped}, "body": body}


# -- DeepSpec --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_deepspec_round_trip(tmp_path, name):
    """The published files again: same tensors, same keys with the same values, same facts."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / name)
    export_drafter(drafter, tmp_path, "deepspec", target_name=NAME)
    published, written = (read_json(folder / "config.json") for folder in (GOLDEN / name, tmp_path))
    stored, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, GOLDEN / name)
    )
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[key], expected[key]) for key in expected)
    facts = describe(str(tmp_path))
    assert (facts["dialect"], facts["warnings"]) == ("deepspec", [])
    again = DSparkDrafter.from_pretrained(tmp_path)
    assert facts_of(again.config) == facts_of(drafter.config)
    read = {
        key: published[key]
        for key in describe(str(GOLDEN / name))["origins"].values()
        if key in published
    }
    if name == GEMMA4:
        # Published files repeat the target's other layer types, which the drafter has not.
        rope = read.pop("rope_parameters")
        assert written["rope_parameters"]["full_attention"] == rope["full_attention"]
    assert {key: written.get(key) for key in read} == read


def test_deepspec_key_list(tmp_path):
    """64 tensors for five layers are 31 for two; a headless drafter has no key of a head."""
    drafter = make_drafter()
    export_drafter(drafter, tmp_path / "dspark", "deepspec")
    assert set(load_file(tmp_path / "dspark" / "model.safetensors")) == BODY | HEADS | MATRICES
    raw = read_json(tmp_path / "dspark" / "config.json")
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert raw["model_type"] == "qwen3"
    assert raw["block_size"] == 4
    headless = make_drafter(markov=None, confidence=False)
    export_drafter(headless, tmp_path / "dflash", "deepspec")
    assert set(load_file(tmp_path / "dflash" / "model.safetensors")) == BODY | MATRICES
    raw = read_json(tmp_path / "dflash" / "config.json")
    assert (raw["markov_rank"], raw["enable_confidence_head"]) == (0, False)
    assert not {"markov_head_type", "confidence_head_with_markov"} & set(raw)


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
@pytest.mark.parametrize("how", ["given", "bound", "absent"])
def test_matrices_that_the_target_lends(tmp_path, layout, how):
    """Copied from a target that is given or bound, else left for the engine to lend."""
    target = make_target(tie_word_embeddings=True)
    drafter = make_drafter(stored=False)
    if how == "bound":
        drafter.bind(target)
    export_drafter(
        drafter, tmp_path, layout, target=target if how == "given" else None, target_name=NAME
    )
    stored = load_file(tmp_path / "model.safetensors")
    assert MATRICES & set(stored) == (set() if how == "absent" else MATRICES)
    if how != "absent":
        for name in MATRICES:
            assert torch.equal(stored[name], target.get_input_embeddings().weight)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    expected = block_of(drafter, target)
    found = block_of(loaded, target if how == "absent" else None)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)


# -- speculators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["dspark_full", "dspark_causal_reduced", "dspark_infill_sliding", "dflash_infill_reduced"],
)
def test_speculators_round_trip(tmp_path, name):
    """Files of the package itself, read, written and read again: tensors and facts are the same."""
    drafter = DSparkDrafter.from_pretrained(SPECULATORS / name)
    export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    check_written_again(tmp_path, SPECULATORS / name, NAME)
    again = DSparkDrafter.from_pretrained(tmp_path)
    assert facts_of(again.config) == facts_of(drafter.config)
    assert describe(str(tmp_path))["warnings"] == []


@pytest.mark.parametrize("options", [{}, {"anchor_predicts": False}, {"markov": "rnn"}])
def test_our_drafters_as_speculators(tmp_path, options):
    """Layer ids plus one, slots instead of draft tokens, the target's depth as an extra key."""
    drafter = make_block_drafter((5, None), causal_layers=[0], **options)
    export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    raw = read_json(tmp_path / "config.json")
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["block_size"] == (5 if options.get("anchor_predicts") is False else 4)
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert raw["sliding_window_non_causal"] is False
    loaded, target = DSparkDrafter.from_pretrained(tmp_path), make_target()
    assert loaded.config.num_target_layers == 4
    found, expected = block_of(loaded, target), block_of(drafter, target)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)


def test_a_reduced_vocabulary_in_any_order(tmp_path):
    """T16: the layout counts offsets over ascending ids, ours may stand in any order."""
    drafter = make_drafter(draft_vocab_size=40)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:40]
    drafter.draft_to_target.copy_(order)
    export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(40), order.sort().values)
    assert torch.equal(stored["t2d"].nonzero().flatten(), order.sort().values)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    found, expected = block_of(loaded), block_of(drafter)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="a reduced draft vocabulary"):
        export_drafter(drafter, tmp_path / "other", "deepspec")


def test_rows_of_a_lent_head(tmp_path):
    """Engines cannot find out which rows a reduced head has."""
    drafter = make_drafter(draft_vocab_size=40, stored=False)
    with pytest.raises(ValueError, match=r"shares the target's head.*pass the target"):
        export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    assert not list(tmp_path.iterdir())
    export_drafter(drafter, tmp_path, "speculators", target=make_target(), target_name=NAME)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (40, HIDDEN)


def test_a_confidence_head_without_bias(tmp_path):
    """These layouts have one; zero adds nothing."""
    drafter = make_drafter(confidence_head_bias=False)
    export_drafter(drafter, tmp_path, "deepspec")
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.confidence_head.proj.bias.tolist() == [0.0]
    found, expected = block_of(loaded), block_of(drafter)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits)


# -- what a layout cannot say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("deepspec", {"anchor_predicts": False}, "an infill block"),
        ("deepspec", {"windows": (5, None)}, "sliding draft layers"),
        ("deepspec", {"causal_layers": [1]}, "causal draft layers"),
        ("deepspec", {"final_logit_softcapping": 5.0}, "soft-cap over Qwen3"),
        ("deepspec", {"num_target_layers": None}, "no record of the target's depth"),
        ("speculators", {"causal_layers": [1]}, "causal layers that are not exactly"),
        (
            "speculators",
            {"windows": (5, None), "sliding_window_per_slot": True},
            "measured from each slot",
        ),
        ("speculators", {"final_logit_softcapping": 5.0}, "a logit soft-cap"),
        ("speculators", {"target_hidden_size": 48}, "features of another width"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path, layout, options, message):
    """Nothing is dropped: the reason is named and no file is left."""
    drafter = make_block_drafter(**options)
    with pytest.raises(ValueError, match=f"(?i)cannot be written in the {layout}.*{message}"):
        export_drafter(drafter, tmp_path / "out", layout, target_name=NAME)
    assert not (tmp_path / "out").exists()


def test_gemma_and_nameless_targets_as_speculators(tmp_path):
    drafter = DSparkDrafter.from_pretrained(GOLDEN / GEMMA4)
    with pytest.raises(ValueError, match=r"gemma4_text layers.*no name of its target"):
        export_drafter(drafter, tmp_path / "out", "speculators")


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_what_a_copy_of_the_targets_matrices_would_lose(tmp_path, layout):
    """T14, T17: a scale of its embedding, a bias of its head."""
    drafter = make_drafter(stored=False)
    with pytest.raises(ValueError, match="embedding scales what it looks up"):
        export_drafter(drafter, tmp_path, layout, target=make_target("gemma3"), target_name=NAME)
    target = make_target()
    target.lm_head = torch.nn.Linear(HIDDEN, VOCAB)
    with pytest.raises(ValueError, match="quantised or has a bias"):
        export_drafter(drafter, tmp_path, layout, target=target, target_name=NAME)


def test_plain_rows_that_a_file_would_leave_to_its_target(tmp_path):
    """T14: DeepSpec's layout takes the target's own embedding, with its scale."""
    drafter = make_drafter(stored=False, unscaled_input_embeddings=True)
    with pytest.raises(ValueError, match=r"plain rows .* \(pass the target\)"):
        export_drafter(drafter, tmp_path, "deepspec")
    export_drafter(drafter, tmp_path, "deepspec", target=make_target("gemma3"))
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("layout", ["gguf", "", None])
def test_unknown_layouts(tmp_path, layout):
    with pytest.raises(ValueError, match="written as 'deepspec', 'speculators', 'eagle3',"):
        export_drafter(make_drafter(), tmp_path / "out", layout)


# -- files ----------------------------------------------------------------------------------------


def test_shards_and_calibration_travel(tmp_path):
    """Weight files of a chosen size, and the drafter's own defaults."""
    drafter = make_drafter()
    drafter.generation_config.dspark_confidence_threshold = 0.4
    export_drafter(drafter, tmp_path, "deepspec", max_shard_size="20kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.dspark_confidence_threshold == 0.4
    assert torch.equal(block_of(loaded).tokens, block_of(drafter).tokens)


@pytest.mark.parametrize("sampling", [None, "greedy"])
def test_how_a_headless_drafter_draws_is_kept(tmp_path, sampling):
    """T23: files of the speculators layout draft by argmax where nothing is said."""
    drafter = make_drafter(markov=None, confidence=False)
    drafter.generation_config.dspark_draft_sampling = sampling
    export_drafter(drafter, tmp_path, "speculators", target_name=NAME)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.dspark_draft_sampling == (sampling or "sample")
    assert drafter.generation_config.dspark_draft_sampling == sampling


def test_an_exported_drafter_is_lossless(tmp_path):
    """Through both layouts and back, greedy output equals plain decoding."""
    target, prompt = make_target(), make_prompt()
    expected = target.generate(prompt, max_new_tokens=20, do_sample=False)
    for layout in ("deepspec", "speculators"):
        export_drafter(
            make_drafter(stored=False), tmp_path / layout, layout, target=target, target_name=NAME
        )
        drafter = DSparkDrafter.from_pretrained(tmp_path / layout)
        output = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=20, do_sample=False
        )
        assert torch.equal(output, expected)


def test_a_file_edited_after_export_is_not_the_export(tmp_path):
    """Negative control: the comparison above would see a changed weight."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / VANILLA)
    export_drafter(drafter, tmp_path, "deepspec")
    stored = load_file(tmp_path / "model.safetensors")
    stored["markov_head.markov_w2.weight"] += 0.5
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = block_of(DSparkDrafter.from_pretrained(tmp_path))
    assert not torch.allclose(found.logits, block_of(drafter).logits)
