"""`pipeline("text-generation", …, assistant_model=…)`, in every form."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from checkpoints import (
    EAGLE3,
    VANILLA,
    copy_checkpoint,
    edit_config,
    edit_tensors,
    no_weights_loaded,
)
from dspark_hf import (
    DSparkDrafter,
    Eagle3Drafter,
    UnsupportedCheckpointError,
    collect_statistics,
    export_drafter,
)
from dspark_hf.cli.models import load_pair
from tiny import VOCAB, make_drafter, make_eagle3, make_target

TEXT = "w5 w17 w30 w44"
GREEDY = {"do_sample": False, "return_full_text": False}


def make_tokenizer(vocab_size=VOCAB):
    """One word per id."""
    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w1")


def make_pipeline(target, assistant=None, tokenizer=None, **options):
    options = {} if assistant is None else {"assistant_model": assistant, **options}
    vocab_size = target.config.get_text_config().vocab_size
    return pipeline(
        "text-generation",
        model=target,
        tokenizer=tokenizer or make_tokenizer(vocab_size),
        **options,
    )


def text_of(pipe, text=TEXT, **options):
    return pipe(text, **{**GREEDY, "max_new_tokens": 10, **options})[0]["generated_text"]


def published_pair(folder):
    """A folder in DeepSpec's layout without tokenizer files, and a target that it fits."""
    drafter = DSparkDrafter.from_pretrained(copy_checkpoint(folder))
    target = make_target(
        vocab_size=160, num_hidden_layers=drafter.config.num_target_layers, eos_token_id=1
    )
    return str(folder), target


@pytest.mark.parametrize("form", ["object", "own path", "published path", "published, no head"])
def test_every_form_of_a_drafter(tmp_path, form):
    """B076, B099: the target's own text, a drafter in use, no second tokenizer."""
    if form.startswith("published"):
        assistant, target = published_pair(tmp_path)
        if form == "published, no head":
            edit_tensors(tmp_path, drop=("embed_tokens.weight", "lm_head.weight"))
    else:
        assistant, target = make_drafter(), make_target()
        if form == "own path":
            assistant.save_pretrained(tmp_path)
            assistant = str(tmp_path)
    expected = text_of(make_pipeline(target))
    pipe = make_pipeline(target, assistant)
    assert type(pipe.assistant_model) is DSparkDrafter
    assert pipe.assistant_tokenizer is None
    with collect_statistics() as statistics:
        found = text_of(pipe)
    assert found == expected
    assert len(found.split()) == 10
    assert statistics.drafted > 0


@pytest.mark.parametrize("form", ["object", "own path", "published path"])
def test_every_form_of_an_eagle3_drafter(tmp_path, form):
    """B076: the files tell which class reads them."""
    if form == "published path":
        assistant = str(copy_checkpoint(tmp_path, EAGLE3))
        target = make_target(vocab_size=160, num_hidden_layers=8, eos_token_id=1)
    else:
        assistant, target = make_eagle3(), make_target()
        if form == "own path":
            assistant.save_pretrained(tmp_path)
            assistant = str(tmp_path)
    pipe = make_pipeline(target, assistant)
    assert type(pipe.assistant_model) is Eagle3Drafter
    with collect_statistics() as statistics:
        assert text_of(pipe) == text_of(make_pipeline(target))
    assert statistics.drafted > 0


def test_taps_that_follow_from_the_depth_of_the_target(tmp_path):
    """T2: EAGLE-3 files without tap ids, in a pipeline and in the commands, which have a target."""
    target = make_target(num_hidden_layers=8)
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    folder = tmp_path / "drafter"
    export_drafter(make_eagle3(num_target_layers=None), folder, "speculators", target_name="o/t")
    edit_config(folder, eagle_aux_hidden_state_layer_ids=None)
    pair = load_pair(str(tmp_path / "target"), str(folder), "float32", 1)
    pipe = make_pipeline(target, str(folder))
    for drafter in (pair.drafter, pipe.assistant_model):
        assert drafter.config.target_layer_ids == [1, 3, 4]
    assert text_of(pipe) == text_of(make_pipeline(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_is_loaded_in_the_dtype_of_the_target(tmp_path, dtype):
    """B092."""
    make_drafter().save_pretrained(tmp_path)
    pipe = make_pipeline(make_target().to(dtype), str(tmp_path))
    assert pipe.assistant_model.dtype == dtype
    assert pipe.assistant_model.device == pipe.model.device
    assert text_of(pipe)


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 20, "max_new_tokens": None},
        {"max_length": 20},
        {"max_length": 20, "max_new_tokens": 7},
        {"max_new_tokens": 1},
        {"max_new_tokens": 9},
    ],
)
def test_the_rule_between_the_two_lengths_is_the_hosts(options):
    """B029: whichever of `max_length` and `max_new_tokens` wins without a drafter wins with it."""
    target = make_target()
    lengths = []
    for assistant in (None, make_drafter()):
        pipe = make_pipeline(target, assistant)
        call = {key: value for key, value in options.items() if value is not None}
        lengths.append(len(pipe(TEXT, **GREEDY, **call)[0]["generated_text"].split()))
    assert lengths[0] == lengths[1] > 0


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize("pad", [None, 7])
def test_special_tokens_of_the_drafter_need_not_be_the_targets(tmp_path, pad, as_path):
    """B077: the host would demand a second tokenizer."""
    drafter = make_drafter(pad_token_id=pad, bos_token_id=3)
    if as_path:
        drafter.save_pretrained(tmp_path)
        drafter = str(tmp_path)
    target = make_target()
    assert target.config.pad_token_id != pad
    assert text_of(make_pipeline(target, drafter)) == text_of(make_pipeline(target))


def test_a_second_tokenizer_is_refused():
    """B077, B078: drafters work on the target's ids."""
    with pytest.raises(ValueError, match="target's own token ids; leave assistant_tokenizer out"):
        make_pipeline(make_target(), make_drafter(), assistant_tokenizer=make_tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 6}, "decoder layers is 6, the drafter expects 4"),
        ({"hidden_size": 48}, "hidden size is 48, the drafter expects 32"),
        ({"vocab_size": 50}, "vocabulary is 50, the drafter expects 97"),
    ],
)
@pytest.mark.parametrize("as_path", [True, False])
def test_a_wrong_pair_is_refused_at_construction(tmp_path, options, message, as_path):
    """B078, B111: both values, before any text is asked for."""
    drafter = make_drafter()
    if as_path:
        drafter.save_pretrained(tmp_path)
        drafter = str(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_pipeline(make_target(**options), drafter)


def test_an_unreadable_drafter_is_refused_by_name(tmp_path):
    """B075: not handed to the host, which would build a small model of it."""
    copy_checkpoint(tmp_path, VANILLA)
    edit_config(tmp_path, architectures=["K3DSparkModel"])
    target = make_target()
    with no_weights_loaded(), pytest.raises(UnsupportedCheckpointError, match="Kimi K3"):
        make_pipeline(target, str(tmp_path))


def test_a_path_that_holds_nothing(tmp_path):
    """The path is named."""
    with pytest.raises(OSError, match=rf"No config\.json of {tmp_path}"):
        make_pipeline(make_target(), str(tmp_path))


@pytest.mark.parametrize("as_path", [True, False])
def test_an_ordinary_assistant_still_goes_to_the_host(tmp_path, as_path):
    """B103: a small model of the same family drafts as it always did."""
    target, assistant = make_target(), make_target(seed=5, num_hidden_layers=1)
    if as_path:
        assistant.save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        assistant = str(tmp_path)
    pipe = make_pipeline(target, assistant)
    assert type(pipe.assistant_model) is type(target)
    with collect_statistics() as statistics:
        assert text_of(pipe) == text_of(make_pipeline(target))
    assert statistics.rounds == 0


def test_without_an_assistant_nothing_is_loaded():
    """B103."""
    pipe = make_pipeline(make_target())
    assert pipe.assistant_model is None
    assert len(text_of(pipe).split()) == 10


def test_several_texts_one_after_the_other():
    """The pipeline's own loop over its inputs."""
    target = make_target()
    texts = [TEXT, "w9 w8", "w33"]
    pipe, plain = make_pipeline(target, make_drafter()), make_pipeline(target)
    assert [text_of(pipe, text) for text in texts] == [text_of(plain, text) for text in texts]
    found = pipe(texts, **GREEDY, max_new_tokens=6)
    expected = plain(texts, **GREEDY, max_new_tokens=6)
    assert found == expected


def test_several_texts_in_one_batch():
    """B055: padded on the left by the pipeline; every text is the one it would be alone."""
    texts = [TEXT, "w9", "w12 w80 w33 w5 w61", "w7 w7", "w20 w21 w22"]
    target = make_target()
    expected = [text_of(make_pipeline(target), text) for text in texts]
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    pipe = make_pipeline(target, make_drafter(), tokenizer)
    with collect_statistics() as statistics:
        found = pipe(texts, batch_size=3, max_new_tokens=10, **GREEDY)
    assert [text[0]["generated_text"] for text in found] == expected
    assert statistics.calls == 2
    assert statistics.drafted > 0


def test_fields_reach_the_drafter():
    """B094: as options of a call."""
    pipe = make_pipeline(make_target(), make_drafter())
    with collect_statistics() as statistics:
        text_of(pipe, num_assistant_tokens=1)
    assert max(statistics.verify_lengths) == 1
