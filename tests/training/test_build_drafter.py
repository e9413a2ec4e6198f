"""New drafters for targets of several families, warm starts, reduced vocabularies from data."""

import pytest
import torch

from checkpoints import GEMMA4, GOLDEN
from dspark_hf import DSparkDrafter
from dspark_hf.training.build import build_drafter, frequent_tokens, spread_taps, warm_start
from dspark_hf.training.data import DraftDataset, Example
from small_runs import make_trainer
from tiny import FAMILIES, MASK_ID, VOCAB, make_drafter, make_prompt, make_target

SMALL = {"num_layers": 1, "block_size": 3, "markov_rank": 8, "target_layer_ids": [0, 2]}


def build(target=None, **options):
    return build_drafter(target or make_target(), MASK_ID, **{**SMALL, **options})


def test_taps_of_the_released_drafters():
    assert spread_taps(36, 5) == [1, 9, 17, 25, 33]
    assert spread_taps(4, 5) == [0, 1, 2, 3]
    assert spread_taps(30, 1) == [1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_drafter_trains_and_drafts(family, tmp_path):
    """B148: widths from the text config, whatever the family calls them."""
    target = make_target(family)
    drafter = build(target)
    make_trainer(tmp_path, drafter, target, max_steps=1).train()
    prompt = make_prompt()
    expected = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, expected)


def test_an_unknown_layer_field_is_named():
    with pytest.raises(ValueError, match="knows blok_size"):
        build(blok_size=3)


def test_layer_fields_replace_the_targets():
    drafter = build(intermediate_size=24, hidden_act="gelu")
    assert drafter.layers[0].mlp.up_proj.weight.shape[0] == 24
    assert drafter.config.backbone_config.hidden_act == "gelu"


@pytest.mark.parametrize(("markov", "other"), [("vanilla", None), (None, "vanilla")])
def test_dspark_and_dflash_start_from_each_other(markov, other):
    torch.manual_seed(1)
    source = build(markov_head_type=other, confidence_head=other is not None)
    drafter = build(markov_head_type=markov, confidence_head=markov is not None)
    fresh = warm_start(drafter, source).new
    expected = ["confidence_head.proj.bias", "confidence_head.proj.weight"]
    expected += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    assert fresh == ([] if markov is None else expected)
    for name, tensor in source.state_dict().items():
        if name in drafter.state_dict():
            assert torch.equal(drafter.state_dict()[name], tensor), name


SOME = torch.tensor([3, 5, 8, 13, 21])


@pytest.mark.parametrize(
    ("ours", "theirs", "anew"),
    [
        (SOME, None, 0),
        (SOME, SOME, 0),
        (SOME[1:4], SOME, 0),
        (SOME, SOME + 1, 5),
        (SOME, SOME - 5, 3),
        (None, SOME, VOCAB - 5),
    ],
)
def test_markov_rows_follow_their_tokens(ours, theirs, anew):
    """The same number of other tokens has rows of the same shape, and they mean something else."""
    torch.manual_seed(1)
    source, drafter = build(draft_vocabulary=theirs), build(draft_vocabulary=ours)
    name = "markov_head.markov_w2.weight"
    before = drafter.state_dict()[name].clone()
    start = warm_start(drafter, source)
    fresh = start.new
    after, rows = drafter.state_dict()[name], source.state_dict()[name]
    assert fresh == ([f"{name} ({anew} of {len(after)} rows)"] if anew else [])
    unused = len(rows) - len(after) + anew
    left = [f"{name} ({unused} of {len(rows)} rows)"] if unused else []
    assert start.left_out == left
    ours, theirs = (range(VOCAB) if x is None else x.tolist() for x in (ours, theirs))
    for row, token in enumerate(ours):
        expected = rows[theirs.index(token)] if token in theirs else before[row]
        assert torch.equal(after[row], expected)
    if drafter.config.draft_vocab_size is not None:
        assert drafter.draft_to_target.tolist() == ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_layer_ids": [0, 3]}, r"target_layer_ids is \[0, 3\] in the source"),
        ({"anchor_predicts": False}, "anchor_predicts is False in the source and True in the new"),
        ({"attention_bias": True}, "attention_bias is True in the source and False"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1 in the source"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            "'rope_theta': 7.0.* in",
        ),
        (
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
            r"\['sliding_attention'\] in",
        ),
    ],
)
def test_a_source_whose_weights_mean_something_else_is_refused(options, message):
    """Each has the same shapes, or shapes of which only the biases would be left out."""
    with pytest.raises(ValueError, match=f"Cannot warm-start: .*{message}"):
        warm_start(build(), build(**options))
    assert warm_start(build(**options), build(**options)).new == []


def test_a_source_without_a_fitting_layer_is_refused():
    with pytest.raises(ValueError, match="no draft layer of the source has a fitting shape"):
        warm_start(build(), build(intermediate_size=24))


def test_a_layer_is_taken_over_whole_or_not_at_all():
    source, drafter = build(), build(num_layers=2)
    before = drafter.state_dict()["layers.1.mlp.up_proj.weight"].clone()
    start = warm_start(drafter, source)
    second = sorted(name for name in drafter.state_dict() if name.startswith("layers.1."))
    assert start.new == second
    assert start.left_out == []
    assert torch.equal(drafter.state_dict()["layers.1.mlp.up_proj.weight"], before)
    # And the other way round: what has no place is said.
    start = warm_start(source, drafter)
    assert start.new == []
    assert start.left_out == second


def test_an_embedding_of_its_own_is_left_out_unless_it_is_the_targets():
    """A drafter whose head was trained was trained for that head."""
    target = make_target()
    source = make_drafter(stored=True)
    source.embed_tokens.load_state_dict(target.get_input_embeddings().state_dict())
    facts = ("target_layer_ids", "block_size")
    drafter = make_drafter(stored=False).bind(target)
    assert all(getattr(drafter.config, name) == getattr(source.config, name) for name in facts)
    assert warm_start(drafter, source).left_out == ["lm_head.weight"]


def test_layers_of_another_family_are_refused():
    source = DSparkDrafter.from_pretrained(GOLDEN / GEMMA4)
    drafter = build()
    for name in ("target_layer_ids", "mask_token_id", "vocab_size", "target_hidden_size"):
        setattr(drafter.config, name, getattr(source.config, name))
    with pytest.raises(ValueError, match="Cannot warm-start qwen3 layers from gemma4_text"):
        warm_start(drafter, source)


def test_frequent_tokens_count_what_the_target_wrote():
    dataset = DraftDataset(
        [
            Example([9, 9, 9, 4, 5, 5], [False] * 3 + [True] * 3),
            Example([5, 4, 7], [True, True, True]),
        ]
    )
    ids, share = frequent_tokens(dataset, 2, VOCAB)
    assert ids.tolist() == [4, 5]
    assert share == 5 / 6
    # With fewer different tokens than asked for, the lowest ids fill up.
    ids, share = frequent_tokens(dataset, 6, VOCAB)
    assert ids.tolist() == [0, 1, 2, 4, 5, 7]
    assert share == 1
    with pytest.raises(ValueError, match="draft_vocab_size is 97, but the target has 97 tokens"):
        frequent_tokens(dataset, VOCAB, VOCAB)
