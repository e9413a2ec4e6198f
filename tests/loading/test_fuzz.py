"""
Damaged checkpoints end in a clear error or a correct reading, never in a crash or a silent default.

2,600 mutations with a fixed seed: 2,200 of config.json, 400 of the weight file.
"""

import inspect
import json
import random
import shutil

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import (
    EAGLE3,
    GATED,
    GEMMA4,
    GOLDEN,
    VANILLA,
    copy_checkpoint,
    copy_folder,
    read_json,
)
from dspark_hf import DSparkDrafter, Eagle3Drafter, UnsupportedCheckpointError, export_drafter
from dspark_hf.loading.checkpoint import read_facts
from dspark_hf.loading.description import describe
from dspark_hf.loading.reading import UndecidedLayoutError, UnknownDepthError
from published import deepspec, lfm2, modelopt, specforge, zlab
from test_exporting_eagle3 import make_llama
from tiny import make_drafter, make_eagle3, make_target
from tiny_v4 import V4

SPECULATORS = GOLDEN.parent / "golden_speculators"
JUNK = (None, "", "x", -1, 0, 1, 7, 10**9, 1.5, True, False, [], [0], ["x"], {}, {"a": 1}, [[1]])
# What the readers raise, and nothing else: a bare TypeError or KeyError is a crash.
CLEAR = (ValueError, OSError, UnsupportedCheckpointError, UndecidedLayoutError, UnknownDepthError)
LAYER_FACTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)
# Keys that a file may leave out, with what their absence means in that layout. All other facts are
# stated by a key or the reading fails.
ABSENT_MEANS = {
    # Host configs: activation, biases, layers that all see everything.
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "sliding_window",
    "layer_types",
    "use_sliding_window",
    "dtype",
    "torch_dtype",
    "final_logit_softcapping",
    # Special tokens are compared where they are known.
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    # ModelOpt: no window, bidirectional blocks, infill without shifted labels.
    "use_swa",
    "causal",
    "shift_label",
    # speculators: a difference to the defaults of its classes.
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "norm_output",
    # Corrections of a rotary type.
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "full_attention",
    # Ours: neutral defaults of the config class.
    "anchor_predicts",
    "num_target_layers",
    "confidence_head",
    "confidence_head_with_markov",
    "confidence_head_bias",
}


def sources(folder):
    """One checkpoint of every layout."""
    make_drafter().save_pretrained(folder / "own")
    for name in (VANILLA, GATED, GEMMA4):
        copy_checkpoint(folder / name, name)
    for name in ("dspark_causal_reduced", "dspark_infill_sliding", "dflash_infill_reduced"):
        copy_folder(SPECULATORS / name, folder / name)
    zlab(folder / "zlab", windows=(5, None))
    zlab(folder / "zlab_nested", nested=True)
    specforge(folder / "specforge")
    modelopt(folder / "modelopt", swa=5, causal=True)
    lfm2(folder / "lfm2")
    make_eagle3().save_pretrained(folder / "own_eagle3")
    copy_checkpoint(folder / EAGLE3, EAGLE3)
    copy_folder(SPECULATORS / "eagle3_qwen3_full", folder / "eagle3_speculators")
    embedded(folder / V4)
    deepspec(folder / "fork", architectures=["DFlashDraftModel"])
    chain = make_llama(draft_vocab_size=40, feature_norm="per_tap")
    export_drafter(chain, folder / "eagle3_chain", "eagle3", target=make_target())
    return sorted(path for path in folder.iterdir() if path.is_dir())


def embedded(folder):
    """The drafter's part of a DeepSeek-V4 checkpoint; what is damaged of a target is not read."""
    folder.mkdir()
    shutil.copy(GOLDEN / V4 / "config.json", folder)
    shards = (load_file(path) for path in (GOLDEN / V4).glob("model-*"))
    tensors = {name: value for shard in shards for name, value in shard.items()}
    drafter = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    save_file(drafter, folder / "model.safetensors", metadata={"format": "pt"})


def paths_of(raw, prefix=()):
    """Every key of a nested object, as a path."""
    for key, value in raw.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, key))


def mutate(raw, chance):
    """Drop a key, null it or put something else there; returns what was done."""
    path = chance.choice(list(paths_of(raw)))
    section = raw
    for key in path[:-1]:
        section = section[key]
    if chance.random() < 0.3:
        del section[path[-1]]
        return path, ...
    value = chance.choice(JUNK)
    section[path[-1]] = value
    return path, value


def read(folder):
    """The facts, or the clear error that says why there are none."""
    cls = Eagle3Drafter if "eagle3" in folder.name else DSparkDrafter
    try:
        return read_facts(cls, str(folder), download_weights=True)
    except CLEAR as error:
        found = error
    assert type(found) in CLEAR, repr(found)
    assert len(str(found)) > 40, repr(found)
    return None


def facts_of(facts):
    """What drafting depends on; a host config carries other things along."""
    config, body = facts.config, facts.config.backbone_config
    names = [name for name in inspect.signature(type(config)).parameters if hasattr(config, name)]
    read = {name: getattr(config, name) for name in names if name != "backbone_config"}
    read |= {name: getattr(body, name, None) for name in LAYER_FACTS}
    return json.dumps(read, sort_keys=True, default=str)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = sources(tmp_path_factory.mktemp("fuzz"))
    return [(folder, read_json(folder / "config.json"), read(folder)) for folder in folders]


def test_every_source_is_read(checkpoints):
    """Otherwise the mutations below would show nothing."""
    assert len(checkpoints) == 18
    assert all(facts is not None for _, _, facts in checkpoints)
    assert len({facts.dialect for _, _, facts in checkpoints}) == 13


def test_a_description_says_where_every_fact_comes_from(checkpoints):
    """Of every layout: a key of config.json that is there, or what it follows from."""
    for folder, raw, _ in checkpoints:
        found = describe(str(folder))
        facts = list(found)[3 : list(found).index("num_tensors")]
        assert facts[0] == "family"
        assert facts[-1] == "draft_sampling"
        paths = {".".join(path) for path in paths_of(raw)}
        for fact in facts:
            origin = found["origins"][fact]
            assert origin.startswith("= ") or origin.split(" (")[0] in paths, (folder.name, fact)
        origins = found["origins"]
        assert not origins["target_layer_ids"].startswith("="), folder.name
        assert origins["vocab_size"] in paths, folder.name


def test_mutated_configs(checkpoints):
    """B069, B074, B083: 2,200 of them."""
    chance, read_anyway, refused = random.Random(20), 0, 0
    for number in range(2200):
        folder, raw, before = checkpoints[number % len(checkpoints)]
        changed = json.loads(json.dumps(raw))
        path, value = mutate(changed, chance)
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            facts = read(folder)
        finally:
            (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        refused += facts is None
        read_anyway += facts is not None
        if facts is None or value not in (..., None):
            continue
        is_same = facts_of(facts) == facts_of(before)
        said = facts.reading.warnings or facts.dialect != before.dialect
        assert is_same or said or path[-1] in ABSENT_MEANS, (folder.name, path)
    # Both outcomes are common, so the test sees something.
    assert min(read_anyway, refused) > 300


def test_mutated_weights(checkpoints, tmp_path):
    """400 files: cut short, bytes of the header changed, a tensor renamed, cut or retyped."""
    chance, refused = random.Random(21), 0
    for number in range(400):
        source, _, _ = checkpoints[number % len(checkpoints)]
        folder = tmp_path / source.name
        shutil.rmtree(folder, ignore_errors=True)
        copy_folder(source, folder)
        content = bytearray((source / "model.safetensors").read_bytes())
        length = int.from_bytes(content[:8], "little")
        kind = chance.choice(("cut", "noise", "rename", "shape", "dtype"))
        if kind == "cut":
            content = content[: chance.randrange(len(content))]
        elif kind == "noise":
            for _ in range(3):
                content[chance.randrange(8 + length)] = chance.randrange(256)
        else:
            header = json.loads(content[8 : 8 + length])
            name = chance.choice([key for key in header if key != "__metadata__"])
            if kind == "rename":
                header[f"{name}_"] = header.pop(name)
            elif kind == "shape":
                header[name]["shape"] = [*header[name]["shape"], 1]
            else:
                header[name]["dtype"] = "F8_E4M3"
            text = json.dumps(header).encode()
            content = len(text).to_bytes(8, "little") + text + content[8 + length :]
        (folder / "model.safetensors").write_bytes(content)
        facts = read(folder)
        refused += facts is None
        if facts is not None:
            # What is read in spite of it must be the tensors that the drafter has.
            assert kind == "noise" or facts.reading.unneeded, (source.name, kind)
    assert refused > 360
