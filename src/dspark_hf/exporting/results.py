"""Result files of evaluations, benches and training runs, as a model card reads them."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..configuration_drafter import DrafterConfig
from ..evaluation.provenance import method_of

Result = Mapping[str, Any]


def read_result(path: str | os.PathLike) -> dict[str, Any]:
    """
    The JSON result of `dspark-hf bench`, `dspark-hf evaluate` or a training run.

    Raises:
        `ValueError`: not a JSON object.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds a JSON {type(result).__name__}, expected an object.")
    return result


def read_results(
    sources: Sequence[str | os.PathLike | Result], config: DrafterConfig
) -> list[Result]:
    """
    Results for the card of one drafter.

    Args:
        sources (list of path or mapping): result files, or what stands in them.
        config ([`DrafterConfig`]): of the drafter.

    Raises:
        `ValueError`: a file is no result, is one of another drafter, or two say how the drafter was
            trained.
    """
    results: list[Result] = []
    if isinstance(sources, str | os.PathLike | Mapping):
        raise ValueError(f"results is {sources!r}; give a list, also of one.")
    for number, source in enumerate(sources, start=1):
        if isinstance(source, Mapping):
            name, result = f"result {number}", source
        else:
            name, result = str(source), read_result(source)
        if not {"training", "results", "sets"} & set(result):
            raise ValueError(
                f"{name} holds neither an evaluation nor a bench nor a training run, but "
                f"{', '.join(map(str, result)) or 'nothing'}."
            )
        _check_trained(result, config, name)
        _check_evaluated(result, config, name)
        results.append(result)
    if sum("training" in result for result in results) > 1:
        raise ValueError("Several results say how the drafter was trained; give one training run.")
    return results


def _check_trained(result: Result, config: DrafterConfig, name: str) -> None:
    run = result.get("config")
    if "training" not in result or not isinstance(run, Mapping):
        return
    fields, family = dict(run.get("drafter") or {}), run.get("family", "dspark")
    families = ["dspark"]
    if config.model_type != "dspark":
        families = ["eagle3"]
    elif not (config.markov_head_type or config.confidence_head):
        families = ["dspark", "dflash"]
    if family not in families:
        _compare({"family": family}, {"family": families[-1]}, name)
    own = {
        "block_size": config.block_size,
        "num_layers": config.backbone_config.num_hidden_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "markov_rank": getattr(config, "markov_rank", None),
    }
    _compare({k: fields[k] for k in own if k in fields}, own, name)


def _check_evaluated(result: Result, config: DrafterConfig, name: str) -> None:
    """One of the drafters in it may be this one. Saved in another dtype, it has another id."""
    drafters = result.get("drafters")
    if not drafters:
        return
    own = {
        "method": method_of(config),
        "block_size": config.block_size,
        "num_layers": config.backbone_config.num_hidden_layers,
    }
    if not any(all(facts.get(k) == v for k, v in own.items()) for facts in drafters):
        _compare({k: drafters[0].get(k) for k in own}, own, name)


def _compare(found: Result, own: Result, name: str) -> None:
    different = [k for k in found if found[k] != own[k]]
    if different:
        facts = ", ".join(f"{k} {found[k]} there and {own[k]} here" for k in different)
        raise ValueError(f"{name} is of another drafter: {facts}. Give results of this one.")
