"""Model cards: complete, runnable, and with the figures that were published or measured."""

import csv
import re
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
SHIPPED = sorted((ROOT / "assets").glob("*/README.md"))
SECTIONS = [
    "What it is",
    "Use it",
    "Facts",
    "Published figures",
    "Training data and mode",
    "Limits",
    "Citation",
]


def parts(card):
    _, front, body = card.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), body


@pytest.mark.parametrize("card", CARDS + SHIPPED, ids=lambda card: str(card.relative_to(ROOT)))
def test_front_matter_sections_and_snippets(card):
    """B133, B146: what it is for, in which mode it was trained, and code that compiles."""
    front, body = parts(card)
    assert front["library_name"] == "dspark_hf"
    assert front["base_model"]
    measured = [s.replace("Published", "Measured") for s in SECTIONS]
    assert re.findall(r"^## (.+)$", body, flags=re.M) in (SECTIONS, measured)
    snippets = re.findall(r"```python\n(.*?)```", body, flags=re.S)
    assert snippets
    for snippet in snippets:
        compile(snippet, str(card), "exec")
    assert any("assistant_model" in snippet for snippet in snippets)
    assert "thinking" in body


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_published_figures_are_the_papers(card):
    """B152: every figure with its owner, equal to the paper's table."""
    _, body = parts(card)
    assert f"deepseek-ai/{card.stem}" in body
    assert "arXiv 2607.05147" in body
    name = re.search(r"drafter that DeepSeek published for (\S+)\.", body).group(1)
    with open(TESTS / "fixtures" / "paper_table1.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["target"] == name]
    assert len(rows) == 3
    for row in rows:
        figures = [value for key, value in row.items() if key not in ("target", "drafter")]
        assert f"| {row['drafter']} | {' | '.join(figures)} |" in body
