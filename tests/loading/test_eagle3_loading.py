"""Eagle3 checkpoints: DeepSpec's layout and ours, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from checkpoints import (
    EAGLE3,
    GOLDEN,
    VANILLA,
    copy_checkpoint,
    edit_tensors,
    no_weights_loaded,
    same_weights,
    shard,
)
from dspark_hf import DSparkDrafter, Eagle3Config, Eagle3Drafter, UnsupportedCheckpointError
from dspark_hf.loading.description import describe
from dspark_hf.loading.detection import detect_dialect, is_eagle3, is_foreign_drafter
from tiny import VOCAB, make_eagle3, make_target

ARCHITECTURES = {
    "Qwen3Eagle3Model": {"architectures": ["Qwen3Eagle3Model"]},
    "Eagle3DraftModel": {"architectures": ["Eagle3DraftModel"], "ttt_length": 5},
}


def refuse(source, message, error=ValueError, cls=Eagle3Drafter, **options):
    with no_weights_loaded(), pytest.raises(error, match=message) as caught:
        cls.from_pretrained(source, **options)
    return str(caught.value)


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_the_published_layout_is_read(tmp_path, architecture):
    """B074, B075: the facts of the config, no key missing, unexpected or random."""
    folder = copy_checkpoint(tmp_path, EAGLE3, **ARCHITECTURES[architecture])
    drafter, info = Eagle3Drafter.from_pretrained(folder, output_loading_info=True)
    assert type(drafter) is Eagle3Drafter
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    stored, loaded = load_file(folder / "model.safetensors"), drafter.state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    config = drafter.config
    assert (config.block_size, config.vocab_size, config.num_target_layers) == (5, 160, 8)
    assert list(config.target_layer_ids) == [0, 1, 3, 4, 6]
    assert config.backbone_config.rope_parameters["rope_theta"] == 10000.0
    assert (config.bos_token_id, config.eos_token_id) == (0, 1)
    assert config.draft_vocab_size is None
    assert not drafter.training


def test_embedding_and_head_are_bound_where_the_file_has_none(tmp_path):
    """B079: decided by the tensors, whatever the layout."""
    folder = copy_checkpoint(tmp_path, EAGLE3)
    edit_tensors(folder, drop=("embed_tokens.weight", "lm_head.weight"))
    drafter = Eagle3Drafter.from_pretrained(folder)
    assert drafter.embed_tokens is None
    assert drafter.lm_head is None
    with pytest.raises(ValueError, match=r"no copy of an embedding.*drafter\.bind\(target\)"):
        drafter.new_context(1)
    features, ids = torch.randn(1, 4, 160), torch.randint(160, (1, 4))
    stored = load_file(GOLDEN / EAGLE3 / "model.safetensors")
    drafter.bind(
        input_embeddings=torch.nn.Embedding.from_pretrained(stored["embed_tokens.weight"]),
        output_embeddings=_linear(stored["lm_head.weight"]),
    )
    full = Eagle3Drafter.from_pretrained(GOLDEN / EAGLE3)
    torch.testing.assert_close(drafter(features, ids).logits, full(features, ids).logits)


def _linear(weight):
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = torch.nn.Parameter(weight)
    return head


def test_own_layout_round_trip(tmp_path):
    """B077, B127: saved, resolved by every auto class, equal; in shards too."""
    drafter = Eagle3Drafter.from_pretrained(GOLDEN / EAGLE3)
    drafter.generation_config.dspark_draft_sampling = "greedy"
    drafter.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is Eagle3Config
    assert config.backbone_config.to_dict() == drafter.config.backbone_config.to_dict()
    shard(tmp_path)
    for cls in (Eagle3Drafter, AutoModel, AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path)
        assert type(loaded) is Eagle3Drafter
        assert same_weights(loaded, drafter)
        assert loaded.config.block_size == 5
        assert loaded.generation_config.dspark_draft_sampling == "greedy"
    assert detect_dialect(config.to_dict(), "here") == "dspark_eagle3"
    assert not is_foreign_drafter(config.to_dict())


def test_a_reduced_vocabulary_travels_with_the_drafter(tmp_path):
    """B040, B081."""
    drafter = make_eagle3(draft_vocab_size=20)
    drafter.draft_to_target.copy_(torch.arange(20) * 4)
    drafter.save_pretrained(tmp_path)
    loaded = Eagle3Drafter.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.draft_to_target, torch.arange(20) * 4)
    assert loaded.lm_head.weight.shape[0] == loaded.config.draft_vocab_size == 20
    block = loaded(torch.randn(1, 4, 96), torch.randint(VOCAB, (1, 4)))
    assert block.logits.shape == (1, 4, VOCAB)
    assert block.base_logits.shape == (1, 4, 20)
    undraftable = torch.ones(VOCAB, dtype=torch.bool)
    undraftable[loaded.draft_to_target] = False
    assert torch.isneginf(block.logits[..., undraftable]).all()
    edit_tensors(tmp_path, draft_to_target=torch.full((20,), 3))
    with pytest.raises(ValueError, match="20 different token ids from 0 to 96"):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_description():
    """`inspect` knows the family and has nothing of blocks to tell."""
    found = describe(str(GOLDEN / EAGLE3))
    assert found["family"] == "eagle3"
    assert found["dialect"] == "deepspec_eagle3"
    assert (found["block_size"], found["num_draft_layers"], found["num_tensors"]) == (5, 1, 16)
    names = ("feature_norm", "norm_before_residual", "recycles_normed_output")
    assert [found[name] for name in names] == [None, False, False]
    assert "mask_token_id" not in found
    assert "markov_head" not in found
    ours = {"ttt_length", "step_loss_decay", "target_layer_ids", "draft_num_hidden_layers"}
    assert not ours & set(found["ignored_config_keys"])


def test_parameters_of_the_published_size():
    """The 4B drafter on the meta device: 16 tensors, 927,344,896 elements."""
    backbone = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    config = Eagle3Config(
        backbone_config=backbone,
        block_size=7,
        target_layer_ids=[1, 9, 17, 25, 33],
        num_target_layers=36,
        target_hidden_size=2560,
        vocab_size=151936,
    )
    with torch.device("meta"):
        state = Eagle3Drafter(config).state_dict()
    assert len(state) == 16
    assert sum(tensor.numel() for tensor in state.values()) == 927_344_896


# -- what is refused -------------------------------------------------------------------------------


def test_the_wrong_class_names_the_right_one(tmp_path):
    """B074: in both directions, for published and own files, before weights are looked for."""
    folder = copy_checkpoint(tmp_path / "eagle3", EAGLE3)
    (folder / "model.safetensors").unlink()
    text = refuse(
        folder, r"is an Eagle3 drafter.*Qwen3Eagle3Model", UnsupportedCheckpointError, DSparkDrafter
    )
    assert f"dspark_hf.Eagle3Drafter.from_pretrained('{folder}')" in text
    make_eagle3().save_pretrained(tmp_path / "own")
    refuse(tmp_path / "own", r"layout dspark_eagle3", cls=DSparkDrafter)
    block = copy_checkpoint(tmp_path / "block", VANILLA)
    text = refuse(block, "is a block drafter.*Qwen3DSparkModel", UnsupportedCheckpointError)
    assert "dspark_hf.DSparkDrafter.from_pretrained" in text


@pytest.mark.parametrize("architecture", ["Qwen3Eagle3Model", "Gemma4Eagle3Model"])
def test_auto_classes_do_not_build_a_small_model(tmp_path, architecture):
    """B075: and the message names the call that reads it."""
    folder = copy_checkpoint(tmp_path, EAGLE3, architectures=[architecture])
    with pytest.raises(ValueError, match=rf"is a drafter \({architecture}\).*Eagle3Drafter\.from"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "raw",
    [
        {"architectures": ["Eagle3DraftModel"]},
        {"architectures": ["Qwen3Eagle3Model"], "dspark_block_size": 5},
    ],
    ids=str,
)
def test_other_layouts_are_not_taken_for_this_one(raw):
    """B071: the order of detection."""
    with pytest.raises(UnsupportedCheckpointError):
        detect_dialect(raw, "here")
    assert is_foreign_drafter(raw)


@pytest.mark.parametrize(
    ("raw", "dialect"),
    [
        ({"architectures": ["Qwen3Eagle3Model"]}, "deepspec_eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        (
            {"speculators_model_type": "eagle3", "architectures": ["Qwen3Eagle3Model"]},
            "speculators_eagle3",
        ),
    ],
    ids=str,
)
def test_which_layout_of_eagle3_it_is(raw, dialect):
    """B071: the container says more than the architecture does."""
    assert detect_dialect(raw, "here") == dialect
    assert is_eagle3(raw)
    assert is_foreign_drafter(raw)


def test_only_eagle3_is_eagle3():
    assert is_eagle3({"model_type": "dspark_eagle3"})
    assert is_eagle3({"model_type": "gemma4_text", "architectures": ["Gemma4Eagle3Model"]})
    assert not is_eagle3({"model_type": "qwen3", "architectures": ["Eagle3DraftModel"]})
    assert not is_eagle3({"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]})


@pytest.mark.parametrize(
    "key", ["ttt_length", "target_layer_ids", "num_target_layers", "vocab_size", "head_dim"]
)
def test_a_missing_fact_is_not_guessed(tmp_path, key):
    """B069, B070."""
    folder = copy_checkpoint(tmp_path, EAGLE3, **{key: ...})
    refuse(folder, f"config.json lacks {key}.*not guessed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "layers is 2, and the weights hold 1 draft",
        ),
        (
            {
                "layer_types": ["sliding_attention"],
                "sliding_window": 4,
                "use_sliding_window": True,
            },
            r"layer_types is \['sliding_attention'\].*attends to all positions",
        ),
        ({"draft_vocab_size": 80}, "draft_vocab_size is 80 and vocab_size 160"),
        ({"target_layer_ids": [0, 1, 3, 6, 4]}, "must be strictly increasing"),
        ({"target_layer_ids": [0, 1, 3, 4, 8]}, "contains 8, but a target of 8 layers"),
        ({"target_layer_ids": [-1, 1, 3, 4, 6]}, "count the target's layers from 0"),
        ({"target_layer_ids": [0, 1, 3, 4]}, r"fc.weight has shape \(32, 160\).*\(32, 128\)"),
        ({"ttt_length": 0}, "block_size must be an integer of at least 1, found 0"),
        ({"model_type": "llama"}, "goes with model_type qwen3 .*found 'llama'"),
    ],
)
def test_contradictions(tmp_path, changes, message):
    """B070, B074: what was found and what fits."""
    refuse(copy_checkpoint(tmp_path, EAGLE3, **changes), message)


@pytest.mark.parametrize("tensor", ["fc.weight", "layers.0.hidden_norm.weight"])
def test_incomplete_weights(tmp_path, tensor):
    """B074: nothing is left random."""
    folder = copy_checkpoint(tmp_path, EAGLE3)
    edit_tensors(folder, drop=(tensor,))
    refuse(folder, f"missing {tensor}")


def test_a_config_that_lacks_a_fact():
    with pytest.raises(ValueError, match="Eagle3Config needs `block_size`, and it is missing"):
        make_eagle3(block_size=None)


def test_a_drafter_does_not_generate():
    with pytest.raises(TypeError, match="does not generate on its own"):
        make_eagle3().generate()
    assert make_target().can_generate()
