"""
Drafters compute what the speculators package (0.9.0) computed from the same files.

Its models were saved by the package itself; `expected.safetensors` holds what its training forward
gave for two anchors: hidden states and logits of every slot, the Markov bias over the true tokens,
confidences, and the matrices that the files leave to the target.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoints import copy_folder, edit_config, edit_tensors
from dspark_hf import DSparkDrafter
from dspark_hf.loading.description import describe
from tiny import make_scripted, make_target

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden_speculators"
NAMES = ("dspark_full", "dspark_causal_reduced", "dspark_infill_sliding", "dflash_infill_reduced")
TOLERANCE, CLEARLY = 2e-5, 1e-3


def expected_of(name):
    return load_file(GOLDEN / name / "expected.safetensors")


def lend(drafter, record):
    """Bind the matrices of the target where the file left them out."""
    embedding = nn.Embedding.from_pretrained(record["embed_tokens.weight"])
    head = None
    if drafter.lm_head is None:
        head = nn.Linear(32, 61, bias=False)
        head.weight = nn.Parameter(record["lm_head.weight"])
    return drafter.bind(input_embeddings=embedding, output_embeddings=head)


def greedy_walk(drafter, record, i):
    """Tokens of the i-th block, from what the package gave before its Markov bias."""
    previous = record["input_ids"][:, record["anchors"][i]]
    hidden, base = record["hidden"][i : i + 1], record["base_logits"][i : i + 1]
    ids = drafter.draft_to_target if drafter.config.draft_vocab_size else torch.arange(61)
    tokens, state = [], None
    for k in range(hidden.shape[1]):
        bias, state = drafter.markov_head.step(previous, hidden[:, k], state)
        if k or drafter.config.anchor_predicts:
            previous = ids[(base[:, k] + bias).argmax(-1)]
            tokens.append(previous)
    return torch.cat(tokens)


def largest_difference(drafter, record):
    """Over both anchors: hidden states, base logits, logits behind true tokens, confidences."""
    worst = 0.0
    for i, anchor in enumerate(record["anchors"].tolist()):
        context = drafter.new_context(1)
        drafter.extend(context, record["features"][:, :anchor])
        block = drafter.draft(context, record["input_ids"][:, anchor])
        slots = slice(0 if drafter.config.anchor_predicts else 1, None)
        pairs = [
            (block.hidden_states[0], record["hidden"][i, slots]),
            (block.base_logits[0], record["base_logits"][i, slots]),
        ]
        if drafter.markov_head is not None:
            previous = record["previous_ids"][i, slots]
            bias = drafter.markov_head.block(record["previous_ids"][i], record["hidden"][i])
            pairs.append((block.base_logits[0] + bias[slots], record["logits"][i, slots]))
        if drafter.confidence_head is not None:
            embedded = drafter.markov_head.embed(previous[None])
            confidence = drafter.confidence_head(block.hidden_states, embedded)[0]
            pairs.append((confidence, record["confidence"][i, slots]))
            # Behind the anchor, which is true; later positions follow drafted tokens.
            first = block.confidence_logits[0, :1]
            pairs.append((first, record["confidence"][i, slots][:1]))
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_every_slot_equals_the_package(name, attention):
    """T1, T2, T12, T13, T16: layouts, windows, causal blocks, heads, reduced vocabularies."""
    record = expected_of(name)
    loaded, info = DSparkDrafter.from_pretrained(
        GOLDEN / name, output_loading_info=True, attn_implementation=attention
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert largest_difference(lend(loaded, record), record) < TOLERANCE
    if loaded.markov_head is not None:
        for i, anchor in enumerate(record["anchors"].tolist()):
            block = loaded(record["features"][:, :anchor], record["input_ids"][:, anchor])
            assert torch.equal(block.tokens[0], greedy_walk(loaded, record, i))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dspark_causal_reduced", {"sliding_window_non_causal": True}),
        ("dspark_infill_sliding", {"sliding_window_non_causal": False}),
        ("dspark_full", {"aux_hidden_state_layer_ids": [1, 3, 6]}),
        ("dspark_infill_sliding", {"transformer_layer_config.sliding_window": 6}),
        ("dspark_infill_sliding", {"transformer_layer_config.rope_parameters": None}),
    ],
)
def test_the_facts_that_make_the_difference(tmp_path, name, change):
    """Negative controls: taps are names only here, everything else changes the numbers."""
    folder, record = copy_folder(GOLDEN / name, tmp_path), expected_of(name)
    edit_config(folder, **change)
    difference = largest_difference(lend(DSparkDrafter.from_pretrained(folder), record), record)
    if "aux_hidden_state_layer_ids" in change:
        assert difference < TOLERANCE
        assert DSparkDrafter.from_pretrained(folder).config.target_layer_ids == [0, 2, 5]
    else:
        assert difference > CLEARLY


@pytest.mark.parametrize("name", NAMES)
def test_facts(name):
    """T2, T3, T16, T23: layer ids minus one, γ by the layout, offsets as ids of the target."""
    facts = describe(str(GOLDEN / name))
    assert facts["dialect"] == "speculators"
    assert facts["target_layer_ids"] == [1, 3, 6]
    assert facts["hidden_states_indices"] == [2, 4, 7]
    assert facts["num_target_layers"] is None
    assert facts["block_size"] == 4
    assert facts["block_width"] == {"dspark_full": 4, "dspark_causal_reduced": 4}.get(name, 5)
    assert facts["unscaled_input_embeddings"]
    assert facts["warnings"] == []
    # Without heads, its reference loop drafts by argmax.
    assert facts["draft_sampling"] == ("greedy" if name.startswith("dflash") else "sample")
    assert "embedding" in facts["bound_from_target"]
    reduced = name.endswith("reduced")
    assert facts["draft_vocab_size"] == (23 if reduced else None)
    assert facts["ignored_tensors"] == (["t2d"] if reduced else [])
    if reduced:
        stored = load_file(GOLDEN / name / "model.safetensors")
        loaded = DSparkDrafter.from_pretrained(GOLDEN / name)
        assert torch.equal(loaded.draft_to_target, stored["t2d"].nonzero().flatten())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_right", [None, 3])
def test_greedy_is_exact(name, num_right):
    """Lossless in float32; the files do not say how deep the target is."""
    target = make_target(vocab_size=61, num_hidden_layers=8)
    prompt = torch.tensor([[3, 5, 4, 6, 11]])
    expected = target.generate(prompt, max_new_tokens=20, do_sample=False)
    drafter = DSparkDrafter.from_pretrained(GOLDEN / name)
    if num_right is not None:
        drafter = make_scripted(drafter, expected, num_right)
    output = target.generate(prompt, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert torch.equal(output, expected)


def test_taps_beyond_the_target_are_found_when_they_meet():
    """B070: here the file could not know."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / "dspark_full")
    target = make_target(vocab_size=61, num_hidden_layers=6)
    with pytest.raises(ValueError, match=r"reads the output of layer 6, and .* layers 0 to 5"):
        target.generate(torch.tensor([[3, 5]]), assistant_model=drafter, max_new_tokens=4)


# -- rules for what a file leaves out --------------------------------------------------------------


def proposals(count):
    return {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
        "verifier": {"name_or_path": None, "architectures": []},
    }


@pytest.mark.parametrize(
    ("flag", "count", "anchor_predicts", "warning"),
    [
        (True, 4, True, None),
        (True, 3, True, "the flag counts"),
        (False, 3, False, None),
        (False, 4, False, "the flag counts"),
        (..., 4, True, "anchor-first"),
        (..., 3, False, "infill"),
        (..., None, False, "infill"),
        (..., 9, False, "infill"),
    ],
)
def test_which_slot_predicts(tmp_path, flag, count, anchor_predicts, warning, caplog):
    """T1: the flag, then the number of proposed tokens, then the older layout; and it is said."""
    folder = copy_folder(GOLDEN / "dspark_full", tmp_path)
    section = {} if count is None else proposals(count)
    edit_config(folder, sample_from_anchor=flag, speculators_config=section)
    facts = describe(str(folder))
    assert facts["anchor_predicts"] is anchor_predicts
    assert facts["block_size"] == (4 if anchor_predicts else 3)
    assert len(facts["warnings"]) == (warning is not None)
    assert warning is None or warning in facts["warnings"][0]
    DSparkDrafter.from_pretrained(folder)
    assert (warning in caplog.text) if warning else not caplog.text


def test_an_absent_causal_flag_is_read_as_vllm_reads_it(tmp_path):
    """T13, B090: and a warning says that speculators would do otherwise."""
    folder = copy_folder(GOLDEN / "dspark_causal_reduced", tmp_path)
    edit_config(folder, sliding_window_non_causal=...)
    facts = describe(str(folder))
    assert facts["causal_layers"] == []
    assert "sliding_window_non_causal is absent" in facts["warnings"][0]


def test_a_body_is_a_difference_to_the_defaults_of_its_class(tmp_path):
    """What is left out is the class's default: for Qwen3, a rotary base of 10,000."""
    folder = copy_folder(GOLDEN / "dspark_full", tmp_path)
    edit_config(folder, **{"transformer_layer_config.rope_parameters": ...})
    facts = describe(str(folder))
    assert facts["rope"]["rope_theta"] == 10_000
    edit_config(folder, **{"transformer_layer_config.head_dim": ...})
    # 128 is Qwen3's, and the stored projections say 8.
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \(32, 32\), .* \(512, 32\)"):
        DSparkDrafter.from_pretrained(folder)


def test_odd_class_names_do_not_stop_the_description(tmp_path):
    """B083: the container tells what it is."""
    folder = copy_folder(GOLDEN / "dspark_full", tmp_path)
    edit_config(folder, architectures={"a": 1})
    assert describe(str(folder))["architecture"] is None


def test_sliding_layers_without_a_window_in_force_are_full(tmp_path):
    """T13: as the package itself does, with a warning."""
    folder = copy_folder(GOLDEN / "dspark_causal_reduced", tmp_path)
    edit_config(folder, **{"transformer_layer_config.use_sliding_window": False})
    facts = describe(str(folder))
    assert facts["windows"] == [None, None]
    assert facts["causal_layers"] == []
    assert "no window is in force" in facts["warnings"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"aux_hidden_state_layer_ids": ...}, "lacks aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [-1, 3]}, "list of numbers from 0"),
        ({"aux_hidden_state_layer_offset": 1}, "aux_hidden_state_layer_offset is 1"),
        ({"transformer_layer_config": ...}, "lacks transformer_layer_config"),
        ({"transformer_layer_config.model_type": "gemma4_text"}, "qwen3 or llama"),
        ({"draft_vocab_size": 40}, "says which of the target's tokens|no d2t"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"block_size": 1, "sample_from_anchor": False}, "at least 2 in the infill layout"),
    ],
)
def test_what_is_refused(tmp_path, change, message):
    """B069, B083, T2, T19."""
    folder = copy_folder(GOLDEN / "dspark_full", tmp_path)
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        DSparkDrafter.from_pretrained(folder)


def test_a_map_that_was_replaced(tmp_path):
    """B082: another map of the same size would silently repoint every draft token."""
    folder = copy_folder(GOLDEN / "dspark_causal_reduced", tmp_path)
    edit_tensors(folder, d2t=torch.zeros(23, dtype=torch.long))
    with pytest.raises(ValueError, match="d2t and t2d disagree"):
        DSparkDrafter.from_pretrained(folder)
    edit_tensors(folder, d2t=torch.full((23,), 0.7))
    with pytest.raises(ValueError, match="d2t is stored as F32; token ids are stored as I64"):
        DSparkDrafter.from_pretrained(folder)


def test_plain_rows_of_a_scaled_embedding():
    """T14, T17: these heads embed without the target's scale, whatever its module does."""
    drafter = DSparkDrafter.from_pretrained(GOLDEN / "dspark_full")
    record = expected_of("dspark_full")
    lend(drafter, record)

    class Scaled(nn.Embedding):
        embed_scale = 7.0

        def forward(self, ids):
            return super().forward(ids) * self.embed_scale

    scaled = Scaled(61, 32)
    scaled.weight = nn.Parameter(record["embed_tokens.weight"])
    drafter.bind(input_embeddings=scaled)
    assert largest_difference(drafter, record) < TOLERANCE
    drafter.config.unscaled_input_embeddings = False
    assert largest_difference(drafter, record) > CLEARLY
