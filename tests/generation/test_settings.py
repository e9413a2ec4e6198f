"""The `dspark_*` fields: three ways to set them, what wins, what they do."""

import pytest
import torch
from transformers import GenerationConfig

from dspark_hf import DSparkDrafter, collect_statistics
from tiny import make_drafter, make_prompt, make_scripted, make_target

PROMPT = make_prompt(6)


def statistics_of(target, drafter, **options):
    with collect_statistics() as statistics:
        target.generate(
            PROMPT,
            **{"max_new_tokens": 12, "do_sample": False, "assistant_model": drafter} | options,
        )
    return statistics


def set_confidence(drafter, value):
    """A head that says the same of every token."""
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(value)
    return drafter


def verified(statistics):
    """Lengths of rounds that drafted, the last ones excepted, which run out of room."""
    return {length for length, count in statistics.verify_lengths.items() if count}


@pytest.mark.parametrize("where", ["keyword", "config", "target", "drafter"])
def test_every_way_of_setting_a_field(where):
    """B094, B097."""
    target, drafter = make_target("qwen3"), make_drafter()
    fields = {"num_assistant_tokens": 2}
    options = {}
    if where == "keyword":
        options = fields
    elif where == "config":
        options = {
            "generation_config": GenerationConfig(max_new_tokens=12, do_sample=False, **fields),
            "max_new_tokens": None,
            "do_sample": None,
        }
        options = {"generation_config": options["generation_config"]}
    elif where == "target":
        target.generation_config.update(**fields)
    else:
        drafter.generation_config.update(**fields)
    with collect_statistics() as statistics:
        defaults = {} if where == "config" else {"max_new_tokens": 12, "do_sample": False}
        target.generate(PROMPT, assistant_model=drafter, **defaults, **options)
    assert max(verified(statistics)) == 2


@pytest.mark.parametrize("where", ["keyword", "config", "target", "drafter"])
def test_the_threshold_from_everywhere(where):
    """B094, B097, B113: a head that says 0.27 of everything, cut at 0.5."""
    target, drafter = make_target("qwen3"), set_confidence(make_drafter(), -1.0)
    config = GenerationConfig(max_new_tokens=12, do_sample=False)
    options = {}
    if where == "keyword":
        options["dspark_confidence_threshold"] = 0.5
    elif where == "config":
        config = GenerationConfig(**config.to_diff_dict(), dspark_confidence_threshold=0.5)
    elif where == "target":
        target.generation_config.dspark_confidence_threshold = 0.5
    else:
        drafter.generation_config.dspark_confidence_threshold = 0.5
    if where == "keyword":
        options |= {"max_new_tokens": 12, "do_sample": False}
    else:
        options["generation_config"] = config
    with collect_statistics() as statistics:
        target.generate(PROMPT, assistant_model=drafter, **options)
    assert verified(statistics) == {0}


def test_precedence_keyword_config_target_drafter():
    """B094: keyword > passed config > target's > drafter's."""
    target, drafter = make_target("qwen3"), make_drafter()
    drafter.generation_config.num_assistant_tokens = 4
    assert max(verified(statistics_of(target, drafter))) == 4
    target.generation_config.num_assistant_tokens = 3
    assert max(verified(statistics_of(target, drafter))) == 3
    assert max(verified(statistics_of(target, drafter, num_assistant_tokens=1))) == 1
    config = GenerationConfig(max_new_tokens=12, do_sample=False, num_assistant_tokens=2)
    with collect_statistics() as statistics:
        target.generate(PROMPT, generation_config=config, assistant_model=drafter)
    assert max(verified(statistics)) == 2


def test_fields_survive_saving(tmp_path):
    """B097: in a generation config of their own and with the drafter."""
    config = GenerationConfig(
        dspark_verification="threshold",
        dspark_confidence_threshold=0.4,
        dspark_draft_sampling="greedy",
    )
    config.save_pretrained(tmp_path / "config")
    assert (
        GenerationConfig.from_pretrained(tmp_path / "config").to_diff_dict().items()
        >= {
            "dspark_verification": "threshold",
            "dspark_confidence_threshold": 0.4,
            "dspark_draft_sampling": "greedy",
        }.items()
    )
    drafter = set_confidence(make_drafter(), -1.0)
    drafter.generation_config.dspark_confidence_threshold = 0.5
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = DSparkDrafter.from_pretrained(tmp_path / "drafter")
    assert loaded.generation_config.dspark_confidence_threshold == 0.5
    assert verified(statistics_of(make_target("qwen3"), loaded)) == {0}
    switched_off = statistics_of(make_target("qwen3"), loaded, dspark_confidence_threshold=0.0)
    assert max(verified(switched_off)) == 3


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_zero_and_none_switch_the_threshold_off(off):
    """B095, B117: and they stay off against a drafter that sets it."""
    drafter = set_confidence(make_drafter(), -9.0)
    drafter.generation_config.dspark_confidence_threshold = 0.9
    statistics = statistics_of(make_target("qwen3"), drafter, dspark_confidence_threshold=off)
    assert max(verified(statistics)) == 4


def test_the_default_verifies_everything():
    """B117."""
    statistics = statistics_of(make_target("qwen3"), set_confidence(make_drafter(), -9.0))
    assert max(verified(statistics)) == 4


@pytest.mark.parametrize(("bias", "lengths"), [(-50.0, {0}), (50.0, {0, 1, 2, 3, 4})])
def test_the_confidence_head_decides(bias, lengths):
    """B113, B118: 0 or all drafts verified, and the text stays."""
    target = make_target("qwen3")
    expected = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    drafter = make_scripted(set_confidence(make_drafter(), bias), expected, 2)
    with collect_statistics() as statistics:
        output = target.generate(
            PROMPT,
            max_new_tokens=12,
            do_sample=False,
            assistant_model=drafter,
            dspark_confidence_threshold=0.5,
        )
    assert torch.equal(output, expected)
    assert verified(statistics) <= lengths
    if bias < 0:
        assert statistics.rounds == 11
        assert statistics.drafted > 0
    else:
        assert statistics.accepted > 0


def test_explicit_full_beats_a_threshold():
    """B094: what is said in the call wins over the drafter's default."""
    drafter = set_confidence(make_drafter(), -9.0)
    drafter.generation_config.dspark_confidence_threshold = 0.9
    statistics = statistics_of(make_target("qwen3"), drafter, dspark_verification="full")
    assert max(verified(statistics)) == 4


def test_no_confidence_head_warns_and_verifies_everything(caplog):
    """B114."""
    drafter = make_drafter(confidence=False)
    statistics = statistics_of(make_target("qwen3"), drafter, dspark_confidence_threshold=0.5)
    assert max(verified(statistics)) == 4
    assert sum("needs a confidence head" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("number", range(5))
def test_fewer_tokens_are_a_prefix_of_the_trained_block(number):
    """B072, B073: the block runs at its trained width whatever is verified."""
    target, drafter = make_target("qwen3"), make_drafter()
    draft, blocks = drafter.draft, []

    def recording(*args, **kwargs):
        blocks.append(draft(*args, **kwargs))
        return blocks[-1]

    drafter.draft = recording
    statistics = statistics_of(target, drafter, num_assistant_tokens=number)
    assert max(verified(statistics)) == number
    assert all(block.tokens.shape == (1, 4) for block in blocks)
    assert bool(blocks) == (number > 0)


def test_more_tokens_than_trained_are_not_drafted(caplog):
    """B072."""
    statistics = statistics_of(make_target("qwen3"), make_drafter(), num_assistant_tokens=9)
    assert max(verified(statistics)) == 4
    assert any("trained to draft 4 tokens" in record.message for record in caplog.records)


def test_two_calls_are_the_same():
    """B096: no state leaks from call to call."""
    target, drafter = make_target("qwen3"), make_drafter()
    first, second = (statistics_of(target, drafter) for _ in range(2))
    assert first.verify_lengths == second.verify_lengths
    assert first.accepted_at == second.accepted_at


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dspark_verification", "always", "'full', 'threshold' or 'scheduled'"),
        ("dspark_confidence_threshold", 1.5, "between 0 and 1"),
        ("dspark_confidence_threshold", "high", "between 0 and 1"),
        ("dspark_draft_sampling", "argmax", "'sample' or 'greedy'"),
        ("num_assistant_tokens", -1, "at least 0"),
    ],
)
def test_impossible_values_are_refused_before_compute(field, value, message):
    """B094: loud, and early."""
    target = make_target("qwen3")
    calls = []
    target.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.raises(ValueError, match=message):
        statistics_of(target, make_drafter(), **{field: value})
    assert not calls


def test_greedy_drafts_while_sampling():
    """B003: the block is an argmax block; the distribution is tested in test_sampling."""
    target, drafter = make_target("qwen3"), make_drafter()
    draft, modes = drafter.draft, []

    def recording(*args, **kwargs):
        modes.append(kwargs["do_sample"])
        return draft(*args, **kwargs)

    drafter.draft = recording
    options = {"max_new_tokens": 8, "do_sample": True, "assistant_model": drafter}
    target.generate(PROMPT, dspark_draft_sampling="greedy", **options)
    target.generate(PROMPT, **options)
    assert set(modes[: len(modes) // 2]) == {False}
    assert True in modes
