"""The hook reaches our loop for our drafters, and is not there for anybody else."""

import copy
import threading

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from dspark_hf.generation import hook
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)


def greedy(target, **options):
    return target.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)


@pytest.fixture
def without_hook():
    hook.uninstall(GenerationMixin)
    yield
    hook.install(GenerationMixin)


def test_uninstall_and_install_leave_one_layer(without_hook):
    """B103: reversible, and idempotent."""
    originals = [getattr(GenerationMixin, name) for name in (hook._VALIDATE, hook._DECODE)]
    assert not any(hasattr(method, "dspark_original") for method in originals)
    for _ in range(3):
        hook.install(GenerationMixin)
    wrapped = [getattr(GenerationMixin, name) for name in (hook._VALIDATE, hook._DECODE)]
    assert [method.dspark_original for method in wrapped] == originals
    hook.uninstall(GenerationMixin)
    hook.uninstall(GenerationMixin)
    assert [getattr(GenerationMixin, name) for name in (hook._VALIDATE, hook._DECODE)] == originals


def test_custom_generate_needs_no_hook(without_hook):
    """B103: the host's official extension point runs the same loop."""
    target = make_target("qwen3")
    expected = greedy(target)
    drafter = make_scripted(make_drafter(), expected, 3)
    output = greedy(target, custom_generate=drafter.custom_generate(), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.accepted > 0


def test_plain_generate_and_other_assistants_are_untouched():
    """B103: same text and same statistics-free outputs with and without the hook."""
    target, assistant = make_target("qwen3"), make_target("qwen3", seed=5)
    results = []
    for install in (hook.install, hook.uninstall):
        install(GenerationMixin)
        torch.manual_seed(0)
        results.append(
            [
                greedy(target),
                greedy(target, assistant_model=assistant),
                greedy(target, prompt_lookup_num_tokens=3),
                target.generate(PROMPT, max_new_tokens=12, do_sample=True),
                target.generate(PROMPT, max_new_tokens=12, num_beams=2, do_sample=False),
            ]
        )
    hook.install(GenerationMixin)
    for with_hook, plain in zip(*results, strict=True):
        assert torch.equal(with_hook, plain)
    assert "dspark" not in str(GenerationConfig().to_dict())


def test_user_objects_come_back_unchanged():
    """B034, B096: target, drafter, configs and tensors, compared field by field."""
    target, drafter = make_target("qwen3"), make_drafter()
    drafter.generation_config.num_assistant_tokens = 3
    config = GenerationConfig(max_new_tokens=8, dspark_confidence_threshold=0.3)
    mask, ids = torch.ones_like(PROMPT), PROMPT.clone()

    def state():
        configs = (target.config, target.generation_config, drafter.config)
        configs += (drafter.generation_config, config)
        return (
            [copy.deepcopy(c.to_dict()) for c in configs],
            [{k: v.clone() for k, v in model.state_dict().items()} for model in (target, drafter)],
            [sorted(vars(model)) for model in (target, drafter)],
            [len(module._forward_hooks) for module in target.modules()],
            [len(module._forward_pre_hooks) for module in target.modules()],
        )

    before = state()
    target.generate(ids, attention_mask=mask, generation_config=config, assistant_model=drafter)
    after = state()
    assert before[0] == after[0]
    for old, new in zip(before[1], after[1], strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert before[2:] == after[2:]
    assert torch.equal(ids, PROMPT)
    assert bool((mask == 1).all())


class Failing(LogitsProcessor):
    """Raises on its n-th call."""

    def __init__(self, at):
        self.calls_left = at

    def __call__(self, input_ids, scores):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise RuntimeError("stop here")
        return scores


@pytest.mark.parametrize("at", [0, 1, 3, 9])
def test_taps_are_removed_when_generation_fails(at):
    """B034: no hook is left on the target on any way out."""
    target = make_target("qwen3")
    with pytest.raises(RuntimeError, match="stop here"):
        greedy(
            target,
            assistant_model=make_drafter(taps=(-1, 2)),
            logits_processor=LogitsProcessorList([Failing(at)]),
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_threads_share_a_target_and_a_drafter():
    """B103: four threads, four prompts; each thread's taps read its own forwards."""
    target, drafter = make_target("qwen3"), make_drafter()
    prompts = [make_prompt(4 + i, seed=i) for i in range(4)]

    def run(prompt):
        return target.generate(
            prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip

    serial = [run(prompt) for prompt in prompts]
    results = [[] for _ in prompts]

    def work(i):
        for _ in range(3):
            results[i].append(run(prompts[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(serial, results, strict=True):
        assert len(found) == 3
        for output in found:
            assert torch.equal(output.sequences, expected.sequences)
            # The drafter read the right features: it was right equally often.
            assert output.statistics.accepted_at == expected.statistics.accepted_at
    assert not any(module._forward_hooks for module in target.modules())


REFUSED_MODES = {
    "num_beams": ({"num_beams": 2}, "num_beams=2"),
    "use_cache": ({"use_cache": False}, "use_cache=False"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    "early_exit": ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
    "mtp": ({"use_mtp": True}, "use_mtp=True"),
    "speculation_type": ({"speculation_type": "dflash"}, "speculation_type='dflash'"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
}  # fmt: skip


# The host itself rejects or replaces the other modes before it asks a callable.
REFUSED_IN_A_CALLABLE = ("num_beams", "use_cache", "speculation_type", "ensemble")


@pytest.mark.parametrize(
    ("name", "route"),
    [(name, "assistant_model") for name in REFUSED_MODES]
    + [(name, "custom_generate") for name in REFUSED_IN_A_CALLABLE],
)
@pytest.mark.filterwarnings("ignore")
def test_modes_without_speculation_are_refused_before_compute(name, route):
    """B061, B054."""
    options, message = REFUSED_MODES[name]
    target, drafter = make_target("qwen3"), make_drafter()
    calls = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    value = drafter if route == "assistant_model" else drafter.custom_generate()
    options = {"do_sample": False, route: value, **options}
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, max_new_tokens=4, **options)
    assert not calls


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ({"hidden_size": 48}, ("48", "32")),
        ({"num_hidden_layers": 3}, ("3", "4")),
        ({"vocab_size": 60}, ("60", "97")),
    ],
    ids=["hidden", "depth", "vocabulary"],
)
@pytest.mark.parametrize("route", ["assistant_model", "custom_generate"])
def test_another_target_is_refused_with_both_numbers(overrides, numbers, route):
    """B070, B078, B111."""
    target, drafter = make_target("qwen3", **overrides), make_drafter()
    value = drafter if route == "assistant_model" else drafter.custom_generate()
    with pytest.raises(ValueError, match="another target") as error:
        target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, **{route: value})
    assert all(number in str(error.value) for number in numbers)


def test_a_drafter_without_weights_is_refused():
    with pytest.raises(ValueError, match=r"no weights in memory \(device 'meta'\)"):
        make_target("qwen3").generate(
            make_prompt(6), assistant_model=make_drafter().to("meta"), max_new_tokens=4
        )


def test_a_name_in_place_of_a_drafter_is_refused_with_the_way_to_load_it():
    with pytest.raises(TypeError, match=r"DSparkDrafter\.from_pretrained\('some/drafter'\)"):
        make_target().generate(make_prompt(4), assistant_model="some/drafter", max_new_tokens=4)


def test_stop_tokens_of_another_version_warn_once(caplog):
    """B077: the output stays the target's own."""
    target = make_target("qwen3")
    target.generation_config.eos_token_id = 7
    drafter = make_drafter(eos_token_id=8)
    for _ in range(2):
        greedy(target, assistant_model=drafter)
    warnings = [r for r in caplog.records if "stop tokens" in r.message]
    assert len(warnings) == 1
    assert "[8]" in warnings[0].message
    assert "[7]" in warnings[0].message


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_in_the_target_is_an_error(do_sample):
    """B009: no token is made up."""
    target = make_target("qwen3")
    with torch.no_grad():
        target.lm_head.weight[5] = float("nan")
    with pytest.raises((ValueError, RuntimeError), match=r"NaN|nan"):
        target.generate(
            PROMPT, max_new_tokens=6, do_sample=do_sample, assistant_model=make_drafter()
        )


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_in_the_drafter_is_an_error(do_sample):
    """B009: named as the drafter's, not as the target's."""
    drafter = make_drafter()
    with torch.no_grad():
        drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="drafter's logits contain NaN"):
        make_target("qwen3").generate(
            PROMPT, max_new_tokens=6, do_sample=do_sample, assistant_model=drafter
        )


@pytest.mark.parametrize("num_right", [0, 3, 4])
@pytest.mark.parametrize("num_idle", [0, 1, 5])
def test_other_ranks_may_finish_later(monkeypatch, num_right, num_idle):
    """B063: a finished rank keeps stepping with the others, and its result stays as it was."""
    target = make_target("mistral_swa")
    expected = greedy(target, return_dict_in_generate=True)
    idle = []

    def unfinished(this_peer_finished, synced_gpus, device):
        # What the host's all-reduce says on a rank that `num_idle` steps of others outlast.
        assert synced_gpus
        if not this_peer_finished:
            return True
        idle.append(1)
        return len(idle) <= num_idle

    monkeypatch.setattr(target, "_has_unfinished_sequences", unfinished)
    calls = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    drafter = make_scripted(make_drafter(), expected.sequences, num_right)
    output = greedy(target, assistant_model=drafter, synced_gpus=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    # The last one is there for ranks whose rows ended at different places.
    assert len(calls) == 1 + output.statistics.rounds + num_idle + 1
    for layer, wanted in zip(output.cache.layers, expected.cache.layers, strict=True):
        assert layer.get_seq_length() == wanted.get_seq_length()
        torch.testing.assert_close(layer.keys, wanted.keys, atol=2e-4, rtol=1e-4)


def test_a_drafter_does_not_generate():
    """B075: the call that works is named."""
    with pytest.raises(TypeError, match=r"target\.generate"):
        make_drafter().generate(PROMPT)


def test_the_hosts_own_loop_accepts_the_candidate_generator():
    """B014: the class keeps the host's protocol, also inside the host's loop."""
    from dspark_hf import DSparkCandidateGenerator
    from dspark_hf.generation.settings import DraftSettings

    target = make_target("qwen3")
    expected = greedy(target)
    for num_right in range(5):
        drafter = make_scripted(make_drafter(), expected, num_right)
        settings = DraftSettings(4)
        with DSparkCandidateGenerator(
            target, drafter, settings, LogitsProcessorList(), do_sample=False, batch_size=1
        ) as generator:
            target._get_candidate_generator = lambda generator=generator, **kwargs: generator
            output = greedy(target, assistant_model=make_target("qwen3", seed=5))
        assert torch.equal(output, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("merged", [False, True])
def test_peft_wrapped_target(merged):
    """B109."""
    from peft import LoraConfig, get_peft_model

    target = get_peft_model(make_target("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    layer = target.base_model.model.model.layers[0]
    torch.nn.init.normal_(layer.self_attn.q_proj.lora_B["default"].weight)
    target = target.merge_and_unload() if merged else target
    expected = target.generate(input_ids=PROMPT, max_new_tokens=12, do_sample=False)
    drafter = make_scripted(make_drafter(), expected, 3)
    output = target.generate(
        input_ids=PROMPT, max_new_tokens=12, do_sample=False, assistant_model=drafter
    )
    assert torch.equal(output, expected)


def test_continuous_batching_does_not_ignore_the_drafter():
    """B060: refused before compute."""
    target = make_target("qwen3")
    calls = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.raises(ValueError, match=r"generate_batch .*would ignore"):
        target.generate_batch([PROMPT[0].tolist()], assistant_model=make_drafter())
    assert not calls
