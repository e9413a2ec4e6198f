"""Every published layout that is read: no key is left over, and it drafts what it should."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from checkpoints import (
    GOLDEN,
    edit_config,
    edit_json,
    edit_tensors,
    no_weights_loaded,
    read_json,
)
from dspark_hf import DSparkDrafter
from dspark_hf.loading.adapting import halves_first
from dspark_hf.loading.description import describe
from dspark_hf.loading.reading import UndecidedLayoutError
from published import (
    RESIDUE,
    deepspec,
    lfm2,
    modelopt,
    specforge,
    zlab,
)
from tiny import VOCAB, make_prompt, make_scripted, make_target

LAYOUTS = {
    "zlab": ("dflash", zlab),
    "zlab_nested": ("dflash", lambda folder: zlab(folder, nested=True)),
    "zlab_sliding": ("dflash", lambda folder: zlab(folder, windows=(5, None))),
    "specforge": ("specforge", specforge),
    "specforge_gated": ("specforge", lambda folder: specforge(folder, head="gated")),
    "specforge_rnn": ("specforge", lambda folder: specforge(folder, head="rnn")),
    "specforge_repeated": ("specforge", lambda folder: specforge(folder, top_level=True)),
    "specforge_logit_head": ("specforge", lambda folder: specforge(folder, old_name=True)),
    "specforge_silent": ("specforge", lambda folder: specforge(folder, with_markov=False)),
    "modelopt": ("modelopt", modelopt),
    "modelopt_gated": ("modelopt", lambda folder: modelopt(folder, head="gated")),
    "modelopt_rnn": ("modelopt", lambda folder: modelopt(folder, head="rnn")),
    "modelopt_window": ("modelopt", lambda folder: modelopt(folder, swa=5)),
    "modelopt_causal": ("modelopt", lambda folder: modelopt(folder, swa=5, causal=True)),
    "modelopt_infill": ("modelopt", lambda folder: modelopt(folder, shift_label=False)),
    "lfm2": ("lfm2", lfm2),
    "minicpm5": (
        "deepspec",
        lambda folder: deepspec(
            folder,
            draft_vocab_size=VOCAB,
            projector_type="dspark",
            auto_map={"AutoModel": "dspark.DSparkDraftModel"},
        ),
    ),
    "satgeze": (
        "deepspec",
        lambda folder: deepspec(
            folder,
            model_type="qwen3_5_text",
            rope_parameters={
                "rope_theta": 5e5,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            },
            **RESIDUE,
        ),
    ),
    "avesed": (
        "fork",
        lambda folder: deepspec(folder, stored=True, architectures=["DFlashDraftModel"]),
    ),
    "fork_nested": (
        "fork",
        lambda folder: deepspec(
            folder,
            architectures=["DSparkDraftModel"],
            dflash_config={"markov_rank": 8, "markov_head_type": "vanilla"},
        ),
    ),
    # Some of SpecForge's files have our model type.
    "specforge_model_type": (
        "fork",
        lambda folder: deepspec(
            folder,
            architectures=["DSparkDraftModel"],
            model_type="dspark",
            mask_token_id=...,
            target_layer_ids=...,
            dflash_config={"mask_token_id": 96, "target_layer_ids": [0, 2]},
        ),
    ),
    "lfm2_repacked": (
        "deepspec",
        lambda folder: lfm2(
            folder,
            architectures=["Qwen3DSparkModel"],
            num_target_layers=4,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        ),
    ),
}


def run(drafter, target=None, length=9):
    """A block drafted behind `length` positions, past every window of this file."""
    target = make_target() if target is None else target
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(1, length, drafter.fc.in_features, generator=generator)
    context = drafter.new_context(1, target=target)
    drafter.extend(context, features[:, :4])
    drafter.extend(context, features[:, 4:])
    return drafter.draft(context, torch.tensor([5]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_without_rest_and_drafts_the_same(tmp_path, name):
    """B074, B075, T1, T3, T7-T9: zero missing and unexpected keys; the same block as ours."""
    dialect, write = LAYOUTS[name]
    folder, source = write(tmp_path)
    loaded, info = DSparkDrafter.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    facts = describe(str(folder))
    assert facts["dialect"] == dialect
    assert facts["warnings"] == []
    assert facts["block_size"] == source.config.block_size
    assert facts["anchor_predicts"] == source.config.anchor_predicts
    found, expected = run(loaded), run(source)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)
    if source.confidence_head is not None:
        torch.testing.assert_close(
            found.confidence_logits, expected.confidence_logits, rtol=0, atol=2e-5
        )
    json.dumps(facts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_saves_as_ours_and_comes_back(tmp_path, name):
    """One layout is written, whatever was read: renames and reordering are not undone."""
    folder, _ = LAYOUTS[name][1](tmp_path / "published")
    loaded = DSparkDrafter.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "own")
    names = set(load_file(tmp_path / "own" / "model.safetensors"))
    assert names == set(loaded.state_dict())
    again = DSparkDrafter.from_pretrained(tmp_path / "own")
    assert read_json(tmp_path / "own" / "config.json")["model_type"] == "dspark"
    assert (
        again.config.to_dict().items()
        >= {
            key: value
            for key, value in loaded.config.to_dict().items()
            if key not in ("_name_or_path", "backbone_config")
        }.items()
    )
    assert torch.equal(run(again).logits, run(loaded).logits)


@pytest.mark.parametrize(
    "name",
    ["zlab", "zlab_sliding", "specforge", "modelopt", "modelopt_causal", "lfm2", "avesed"],
)
@pytest.mark.parametrize("num_right", [None, 2, 4])
def test_greedy_is_exact(tmp_path, name, num_right):
    """Lossless in float32 with loaded drafters, also where some drafted tokens are right."""
    target, prompt = make_target(), make_prompt()
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False)
    drafter = DSparkDrafter.from_pretrained(LAYOUTS[name][1](tmp_path)[0])
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=24, do_sample=False)
    assert torch.equal(output, expected)


# -- block layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "anchor_predicts", "slots"),
    [("zlab", False, 5), ("specforge", True, 4), ("modelopt", True, 4), ("lfm2", True, 4)],
)
def test_block_layout_and_depth(tmp_path, name, anchor_predicts, slots):
    """B071, T1, T3: block_size counts slots in one family and drafted tokens in the other."""
    folder, _ = LAYOUTS[name][1](tmp_path)
    config = DSparkDrafter.from_pretrained(folder).config
    assert config.anchor_predicts is anchor_predicts
    assert (config.block_width, config.block_size) == (slots, 4)


def test_a_repacked_drafter_keeps_its_causal_blocks(tmp_path):
    """T13: SGLang's packaging lifts SpecForge's keys to the top and renames the architecture."""
    folder, _ = deepspec(tmp_path, is_causal=True)
    assert DSparkDrafter.from_pretrained(folder).config.causal_layers == [0, 1]
    assert describe(str(folder))["origins"]["causal"] == "is_causal"


def test_the_other_layout_can_be_forced(tmp_path):
    """T1: the same number of slots, one draft token more or less; a silent config needs it."""
    folder, _ = zlab(tmp_path)
    forced = DSparkDrafter.from_pretrained(folder, block_layout="anchor_first")
    assert (forced.config.block_width, forced.config.block_size) == (5, 5)
    assert run(forced).tokens.shape == (1, 5)
    with pytest.raises(ValueError, match="block_layout is 'auto'; it can be 'anchor_first' or"):
        DSparkDrafter.from_pretrained(folder, block_layout="auto")
    assert describe(str(folder), block_layout="anchor_first")["block_size"] == 5


def test_the_depth_of_the_target_is_taken_where_it_is_not_stated(tmp_path):
    """B070: compared where it is stated, checked against the taps where it is not."""
    folder, _ = specforge(tmp_path)
    assert DSparkDrafter.from_pretrained(folder, num_target_layers=4).config.num_target_layers == 4
    with pytest.raises(ValueError, match=r"num_target_layers=9 was given, and config.json says 4"):
        DSparkDrafter.from_pretrained(folder, num_target_layers=9)
    speculators = GOLDEN.parent / "golden_speculators" / "dspark_full"
    told = DSparkDrafter.from_pretrained(speculators, num_target_layers=8)
    assert told.config.num_target_layers == 8
    with pytest.raises(ValueError, match="contains 6, but a target of 6 layers"):
        DSparkDrafter.from_pretrained(speculators, num_target_layers=6)
    told.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="dspark layout, which states its facts"):
        DSparkDrafter.from_pretrained(tmp_path / "own", block_layout="infill")


def test_shifted_labels_make_a_dflash_drafter_anchor_first(tmp_path):
    """T1: `shift_label` in a DFlash file."""
    folder, _ = zlab(tmp_path)
    section = read_json(folder / "config.json")["dflash_config"]
    edit_config(folder, dflash_config={**section, "shift_label": True})
    config = DSparkDrafter.from_pretrained(folder).config
    assert (config.anchor_predicts, config.block_size) == (True, 5)
    edit_config(folder, dflash_config={**section, "shift_label": True, "sample_from_anchor": False})
    with pytest.raises(ValueError, match="shift_label=True and sample_from_anchor=False"):
        DSparkDrafter.from_pretrained(folder)
    # Absent is false to ModelOpt's classes too, where it has a Markov head.
    folder, _ = modelopt(tmp_path / "modelopt")
    edit_config(folder, **{"dflash_config.shift_label": ...})
    config = DSparkDrafter.from_pretrained(folder).config
    assert (config.anchor_predicts, config.block_size) == (False, 3)


@pytest.mark.parametrize("why", ["no confidence head", "other training block"])
def test_a_fork_whose_layout_cannot_be_told_needs_it_given(tmp_path, why):
    """T1: a Markov head alone, or a training block of another size, may be either layout."""
    folder, _ = deepspec(tmp_path, architectures=["DFlashDraftModel"])
    if why == "no confidence head":
        edit_tensors(folder, drop=("confidence_head.proj.weight", "confidence_head.proj.bias"))
        edit_config(folder, enable_confidence_head=False)
    else:
        edit_config(folder, training_block_size=8)
    with no_weights_loaded(), pytest.raises(ValueError, match=r"whether the anchor slot.*probe"):
        DSparkDrafter.from_pretrained(folder)
    config = DSparkDrafter.from_pretrained(folder, block_layout="infill").config
    assert (config.anchor_predicts, config.block_size) == (False, 3)


@pytest.mark.parametrize("key", ["sample_from_anchor", "dflash_config.shift_label"])
def test_a_deepspec_file_that_says_otherwise_needs_the_layout(tmp_path, key):
    """T1: its architecture and one of its keys contradict each other."""
    folder, _ = deepspec(tmp_path, dflash_config={})
    edit_config(folder, **{key: True})
    assert DSparkDrafter.from_pretrained(folder).config.anchor_predicts
    edit_config(folder, **{key: False})
    with no_weights_loaded(), pytest.raises(ValueError, match=r"Qwen3DSparkModel are anchor-first"):
        DSparkDrafter.from_pretrained(folder)
    assert DSparkDrafter.from_pretrained(folder, block_layout="infill").config.block_size == 3


def test_dspark_models_and_heads_are_not_read_as_dflash(tmp_path):
    """T1, T19: an infill block would be a guess there."""
    folder, _ = zlab(tmp_path / "headless", architectures=["DSparkDraftModel"])
    with pytest.raises(UndecidedLayoutError):
        DSparkDrafter.from_pretrained(folder)
    folder, _ = modelopt(tmp_path / "flat")
    section = read_json(folder / "config.json")["dflash_config"]
    kept = ("mask_token_id", "target_layer_ids")
    edit_config(folder, dflash_config={key: section[key] for key in kept})
    facts = describe(str(folder))
    assert (facts["dialect"], facts["anchor_predicts"]) == ("fork", True)
    edit_tensors(folder, drop=("confidence_proj.weight", "confidence_proj.bias"))
    with pytest.raises(UndecidedLayoutError):
        DSparkDrafter.from_pretrained(folder)


# -- rotary pairs ----------------------------------------------------------------------------------


def test_interleaved_pairs_give_the_attention_they_were_trained_with():
    """T8: scores of the interleaved rotation equal those of reordered rows in the host's."""
    torch.manual_seed(0)
    dim, length = 8, 5
    query, key = torch.randn(length, dim), torch.randn(length, dim)
    angles = torch.arange(float(length))[:, None] / 1e4 ** (torch.arange(0, dim, 2) / dim)

    def turn_pairs(x):
        even, odd = x[:, 0::2], x[:, 1::2]
        turned = (
            even * angles.cos() - odd * angles.sin(),
            odd * angles.cos() + even * angles.sin(),
        )
        return torch.stack(turned, dim=-1).flatten(1)

    def turn_halves(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ),
            dim=-1,
        )

    order = halves_first(dim)
    expected = turn_pairs(query) @ turn_pairs(key).T
    found = turn_halves(query[:, order]) @ turn_halves(key[:, order]).T
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(turn_halves(query) @ turn_halves(key).T, expected, atol=1e-2)


def test_interleaved_pairs_matter(tmp_path):
    """T8: the same file without the flag drafts something else."""
    folder, _ = lfm2(tmp_path)
    right = run(DSparkDrafter.from_pretrained(folder))
    edit_config(folder, rope_is_neox_style=True)
    wrong = run(DSparkDrafter.from_pretrained(folder))
    assert (right.logits - wrong.logits).abs().max() > 1e-2
    edit_config(folder, rope_is_neox_style=...)
    with pytest.raises(ValueError, match="lacks rope_is_neox_style"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_yarn_of_the_draft_config_is_applied(tmp_path, place):
    """T11: real in some drafters; both spellings give the same, and not the plain rotation."""
    folder, _ = specforge(tmp_path)
    plain = run(DSparkDrafter.from_pretrained(folder))
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    blocks = []
    for changes in (
        {"rope_parameters": {**yarn, "rope_theta": 5e5}, "rope_scaling": ...},
        {"rope_parameters": ..., "rope_scaling": {"type": "yarn", **yarn}, "rope_theta": 5e5},
    ):
        edit_config(folder, **changes)
        blocks.append(run(DSparkDrafter.from_pretrained(folder)))
    assert torch.equal(blocks[0].logits, blocks[1].logits)
    assert (blocks[0].logits - plain.logits).abs().max() > 1e-3


def test_a_soft_cap_is_applied(tmp_path):
    """T17: Gemma heads of z-lab state their target's."""
    folder, _ = zlab(tmp_path)
    plain = run(DSparkDrafter.from_pretrained(folder)).logits
    edit_config(folder, final_logit_softcapping=0.5)
    capped = run(DSparkDrafter.from_pretrained(folder)).logits
    torch.testing.assert_close(capped, 0.5 * torch.tanh(plain / 0.5))


# -- drafting defaults -----------------------------------------------------------------------------


def test_a_tied_head_that_is_not_stored_is_said(tmp_path):
    """T18: it would be the stored embedding for the host, and is the target's here."""
    folder, _ = deepspec(tmp_path, stored=True, tie_word_embeddings=True)
    assert describe(str(folder))["warnings"] == []
    edit_tensors(folder, drop=("lm_head.weight",))
    assert "the head is the target's" in describe(str(folder))["warnings"][0]


def test_headless_drafters_of_this_family_draft_by_argmax(tmp_path):
    """T23: as their reference loop does; with a Markov head, drafts are sampled."""
    folder, _ = zlab(tmp_path / "dflash")
    assert DSparkDrafter.from_pretrained(folder).generation_config.dspark_draft_sampling == "greedy"
    # Repositories carry a copy of their target's defaults.
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(folder)
    defaults = DSparkDrafter.from_pretrained(folder).generation_config
    assert (defaults.temperature, defaults.dspark_draft_sampling) == (0.6, "greedy")
    edit_json(folder / "generation_config.json", dspark_draft_sampling="sample")
    assert DSparkDrafter.from_pretrained(folder).generation_config.dspark_draft_sampling == "sample"
    folder, _ = specforge(tmp_path / "dspark")
    assert DSparkDrafter.from_pretrained(folder).generation_config.dspark_draft_sampling is None
