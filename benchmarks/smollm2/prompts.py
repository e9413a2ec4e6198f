"""
Prompts from templates, for the answers that a drafter of SmolLM2 learns from.

    python benchmarks/smollm2/prompts.py 12000 prompts.jsonl --nouns /usr/share/wordnet/index.noun
    dspark-hf data --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts prompts.jsonl \\
        --temperature 0 --max-new-tokens 160 --batch-size 96 --dtype float32 --output answers

Arithmetic, mathematics, code and chat. Numbers, names and things are drawn; code tasks are put from
the signatures and the first docstring lines of installed packages, topics of chat are nouns of
WordNet (Debian's `wordnet-base`). No prompt of an evaluation set is used.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

import yaml

TEMPLATES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def numbers(rng: random.Random) -> dict[str, str]:
    """What the placeholders of all templates stand for."""
    a, b, c = rng.sample(TEMPLATES["names"], 3)
    return {
        "A": a,
        "B": b,
        "C": c,
        "t": rng.choice(TEMPLATES["things"]),
        "w": rng.choice(TEMPLATES["work"]),
        "i": str(rng.randint(12, 90)),
        "j": str(rng.randint(2, 15)),
        "k": str(rng.randint(2, 12)),
        "m": str(rng.randint(2, 7)),
        "d": str(rng.randint(2, 9)),
        "p": str(rng.choice((rng.randint(60, 999), 10 * rng.randint(6, 120)))),
        "q": str(5 * rng.randint(1, 18)),
    }


def code_tasks() -> list[tuple[str, str, str]]:
    """Name, parameters and first docstring line of the functions of `packages`."""
    found = {}
    for package in TEMPLATES["packages"]:
        try:
            root = importlib.import_module(package)
        except ImportError:
            continue
        modules = [root]
        for info in pkgutil.iter_modules(getattr(root, "__path__", ())):
            if not info.name.startswith("_"):
                try:
                    modules.append(importlib.import_module(f"{package}.{info.name}"))
                except Exception:  # a module of another system, say
                    continue
        for module in modules:
            for name, thing in vars(module).items():
                doc = inspect.getdoc(thing) if callable(thing) else None
                if name.startswith("_") or not doc:
                    continue
                line = re.sub(r"[`:*]", "", doc.strip().split("\n\n")[0]).replace("\n", " ").strip()
                if not 25 < len(line) < 220 or "(" in line[:12]:
                    continue
                try:
                    names = [p for p in inspect.signature(thing).parameters if p[0] != "_"][:4]
                except (TypeError, ValueError):
                    names = ["x"]
                if not {"args", "kwargs"} & set(names):
                    found[line] = (name, ", ".join(names), line)
    return sorted(found.values())


def code_prompt(rng: random.Random, tasks: list[tuple[str, str, str]]) -> str:
    """A task in one of the ways that people put them."""
    name, parameters, line = rng.choice(tasks)
    what = (line[0].lower() + line[1:]).rstrip(".")
    stub = f'```python\ndef {name.lower()}({parameters}):\n    """ {line}\n    """\n```'
    kind = rng.random()
    if kind < 0.25:
        what = re.sub(r"^(returns?|computes?|gets?|calculates?) ", "", what)
        return f"Write a python function to {rng.choice(('find', 'return', 'compute'))} {what}."
    if kind < 0.5:
        return (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            + stub
        )
    if kind < 0.6:
        return "Complete this Python function:\n" + stub
    if kind < 0.7:
        language = rng.choice(("C++", "JavaScript", "Java", "Rust", "Go", "SQL", "Bash", "C#"))
        return f"How do I do this in {language}: {what}?"
    words = {**numbers(rng), "n": str(rng.randint(3, 90)), "goal": rng.choice(TEMPLATES["goals"])}
    task = rng.choice(TEMPLATES["contests"]).format(**words, move=rng.choice(TEMPLATES["moves"]))
    head = rng.choice(
        (
            "You are an expert Python programmer. You will be given a question and will write a "
            "correct Python program that solves it.\n\n### Question:\n",
            "Solve this programming problem in Python.\n\n",
            "Write a Python program for the following task.\n\n",
        )
    )
    return head + task


def prompts(nouns: list[str], seed: int) -> Iterator[str]:
    """Prompts without end, some of them twice."""
    rng, tasks = random.Random(seed), code_tasks()
    while True:
        kind, words = rng.random(), numbers(rng)
        if kind < 0.2:
            yield rng.choice(TEMPLATES["arithmetic"]).format(**words) + rng.choice(
                TEMPLATES["steps"]
            )
        elif kind < 0.4:
            yield rng.choice(TEMPLATES["mathematics"]).format(**words) + rng.choice(
                TEMPLATES["steps"]
            )
        elif kind < 0.7:
            yield code_prompt(rng, tasks)
        else:
            n, o = rng.sample(nouns, 2)
            yield rng.choice(TEMPLATES["chat"]).format(**words | {"n": n, "o": o})


def common_nouns(path: Path) -> list[str]:
    """Nouns of WordNet with several senses: the well-known ones."""
    nouns = []
    for line in path.read_text(encoding="utf-8").splitlines():
        word, _, senses = line.split(" ")[:3]
        if set(word) <= set(string.ascii_lowercase + "_") and len(word) > 3 and int(senses) > 1:
            nouns.append(word.replace("_", " "))
    return nouns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--nouns", type=Path, required=True, help="index.noun of WordNet")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seen = set[str]()
    with arguments.output.open("w", encoding="utf-8") as file:
        for prompt in prompts(common_nouns(arguments.nouns), arguments.seed):
            if len(seen) == arguments.count:
                break
            if prompt not in seen:
                seen.add(prompt)
                turn = {"role": "user", "content": prompt}
                file.write(json.dumps({"messages": [turn]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
