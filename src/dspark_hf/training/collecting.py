"""
`dspark-hf data`: a folder of on-policy training rows, resumable, with its provenance.

The folder holds `train.jsonl`, `validation.jsonl` and `provenance.json`, and `invented.jsonl` where
the target wrote the prompts too. Which side a prompt falls on depends on its text alone, so all of
its answers stay on one side and a resumed run agrees with the interrupted one.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._files import write_json
from .._jsonl import MalformedRow, append_line, drop_torn_line, parse_row, read_lines
from ..evaluation.provenance import weights_of
from .answers import SamplingOptions, converse, stop_token_ids
from .data import messages_of, usable_rows
from .generation_fields import SET_ASIDE, check_generation_config
from .sources import DatasetRows

FILES = ("train.jsonl", "validation.jsonl")
PROVENANCE = "provenance.json"

# Of a target's generation config: what the plan overrules, what `stop_token_ids` says, and what
# changes no token.
_WITHOUT_EFFECT = frozenset(
    {
        *SET_ASIDE,
        *("do_sample", "temperature", "top_p", "top_k", "max_new_tokens"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "transformers_version"),
        *("_from_model_config", "compile_config", "disable_compile"),
    }
)


@dataclass(frozen=True)
class CollectionPlan:
    """
    What a data folder consists of; a folder made by another plan is not added to.

    Attributes:
        target (`str`): path or Hub id.
        temperatures (`tuple[float, ...]`): every prompt is answered once at each.
        top_p (`float`), top_k (`int`), max_new_tokens (`int`): of the answers.
        thinking (`bool`, *optional*): what the template is told; `None` says nothing.
        validation_share (`float`): of the prompts.
        seed (`int`): of all draws.

    Raises:
        `ValueError`: no temperature, one given twice (its answers would be the same again), or
            `top_p` 0.
    """

    target: str
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    thinking: bool | None = None
    validation_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(
                f"temperatures are {self.temperatures}; give at least one, and each one once."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off).")


def read_prompts(
    sources: Sequence[Path | DatasetRows],
    skip_malformed: bool,
    console: Console,
    check: Callable[[list[dict[str, str]]], None] | None = None,
) -> Iterator[list[dict[str, str]]]:
    """
    The conversations of JSONL files and tables (see [`open_source`]).

    Args:
        check (`Callable`, *optional*): raises `ValueError` for a conversation that cannot be used.

    Raises:
        [`MalformedRow`]: a row that cannot be used, unless they are to be skipped; each is named.
    """

    def skip(error: MalformedRow) -> None:
        console.print(f"skipped {error}", style="yellow", markup=False, soft_wrap=True)

    def conversation(row: dict[str, Any], where: str) -> list[dict[str, str]]:
        messages = messages_of(row, where)
        if not any(message["role"] == "user" for message in messages):
            raise MalformedRow(f"{where}: no user turn, so there is nothing to answer.")
        if any(message["role"] == "tool" for message in messages):
            raise MalformedRow(
                f"{where}: a turn of a tool answers a call that the target may not make anew."
            )
        try:
            if check is not None:
                check(messages)
        except ValueError as error:
            raise MalformedRow(f"{where}: {error}") from error
        return messages

    for source in sources:
        yield from usable_rows(source, conversation, skip if skip_malformed else None)


def collect(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterator[list[dict[str, str]]],
    folder: Path,
    plan: CollectionPlan,
    batch_size: int,
    sources: dict[str, str],
    total: int | None = None,
) -> dict[str, int]:
    """
    Answer conversations batch by batch and append the rows as they come.

    Rows that an earlier run has written are not written again.

    Args:
        conversations: messages in the host's form; turns of the assistant are not read.
        folder (`Path`): made if missing.
        plan ([`CollectionPlan`]): must equal that of the folder, as all that shapes the answers.
        batch_size (`int`): conversations answered together.
        sources (`dict`): what the prompts are, for the provenance.
        total (`int`, *optional*): conversations, for the progress bar.

    Returns:
        Rows and answer tokens per file.

    Raises:
        `ValueError`: the folder was made by another plan, or does not say by which; or the target's
            generation config cannot be obeyed.
        `OSError`: the disk is full; complete rows stay.
    """
    check_generation_config(target)
    facts = _facts(plan, target, tokenizer, batch_size, sources)
    _check_plan(folder, facts)
    for name in FILES:
        (folder / name).touch()
    done = {row["key"] for name in FILES for row in _existing(folder / name)}
    template = {} if plan.thinking is None else {"enable_thinking": plan.thinking}
    with tqdm(total=total, desc="prompts", unit="prompt") as bar:
        for number, batch in enumerate(_batches(_different(conversations), batch_size)):
            for temperature in plan.temperatures:
                keys = [_key(turns, temperature) for turns in batch]
                if done.issuperset(keys):
                    continue
                # The whole batch, also where a part of it is there: other companions would draw
                # other answers, and a resumed folder would differ from an uninterrupted one.
                torch.manual_seed(plan.seed + number)
                options = SamplingOptions(temperature, plan.top_p, plan.top_k, plan.max_new_tokens)
                rows = converse(target, tokenizer, batch, options, **template)
                for key, turns, row in zip(keys, batch, rows, strict=True):
                    if key in done:
                        continue
                    name = FILES[_is_validation(turns, plan.validation_share)]
                    append_line(folder / name, {"key": key, **row, "temperature": temperature})
            bar.update(len(batch))
    return count(folder)


def count(folder: Path) -> dict[str, int]:
    """Rows and answer tokens of a data folder, by file."""
    figures = {}
    for name in FILES:
        rows = list(_existing(folder / name))
        stem = name.removesuffix(".jsonl")
        figures[f"{stem}_rows"] = len(rows)
        figures[f"{stem}_answer_tokens"] = sum(
            end - start for row in rows for start, end in row["assistant_spans"]
        )
    return figures


def _existing(path: Path) -> Iterator[dict[str, Any]]:
    drop_torn_line(path)
    for where, line in read_lines(path):
        yield parse_row(line, where)


def _facts(
    plan: CollectionPlan,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    sources: dict[str, str],
) -> dict[str, Any]:
    """All that the answers depend on. What is drawn for a row depends on the rows beside it."""
    own = json.loads(target.generation_config.to_json_string())
    template = tokenizer.get_chat_template().encode()
    facts = {
        **asdict(plan),
        "sources": sources,
        "batch_size": batch_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_weights": weights_of(target),
        "stop_token_ids": sorted(stop_token_ids(target, tokenizer)),
        "generation_config": {k: v for k, v in own.items() if k not in _WITHOUT_EFFECT},
        "chat_template_sha256": hashlib.sha256(template).hexdigest(),
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    return json.loads(json.dumps(facts))


def _check_plan(folder: Path, facts: dict[str, Any]) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a folder for the rows.")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PROVENANCE
    if not path.exists():
        # Complete or not there: rows whose origin cannot be read are of no use.
        write_json(path, facts)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}), so nobody knows how the rows beside it were made. "
            "Use another folder."
        ) from error
    if unsaid := {name: value for name, value in facts.items() if name not in found}:
        raise ValueError(
            f"{path} lacks {', '.join(unsaid)}: an earlier version made it. Its rows can be "
            "trained on as they are. To add to them, write into it what they were made with (now "
            f"it would be {json.dumps(unsaid)[1:-1]}), or use another folder."
        )
    if changes := changed_settings(found, facts, but="versions"):
        raise ValueError(
            f"{folder} was made with other settings: {changes}. Use those settings to go on, or "
            "another folder."
        )


def changed_settings(found: dict[str, Any], facts: dict[str, Any], but: str = "") -> str:
    """What differs between the settings noted in a folder and those of now; `but` may differ."""
    different = [name for name in facts if name != but and found.get(name) != facts[name]]
    return "; ".join(f"{n} {found.get(n)!r} there, {facts[n]!r} now" for n in different)


def _key(turns: list[dict[str, str]], temperature: float) -> str:
    return hashlib.sha256(f"{temperature} {_questions(turns)}".encode()).hexdigest()[:16]


def _is_validation(turns: list[dict[str, str]], share: float) -> bool:
    digest = hashlib.sha256(_questions(turns).encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def _questions(turns: list[dict[str, str]]) -> str:
    return json.dumps([(m["role"], m["content"]) for m in turns if m["role"] != "assistant"])


def _different(conversations: Iterator[list[dict[str, str]]]) -> Iterator[list[dict[str, str]]]:
    """Without repetitions. By the prompts alone, so that a resumed run forms the same batches."""
    seen = set[str]()
    for turns in conversations:
        questions = _questions(turns)
        if questions not in seen:
            seen.add(questions)
            yield turns


def _batches(conversations: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for turns in conversations:
        batch.append(turns)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
