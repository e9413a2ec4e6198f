"""What contradicts itself or is built otherwise in a published layout, refused or said."""

import pytest
import torch

from checkpoints import (
    GOLDEN,
    copy_folder,
    edit_config,
    edit_tensors,
    no_weights_loaded,
    read_json,
)
from dspark_hf import DSparkDrafter, UnsupportedCheckpointError
from dspark_hf.loading.description import describe
from published import (
    deepspec,
    modelopt,
    specforge,
    zlab,
)
from tiny import HIDDEN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 4}, r"dflash_config\.markov_rank = 8 and markov_rank = 4"),
        ({"mask_token_id": 3}, r"dflash_config\.mask_token_id = 96 and mask_token_id = 3"),
        ({"block_size": ...}, r"lacks dflash_config\.block_size or block_size"),
        ({"block_size": 0}, "block_size must be an integer of at least 1 in the anchor_first"),
        ({"block_size": True}, "block_size must be an integer"),
        ({"num_target_layers": 3}, "target_layer_ids contains 2, the target's last layer"),
        ({"num_target_layers": ...}, r"lacks dflash_config\.num_target_layers or num_target"),
        ({"dflash_config.target_layer_ids": [-1, 2]}, r"\[-1, 2\]; those of this layout count"),
        ({"head_dim": ...}, "lacks head_dim"),
        ({"dflash_config": [1]}, r"dflash_config = \[1\], expected an object"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}},
            "rope_type is 'dynamic'",
        ),
        ({"draft_vocab_size": 40}, "draft_vocab_size is 40 and vocab_size 97, but .* no d2t"),
        ({"log_snr_conditioning": True}, "Bonsai"),
    ],
)
def test_contradictions_are_refused(tmp_path, changes, message):
    """B069, B070, B074, B078, B083, T2, T11: told before any weight is read."""
    folder, _ = specforge(tmp_path)
    edit_config(folder, **changes)
    with no_weights_loaded(), pytest.raises(ValueError, match=message):
        DSparkDrafter.from_pretrained(folder)


def test_a_reduced_vocabulary_of_another_target(tmp_path):
    """T16: without an embedding, only t2d is as long as the vocabulary that a class fills in."""
    folder = copy_folder(GOLDEN.parent / "golden_speculators" / "dflash_infill_reduced", tmp_path)
    edit_config(folder, **{"transformer_layer_config.vocab_size": ...})
    with (
        no_weights_loaded(),
        pytest.raises(ValueError, match=r"vocab_size is 151936, and t2d, .* shape \(61,\)"),
    ):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_dflash_facts_are_required(tmp_path, key):
    """B069: the reference fills absent taps by a formula; they are not guessed here."""
    folder, _ = zlab(tmp_path)
    section = read_json(folder / "config.json")["dflash_config"]
    edit_config(folder, dflash_config={k: v for k, v in section.items() if k != key})
    with pytest.raises(ValueError, match=rf"lacks dflash_config\.{key} or {key}"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        "layers.0.self_attn.qkv_proj.weight",
        "layers.0.self_attn.g_proj.weight",
        "aux_hidden_norms.0.weight",
    ],
)
def test_laguna_is_told_by_its_tensors(tmp_path, tensor):
    """T12: the config says DFlash, the attention is fused and gated."""
    folder, _ = zlab(tmp_path)
    edit_tensors(folder, **{tensor: torch.zeros(4)})
    with pytest.raises(UnsupportedCheckpointError, match="Laguna DFlash drafter"):
        DSparkDrafter.from_pretrained(folder)


def test_gated_query_rows_are_no_stock_body(tmp_path):
    """T9: twice the query rows under a stock architecture are an error, by key they are refused."""
    folder, _ = deepspec(tmp_path)
    edit_tensors(folder, **{"layers.0.self_attn.q_proj.weight": torch.zeros(64, HIDDEN)})
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \(64, 32\), .*\(32, 32\)"):
        DSparkDrafter.from_pretrained(folder)
    folder, _ = specforge(tmp_path / "flag")
    edit_config(folder, enable_qwen35_gated_q_proj=True)
    with pytest.raises(UnsupportedCheckpointError, match="gated-attention"):
        DSparkDrafter.from_pretrained(folder)


def test_errors_use_the_names_of_the_files(tmp_path):
    """What is missing under its own name is shown as the reader of the file knows it."""
    folder, _ = modelopt(tmp_path)
    edit_tensors(folder, **{"markov_w2.weight": torch.zeros(97, 5)})
    with pytest.raises(ValueError, match=r"; markov_w2\.weight has|: markov_w2\.weight has"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({"use_sliding_window": ...}, True),
        ({"use_sliding_window": True}, True),
        ({"use_sliding_window": False}, False),
        ({"use_sliding_window": ..., "dflash_config.use_swa": True}, False),
        ({"use_sliding_window": True, "layer_types": ..., "max_window_layers": 0}, False),
    ],
    ids=str,
)
def test_a_window_that_no_layer_has_is_said(tmp_path, changes, is_said):
    """T13: ModelOpt's files keep layers of full attention beside a window for all of them."""
    folder, _ = modelopt(tmp_path)
    edit_config(folder, sliding_window=5, **changes)
    facts = describe(str(folder))
    assert [bool(facts["warnings"]), set(facts["windows"]) == {None}] in (
        [[True, True]] if is_said else [[False, False], [False, True]]
    )


@pytest.mark.parametrize("key", ["is_causal", "dflash_config.is_causal", "dflash_config.causal"])
@pytest.mark.parametrize("write", [specforge, deepspec])
def test_every_place_of_the_causal_flag_counts(tmp_path, write, key):
    """T13: repacked or not."""
    folder, _ = write(tmp_path)
    edit_config(folder, dflash_config=read_json(folder / "config.json").get("dflash_config", {}))
    edit_config(folder, **{key: True})
    assert describe(str(folder))["causal_layers"] == [0, 1]


def test_a_window_that_is_asked_for_and_not_given(tmp_path):
    """T13."""
    folder, _ = modelopt(tmp_path)
    section = read_json(folder / "config.json")["dflash_config"]
    edit_config(folder, dflash_config={**section, "use_swa": True})
    with pytest.raises(ValueError, match="use_swa is set, but neither swa_window_size nor"):
        DSparkDrafter.from_pretrained(folder)
