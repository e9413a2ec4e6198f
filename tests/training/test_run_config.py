"""What a run file may say, and what is wrong with it."""

import datetime as dates

import pytest
import yaml

from dspark_hf.training.run_config import RunConfig

DRAFTER = {"mask_token_id": 4, "num_layers": 1, "block_size": 3, "markov_rank": 4}


def make_fields(**changes):
    return {"target": "t", "data": "d", "output": "o", "drafter": DRAFTER, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": 5}, r"unknown keys \['anchors'\]"),
        ({"target": ...}, r"missing keys \['target'\]"),
        ({"family": "medusa"}, "family is 'medusa'; known: dspark, dflash, eagle3"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"drafter": {"block_size": 3}}, "drafter.mask_token_id is missing"),
        ({"drafter": [1]}, "drafter must hold keys and values"),
        ({"objective": {"kl": 1.0}}, "objective: ObjectiveWeights has no kl"),
        ({"trainer": {"leraning_rate": 1}}, "trainer: TrainingArguments has no leraning_rate"),
        ({"muon": "yes"}, "muon must be true or false, found 'yes'"),
        ({"muon": True, "trainer": {"optim": "sgd"}}, "over whole matrices, and trainer has optim"),
        ({"data": None}, "data must be a path or a Hub id, found None"),
        ({"init_from": 3}, "init_from must be a path"),
        ({"num_anchors": "many"}, "num_anchors must be an integer of at least 1, found 'many'"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, found 0"),
        ({"drafter": {**DRAFTER, "num_layer": 2}}, "drafter: dspark has no num_layer; known are"),
        ({"drafter": {**DRAFTER, "draft_vocabulary": [1]}}, "dspark has no draft_vocabulary"),
        ({"drafter": {**DRAFTER, "block_size": "3"}}, "drafter.block_size must be an integer"),
        ({"drafter": {**DRAFTER, "draft_vocab_size": 0}}, "drafter.draft_vocab_size must be"),
        ({"family": "dflash"}, "drafter: dflash has no markov_rank"),
        ({"family": "eagle3"}, "eagle3 has no markov_rank, mask_token_id, num_layers"),
        ({"family": "eagle3", "drafter": {}, "objective": {"ce": 1}}, "eagle3 has one"),
        ({"objective": {"ce": "high"}}, "objective.ce must be a number, found 'high'"),
        ({"objective": {"tv": -1}}, "objective.tv must be a number of at least 0, found -1"),
        ({"objective": {"decay": 0}}, "objective.decay and one of the weights must be above 0"),
        ({"objective": {"ce": 0, "tv": 0, "confidence": 0}}, "one of the weights must be above 0"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate must be a number"),
        ({"trainer": {"output_dir": "x"}}, "trainer.output_dir is the run's own output"),
        ({"trainer": {"report_to": ["none", "abacus"]}}, "abacus is not installed or not known"),
        ({"family": "eagle3", "drafter": {}, "num_anchors": 512}, "num_anchors is of block draft"),
        (
            {"family": "dflash", "drafter": {"mask_token_id": 4}, "objective": {"confidence": 5.0}},
            "objective.confidence is 5.0, and the drafter has no",
        ),
        (
            {"drafter": {**DRAFTER, "confidence_head": False}, "objective": {"confidence": 1}},
            "objective.confidence is 1, and the drafter has no",
        ),
        (
            {"family": "dflash", "drafter": {"mask_token_id": 4}, "objective": {"ce": 0}},
            "one of the weights must be above 0",
        ),
        ({"drafter": {**DRAFTER, "markov_head_type": None}}, "drafter.markov_rank is of a head"),
        ({"drafter": {**DRAFTER, "num_hidden_layers": 2}}, "dspark has no num_hidden_layers"),
        ({"drafter": {**DRAFTER, "num_layers": "1.5e0"}}, "drafter.num_layers must be an integer"),
        ({"drafter": {**DRAFTER, "confidence_head": "no"}}, "must be true or false, found 'no'"),
        ({"drafter": {**DRAFTER, "rms_norm_eps": "small"}}, "rms_norm_eps must be a number"),
        ({"drafter": {**DRAFTER, "layer_types": ["x"]}}, "(?s)drafter: .*layer_types"),
        ({"trainer": {"max_steps": 1.5}}, "trainer.max_steps must be an integer, found 1.5"),
        ({"trainer": {"bf16": "false"}}, "trainer.bf16 must be true or false, found 'false'"),
        (
            {"trainer": {"metric_for_best_model": "loss", "greater_is_better": True}},
            "trainer.greater_is_better is True, which would keep the worst drafter by loss",
        ),
        ({"trainer": {"bf16_full_eval": True}}, "bf16_full_eval of TrainingArguments is True"),
        ({"trainer": {"gradient_checkpointing": True}}, "drops the cache that holds the context"),
        ({"trainer": {"save_only_model": True}}, "could not go on from such a checkpoint"),
        ({"trainer": {"label_smoothing_factor": "3e-1"}}, "label_smoothing_factor of Training"),
        ({"trainer": {"average_tokens_across_devices": False}}, "what all processes learn from"),
        ({"trainer": {"label_names": ["labels"]}}, r"label_names of TrainingArguments is \['lab"),
        ({"trainer": {"run_name": dates.date(2026, 1, 1)}}, "cannot be noted in its folder"),
    ],
)
def test_mistakes_in_a_run_file_are_named(tmp_path, changes, message):
    fields = {k: v for k, v in make_fields(**changes).items() if v is not ...}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        RunConfig.load(path)


def test_files_that_are_no_run_files(tmp_path):
    path = tmp_path / "run.yaml"
    for text, message in (("a: [", "is not YAML"), ("- 1", "expected keys and values, found list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            RunConfig.load(path)


def test_numbers_that_yaml_reads_as_text():
    config = RunConfig(
        **make_fields(
            trainer={
                "learning_rate": "6e-4",
                "max_steps": "1e1",
                "run_name": "6e-4",
                "lr_scheduler_kwargs": {"min_lr": "1e-5"},
            },
            drafter={**DRAFTER, "rms_norm_eps": "1e-5", "rope_parameters": {"rope_theta": "1e6"}},
            objective={"decay": "4e0"},
        )
    )
    assert config.trainer == {
        "learning_rate": 6e-4,
        "max_steps": 10,
        "run_name": "6e-4",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
    }
    assert type(config.trainer["max_steps"]) is int
    assert config.drafter["rms_norm_eps"] == 1e-5
    assert config.drafter["rope_parameters"] == {"rope_theta": 1e6}
    assert config.objective == {"decay": 4.0}
