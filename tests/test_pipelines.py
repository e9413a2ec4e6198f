"""`pipeline(..., assistant_model=…)`: an object, our layout, a published layout."""

import pytest
from test_stopping import character_tokenizer
from transformers import pipeline

from checkpoints import edit_config
from dspark_hf import collect_statistics
from tiny import make_drafter, make_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    make_target("qwen3").save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    drafter = make_drafter()
    drafter.save_pretrained(folder / "own")
    drafter.save_pretrained(folder / "published")
    # The same weights as DeepSpec publishes them: a copy of the target's config, no tokenizer.
    config = {
        **drafter.config.backbone_config.to_dict(),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "mask_token_id": 96,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    (folder / "published" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def generate(folders, assistant, **options):
    model, tokenizer = make_target("qwen3"), character_tokenizer()
    if options.pop("pad", False):
        model.config.pad_token_id = 5
    generator = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, assistant_model=assistant
    )
    with collect_statistics() as statistics:
        text = generator("buoy", do_sample=False, **options)[0]["generated_text"]
    return text, statistics


@pytest.mark.parametrize("kind", ["object", "own", "published"])
def test_every_form_of_a_drafter(folders, kind):
    """B076: the text is the target's, and speculation ran."""
    assistant = make_drafter() if kind == "object" else str(folders / kind)
    plain, _ = generate(folders, None, max_new_tokens=12)
    text, statistics = generate(folders, assistant, max_new_tokens=12)
    assert text == plain
    assert statistics.drafted > 0
    assert len(text) == 16


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": 5}, {"max_length": 9, "max_new_tokens": None}]
)
def test_length_rules_are_the_hosts(folders, limit):
    """B029."""
    plain, _ = generate(folders, None, **limit)
    text, _ = generate(folders, make_drafter(), **limit)
    assert text == plain
    assert len(text) == 9


def test_a_differing_pad_token_needs_no_tokenizer(folders):
    """B077."""
    text, statistics = generate(folders, make_drafter(pad_token_id=1), max_new_tokens=6, pad=True)
    assert len(text) == 10
    assert statistics.rounds > 0


def test_fields_reach_the_drafter(folders):
    """B094: as options of a call."""
    options = {"max_new_tokens": 12, "num_assistant_tokens": 1}
    _, statistics = generate(folders, make_drafter(), **options)
    assert max(statistics.verify_lengths) == 1


def test_an_assistant_tokenizer_is_refused(folders):
    """B076: there is nothing to translate."""
    with pytest.raises(ValueError, match="leave assistant_tokenizer out"):
        pipeline(
            "text-generation",
            model=make_target("qwen3"),
            tokenizer=character_tokenizer(),
            assistant_model=make_drafter(),
            assistant_tokenizer=character_tokenizer(),
        )


def test_a_wrong_pair_is_refused_when_the_pipeline_is_built(folders):
    """B111."""
    with pytest.raises(ValueError, match="another target"):
        pipeline(
            "text-generation",
            model=make_target("qwen3", num_hidden_layers=3),
            tokenizer=character_tokenizer(),
            assistant_model=str(folders / "own"),
        )


def test_an_ordinary_assistant_goes_to_the_host(folders):
    """B103: a path and an object, as without this package."""
    plain, _ = generate(folders, None, max_new_tokens=8)
    for assistant in (str(folders / "target"), make_target("qwen3")):
        text, statistics = generate(folders, assistant, max_new_tokens=8)
        assert text == plain
        assert statistics.calls == 0
