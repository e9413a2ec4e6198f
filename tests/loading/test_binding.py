"""The embedding and the head of a drafter: its own, or those of its target."""

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import (
    ANCHOR,
    EMBEDDING,
    GEMMA4,
    GOLDEN,
    HEAD,
    VANILLA,
    copy_checkpoint,
    edit_tensors,
    features_of,
    same_drafts,
    same_weights,
)
from dspark_hf import DSparkDrafter
from tiny import make_drafter, make_prompt, make_target


@pytest.mark.parametrize(
    "dropped", [(), (EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids=["none", "embed", "head", "both"]
)
@pytest.mark.parametrize("name", [VANILLA, GEMMA4])
def test_what_is_stored_is_decided_by_the_tensors(tmp_path, name, dropped):
    """B084, B143: an absent embedding or head is bound, never made up."""
    folder = copy_checkpoint(tmp_path, name)
    edit_tensors(folder, drop=dropped)
    drafter, info = DSparkDrafter.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert (drafter.embed_tokens is None) == (EMBEDDING in dropped)
    assert (drafter.lm_head is None) == (HEAD in dropped)
    assert drafter.config.stores_input_embeddings == (EMBEDDING not in dropped)
    assert drafter.config.stores_output_embeddings == (HEAD not in dropped)
    if dropped:
        with pytest.raises(ValueError, match=r"carries no copy of an .* Call drafter\.bind"):
            drafter.new_context(batch_size=1)
    full = DSparkDrafter.from_pretrained(GOLDEN / name)
    drafter.bind(
        input_embeddings=full.embed_tokens if EMBEDDING in dropped else None,
        output_embeddings=full.lm_head if HEAD in dropped else None,
    )
    assert same_drafts(drafter, full)


def test_the_bias_of_the_confidence_head_is_decided_by_its_tensor(tmp_path):
    """B115: a checkpoint without that bias is read as one without."""
    folder = copy_checkpoint(tmp_path)
    edit_tensors(folder, drop=("confidence_head.proj.bias",))
    drafter = DSparkDrafter.from_pretrained(folder)
    assert drafter.confidence_head.proj.bias is None


def make_pair(**options):
    """A target and a drafter that carries copies of its embedding and head."""
    target, drafter = make_target(**options), make_drafter()
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        drafter.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return target, drafter


@pytest.mark.parametrize("as_modules", [True, False])
def test_binding_identical_copies_gives_them_up(tmp_path, as_modules):
    """B084: the same modules afterwards, less memory, the same drafts, a smaller save."""
    target, drafter = make_pair()
    features = features_of(drafter)
    expected = drafter(features, ANCHOR)
    before = sum(parameter.numel() for parameter in drafter.parameters())
    if as_modules:
        bound = drafter.bind(
            input_embeddings=target.get_input_embeddings(),
            output_embeddings=target.get_output_embeddings(),
        )
    else:
        bound = drafter.bind(target)
    assert bound is drafter
    assert drafter.get_input_embeddings() is target.get_input_embeddings()
    assert drafter.get_output_embeddings() is target.get_output_embeddings()
    after = sum(parameter.numel() for parameter in drafter.parameters())
    assert before - after == 2 * 97 * 32
    torch.testing.assert_close(drafter(features, ANCHOR).logits, expected.logits)
    drafter.save_pretrained(tmp_path)
    assert not {EMBEDDING, HEAD} & set(load_file(tmp_path / "model.safetensors"))
    # It can be loaded without the target, and drafts once it has one.
    loaded = DSparkDrafter.from_pretrained(tmp_path).bind(target)
    torch.testing.assert_close(loaded(features, ANCHOR).logits, expected.logits)


def test_binding_a_tied_target():
    """B084: a target that ties its two matrices lends both; nothing of it changes."""
    target = make_target(tie_word_embeddings=True)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drafter = make_drafter(stored=False).bind(target)
    assert drafter.get_input_embeddings().weight is drafter.get_output_embeddings().weight
    assert "lm_head.weight" not in drafter.state_dict()
    after = target.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("part", ["embedding", "output head"])
@pytest.mark.parametrize("difference", ["values", "dtype", "shape"])
def test_binding_a_differing_copy_is_refused(part, difference):
    """B084: told what differs, and the drafter is as it was, its other copy included."""
    target, drafter = make_pair()
    own = {name: value.clone() for name, value in drafter.state_dict().items()}
    module = (
        target.get_input_embeddings() if part == "embedding" else target.get_output_embeddings()
    )
    weight = module.weight.detach()
    if difference == "values":
        weight[3, 3] += 1e-3
    module.weight = torch.nn.Parameter(
        {"values": weight, "dtype": weight.bfloat16(), "shape": weight[:-1]}[difference]
    )
    with pytest.raises(ValueError, match=f"its own {part}.* Do not bind"):
        drafter.bind(target)
    assert drafter.config.stores_input_embeddings
    assert drafter.config.stores_output_embeddings
    after = drafter.state_dict()
    assert after.keys() == own.keys()
    assert all(torch.equal(after[name], own[name]) for name in own)
    assert drafter.get_input_embeddings() is drafter.embed_tokens


def test_generate_binds_for_the_call_only():
    """B034, B084: a drafter without copies borrows the target's and keeps nothing of it."""
    target, drafter = make_target(), make_drafter(stored=False)
    prompt = make_prompt()
    expected = target.generate(prompt, max_new_tokens=6, do_sample=False)
    found = target.generate(prompt, max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert torch.equal(found, expected)
    assert drafter.get_input_embeddings() is None
    assert drafter.get_output_embeddings() is None


@pytest.mark.parametrize("overrides", [{"hidden_size": 64}, {"vocab_size": 60}])
def test_binding_another_targets_modules_is_refused(overrides):
    """B084, B111: both shapes named, and the drafter stays unbound."""
    drafter = make_drafter(stored=False)
    with pytest.raises(ValueError, match=r"has shape .* this drafter needs \(97, 32\)"):
        drafter.bind(make_target("qwen3", **overrides))
    assert drafter.get_input_embeddings() is None


def test_the_vocabulary_of_a_drafter_is_fixed():
    """B084: neither its own modules nor a bound target's are resized or replaced."""
    target = make_target("qwen3")
    drafter = make_drafter(stored=False).bind(target)
    with pytest.raises(TypeError, match="cannot be resized"):
        drafter.resize_token_embeddings(110)
    with pytest.raises(TypeError, match="not replaced"):
        drafter.set_input_embeddings(torch.nn.Embedding(97, 32))
    with pytest.raises(TypeError, match="not replaced"):
        drafter.set_output_embeddings(torch.nn.Linear(32, 97))
    assert target.get_input_embeddings().weight.shape == (97, 32)


def test_binding_leaves_a_shared_config_alone(tmp_path):
    """B034: another drafter built from the same config still saves what it stores."""
    target = make_target("qwen3", tie_word_embeddings=False)
    first = make_drafter()
    second = DSparkDrafter(first.config).eval()
    first.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    first.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    first.bind(target)
    second.save_pretrained(tmp_path)
    assert same_weights(DSparkDrafter.from_pretrained(tmp_path), second)
