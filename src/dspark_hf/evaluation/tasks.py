"""
The paper's nine evaluation sets (Table 1), by name, from the Hub; worded as in DeepSpec.

Each set says where its rows are and how a row becomes the first user turn. Rows are shuffled with a
fixed seed before they are cut to the paper's number of samples, so that the first N of them are a
sample of the whole set, the same one every time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .prompts import PromptSet

SHUFFLE_SEED = 980406

_REASONING = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE_TESTS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
_LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all "
    "tests. You will NOT return anything except for the program\n\n"
    "### Question:\n{question}\n\n"
    "### Format: {instruction}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)
_LIVECODEBENCH_FILES = tuple(
    f"hf://datasets/livecodebench/code_generation_lite/test{number}.jsonl"
    for number in ("", 2, 3, 4, 5, 6)
)


@dataclass(frozen=True)
class Task:
    """
    One set on the Hub.

    Attributes:
        arguments (`tuple[str, ...]`): of `datasets.load_dataset`: repository and configuration.
        split (`str`): which split.
        max_samples (`int`): how many prompts the paper's protocol uses at most.
        prompt (callable): a row to the text of the first user turn.
        data_files (`tuple[str, ...]`): single files, where the rows are not a proper dataset.
    """

    arguments: tuple[str, ...]
    split: str
    max_samples: int
    prompt: Callable[[Mapping[str, Any]], str]
    data_files: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Repository, configuration and split, for the record."""
        return " ".join((*self.arguments, *self.data_files[:1], self.split))


def _livecodebench(row: Mapping[str, Any]) -> str:
    starter = row["starter_code"]
    instruction = (
        "Use the following code structure:"
        if starter
        else "Write your code in the following format:"
    )
    return _LIVECODEBENCH.format(
        question=row["question_content"],
        instruction=instruction,
        code=starter or "# YOUR CODE HERE",
    )


def _alpaca(row: Mapping[str, Any]) -> str:
    if not row["input"]:
        return row["instruction"]
    return f"{row['instruction']}\n\nInput:\n{row['input']}"


# In the order of the paper's table.
TASKS: dict[str, Task] = {
    "gsm8k": Task(
        ("openai/gsm8k", "main"), "test", 500, lambda row: _REASONING.format(row["question"])
    ),
    "math500": Task(
        ("HuggingFaceH4/MATH-500",), "test", 500, lambda row: _REASONING.format(row["problem"])
    ),
    "aime25": Task(
        ("MathArena/aime_2025",), "train", 30, lambda row: _REASONING.format(row["problem"])
    ),
    "mbpp": Task(
        ("google-research-datasets/mbpp", "sanitized"), "test", 256, lambda row: row["prompt"]
    ),
    "humaneval": Task(
        ("openai/openai_humaneval",), "test", 164, lambda row: _CODE_TESTS.format(row["prompt"])
    ),
    "livecodebench": Task(("json",), "train", 500, _livecodebench, _LIVECODEBENCH_FILES),
    "mt-bench": Task(
        ("HuggingFaceH4/mt_bench_prompts",), "train", 80, lambda row: row["prompt"][0]
    ),
    "alpaca": Task(("tatsu-lab/alpaca",), "train", 500, _alpaca),
    "arena-hard-v2": Task(
        ("json",),
        "train",
        500,
        lambda row: row["prompt"],
        ("hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",),
    ),
}

# The paper's three domains.
DOMAINS: dict[str, tuple[str, ...]] = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("mbpp", "humaneval", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard-v2"),
}


def _check_names(names: Sequence[str]) -> None:
    """Raise `ValueError` for a name that is not one of the nine, listing them."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(
            f"Unknown task {', '.join(map(repr, unknown))}. Known: {', '.join(TASKS)}. For prompts "
            "of your own, use a folder of JSONL files."
        )


def load_tasks(names: Sequence[str] = (), limit: int | None = None) -> list[PromptSet]:
    """
    Sets from the Hub, through `datasets`.

    Args:
        names (`Sequence[str]`, *optional*): which of the nine; all of them by default.
        limit (`int`, *optional*): at most so many prompts a set.

    Raises:
        `ValueError`: unknown name, or `datasets` is not installed.
        `OSError`: the Hub does not answer, or a set is not what it was.
    """
    _check_names(names)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "Sets from the Hub need the package datasets: pip install datasets. Or give a folder "
            "of JSONL files."
        ) from error
    return [_load(datasets, name, TASKS[name], limit) for name in names or TASKS]


def _load(datasets: Any, name: str, task: Task, limit: int | None) -> PromptSet:
    files = {"data_files": list(task.data_files)} if task.data_files else {}
    try:
        rows = datasets.load_dataset(*task.arguments, split=task.split, **files)
        size = min(len(rows), task.max_samples, limit or task.max_samples)
        rows = rows.shuffle(seed=SHUFFLE_SEED).select(range(size))
        prompts = tuple(task.prompt(row) for row in rows)
    except Exception as error:  # Network, cache, repository and schema fail in many classes.
        raise OSError(
            f"The set {name!r} could not be read from the Hub ({task.source}): "
            f"{type(error).__name__}: {error}. Connect to the Hub, or use a folder that holds "
            f'{name}.jsonl with a line {{"turns": ["…"]}} per prompt.'
        ) from error
    return PromptSet(name, prompts, task.source)
