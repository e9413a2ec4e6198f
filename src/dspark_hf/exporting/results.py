"""Result files of evaluations, benches and training runs, as a model card reads them."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..evaluation.provenance import drafter_facts
from ..modeling_drafter import DrafterModel

Result = Mapping[str, Any]

_FLOAT16 = (
    " (It was measured in float16, which rounds the weights of other files to other values: "
    "measure in float32 or bfloat16.)"
)


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
    sources: Sequence[str | os.PathLike | Result], drafter: DrafterModel
) -> list[Result]:
    """
    Results for the card of one drafter; of an evaluation of several its own rows alone.

    Args:
        sources (list of path or mapping): result files, or what stands in them.
        drafter ([`DrafterModel`]): whose card it is.

    Raises:
        `ValueError`: a file is no result, is one of other weights or of drafts made otherwise, or
            two say how the drafter was trained.
    """
    if isinstance(sources, str | os.PathLike | Mapping):
        raise ValueError(f"results is {sources!r}; give a list, also of one.")
    results: list[Result] = []
    own_facts = drafter_facts("", drafter) if sources else {}
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
        wanted = _measured(own_facts, result)
        found = {
            facts.get("name"): _measured(facts, result) for facts in result.get("drafters", ())
        }
        if wanted not in found.values():
            measured = result.get("settings") or result.get("machine") or {}
            hint = _FLOAT16 if measured.get("dtype") == "float16" else ""
            raise ValueError(
                f"{name} is not of this drafter: it has weights {wanted}, the result "
                f"{', '.join(f'{value} ({key})' for key, value in found.items()) or 'notes none'}. "
                f"Give results that were measured with these, or none.{hint}"
            )
        if isinstance(runs := result.get("results"), list):
            own = [run for run in runs if found.get(run.get("drafter")) == wanted]
            result = {**result, "results": own}
        results.append(result)
    if sum("training" in result for result in results) > 1:
        raise ValueError("Several results say how the drafter was trained; give one training run.")
    return results


def _measured(facts: Result, result: Result) -> str:
    """What figures belong to: one set of weights, and one of the ways in which it can draft."""
    weights = str(facts.get("weights"))
    return weights if "training" in result else f"{weights} drafting {facts.get('drafting')}"
