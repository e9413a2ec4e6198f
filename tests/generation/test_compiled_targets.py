"""Targets that run compiled: exact, in whole graphs, and compiled anew only a few times."""

import pytest
import torch
from transformers import CompileConfig

from batches import make_prompts, pad_left, script_rows
from dspark_hf import collect_statistics
from dspark_hf.generation.compiling import compiled_widths, is_compiled
from dspark_hf.generation.taps import TargetTaps
from tiny import FAMILIES, make_drafter, make_target

OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def graphs(monkeypatch):
    """The graphs compiled so far; they run as they are."""
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    yield compiled, backend
    torch._dynamo.reset()


def run(target, expected, batch, prompts, num_right, taps=(0,), **options):
    width = batch["input_ids"].shape[1]
    texts = [row[width - p.shape[1] :] for row, p in zip(expected, prompts, strict=True)]
    drafter = make_drafter(taps=taps, num_target_layers=target.config.num_hidden_layers)
    drafter = script_rows(drafter, texts, num_right)
    with collect_statistics() as statistics:
        found = target.generate(**batch, assistant_model=drafter, **OPTIONS, **options)
    assert statistics.accepted > 4
    return found


def test_what_the_host_compiles_is_compiled_whole_and_seldom(graphs):
    """
    B107: the widths of a row that accepts some drafts, all of them and is cut by a threshold need a
    graph for one token and at most two for more; a second call needs none.
    """
    compiled, backend = graphs
    target, prompts = make_target(num_hidden_layers=2), make_prompts([6, 3])
    batch = pad_left(prompts)
    expected = target.generate(**batch, **OPTIONS)
    # Breaks in the graph are errors.
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    counts = []
    for more in ({}, {"dspark_confidence_threshold": 0.5}, {"prefill_chunk_size": 4}):
        found = run(target, expected, batch, prompts, [4, 1], **options, **more)
        assert torch.equal(found, expected)
        counts.append(len(compiled))
    assert 1 <= counts[0] <= 3
    assert counts[-1] <= 3
    output = run(target, expected, batch, prompts, [4, 1], return_dict_in_generate=True, **options)
    assert output.hidden_states is None


def test_what_the_caller_compiled_is_read_call_after_call(graphs):
    compiled, backend = graphs
    target, prompts = make_target(num_hidden_layers=1), make_prompts([6])
    batch = pad_left(prompts)
    expected = target.generate(**batch, **OPTIONS)
    target.forward = torch.compile(target.forward, backend=backend, dynamic=True)
    for _ in range(2):
        assert torch.equal(run(target, expected, batch, prompts, [2], taps=(-1,)), expected)
    assert 1 <= len(compiled) <= 4
    with pytest.raises(ValueError, match="prefill_chunk_size=4"):
        run(target, expected, batch, prompts, [2], taps=(-1,), prefill_chunk_size=4)
    with pytest.raises(ValueError, match=r"last layer, 0, which a compiled target"):
        run(target, expected, batch, prompts, [2], taps=(0,))


def test_layers_of_a_drafter_are_compiled_once(graphs):
    """B107: the context grows from round to round and from call to call."""
    compiled, backend = graphs
    target, prompts = make_target(), make_prompts([6])
    batch = pad_left(prompts)
    expected = target.generate(**batch, **OPTIONS)
    drafter = make_drafter()
    for layer in drafter.layers:
        layer.compile(backend=backend, dynamic=True)
    counts = []
    for prompt in (batch["input_ids"], expected[:, :10]):
        found = target.generate(prompt, assistant_model=drafter, max_length=22, do_sample=False)
        assert torch.equal(found, expected)
        counts.append(len(compiled))
    assert counts == [2, 2]


def test_a_compiled_part_makes_a_compiled_target():
    target = make_target(num_hidden_layers=2)
    assert not is_compiled(target)
    target.model.layers[1].compile(backend="eager")
    assert is_compiled(target)
    target = make_target(num_hidden_layers=2)
    target.compile(backend="eager")
    assert is_compiled(target)


def test_a_tapped_last_layer_leaves_the_target_uncompiled(graphs, caplog):
    compiled, backend = graphs
    target, prompts = make_target(num_hidden_layers=2), make_prompts([6])
    batch = pad_left(prompts)
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    expected = target.generate(**batch, **OPTIONS)
    assert torch.equal(run(target, expected, batch, prompts, [2], (0, 1), **options), expected)
    assert not compiled
    assert "the target runs uncompiled" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_hold_what_hooks_see(family):
    """The input of the first layer and the output of every layer but the last."""
    target, ids = make_target(family), make_prompts([7])[0]
    taps = [-1, 0, 1, 2]
    with torch.no_grad(), TargetTaps(target, taps) as reader:
        target(ids)
        hooked = reader.take()
    kwargs = {"output_hidden_states": [4]}
    with torch.no_grad(), TargetTaps(target, taps) as reader:
        reader.read_outputs(kwargs)
        outputs = target(ids, **kwargs)
        reader.read(outputs)
        assert torch.equal(reader.take(), hooked)
    assert outputs.hidden_states[4] is not None


def test_numbers_of_columns():
    assert compiled_widths(1) == (0, 1)
    assert compiled_widths(5) == (0, 1, 3, 5)
    assert compiled_widths(7) == (0, 1, 3, 7)
