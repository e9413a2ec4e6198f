"""Model cards: complete, runnable, and with the figures that were published or measured."""

import csv
import re
from pathlib import Path

import pytest
import yaml

from dspark_hf.loading.description import describe
from published_v4 import published_config, write_sparse_checkpoint

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
SHIPPED = sorted((ROOT / "assets").glob("*/README.md"))
# Who published a drafter that is not DeepSeek's.
OWNERS = {
    "LFM2.5-2.6B-DSpark": "LiquidAI",
    "Qwen3-8B-DFlash-b16": "z-lab",
    "Qwen3.6-35B-A3B-speculator.dspark": "RedHatAI",
}
PUBLISHED, MEASURED = "Published figures", "Measured figures"
SECTIONS = ["What it is", "Use it", "Facts", "{}", "Training data and mode", "Limits", "Citation"]


def read_card(path):
    """Front matter, and the text of every section by its heading, in the card's order."""
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    pieces = re.split(r"^## (.+)\n", body, flags=re.M)
    return yaml.safe_load(front), dict(zip(pieces[1::2], pieces[2::2], strict=True))


def table(text):
    """Cells of every table row of a section, header first, without the ruler under it."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if set("".join(row)) - set("-: ")]


def paper_tables():
    """Table 1 of the paper, as a card shows it, by the names of the cards."""
    with open(TESTS / "fixtures" / "paper_table1.csv", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    tables = {}
    for target, *row in rows:
        for method, unit in (("dspark", "block7"), ("dflash", "block7"), ("eagle3", "ttt7")):
            name = f"{method}_{target.lower().replace('-', '_')}_{unit}"
            tables.setdefault(name, [header[1:]]).append(row)
    return tables


def production_tables():
    """What the paper says of the drafters in production, by the names of the cards."""
    with open(TESTS / "fixtures" / "paper_production.csv", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return {f"DeepSeek-{model}-DSpark": [header, [model, *row]] for model, *row in rows}


def test_every_published_drafter_has_a_card():
    assert {card.stem for card in CARDS} >= set(paper_tables()) | set(production_tables())


@pytest.mark.parametrize("card", CARDS + SHIPPED, ids=lambda card: str(card.relative_to(ROOT)))
def test_front_matter_sections_and_snippets(card):
    """B133, B146: what it is for, in which mode it was trained, and code that compiles."""
    front, sections = read_card(card)
    assert front["library_name"] == "dspark_hf"
    assert front["pipeline_tag"] == "text-generation"
    assert front["base_model"]
    assert front["license"]
    assert front["tags"]
    figures = PUBLISHED if PUBLISHED in sections else MEASURED
    assert list(sections) == [section.format(figures) for section in SECTIONS]
    snippets = re.findall(r"```python\n(.*?)```", sections["Use it"], flags=re.S)
    assert snippets
    for snippet in snippets:
        compile(snippet, str(card), "exec")
    assert any("assistant_model=" in snippet for snippet in snippets)
    assert "thinking" in sections["Training data and mode"]


@pytest.mark.parametrize("card", CARDS + SHIPPED, ids=lambda card: str(card.relative_to(ROOT)))
def test_figures_are_the_papers_or_say_how_they_were_measured(card):
    """B152: every figure with its owner and set-up; the paper's equal the paper's table."""
    _, sections = read_card(card)
    if PUBLISHED not in sections:
        assert any(re.search(r"\d", cell) for row in table(sections[MEASURED])[1:] for cell in row)
        assert re.search(r"float32|bfloat16|float16", sections[MEASURED])
        return
    figures = " ".join(sections[PUBLISHED].split())
    published = {**paper_tables(), **production_tables()}.get(card.stem)
    owner = OWNERS.get(card.stem, "deepseek-ai")
    repository = f"{owner}/{card.stem}"
    assert f'"{repository}"' in re.findall(r"```python\n(.*?)```", sections["Use it"], re.S)[0]
    assert f"--drafter {repository}" in sections["Use it"]
    assert "Not measured by this project" in figures
    if published is None:
        assert not table(sections[PUBLISHED])
        assert "not repeated here" in figures or "None are repeated here" in figures
        return
    assert "arXiv 2607.05147" in figures
    assert table(sections[PUBLISHED]) == published


@pytest.mark.parametrize("name", paper_tables())
def test_bytes_are_two_for_each_element(name):
    _, sections = read_card(ROOT / "model_cards" / f"{name}.md")
    facts = {row[0]: row[-1].replace(",", "") for row in table(sections["Facts"])}
    elements = re.findall(r"\d{6,}", facts["tensors and elements"])
    assert len(elements) == 2
    doubled = [str(2 * int(count)) for count in elements]
    assert re.findall(r"\d{6,}", facts["bytes in bfloat16"]) == doubled


@pytest.mark.parametrize("name", ["Flash", "Pro"])
def test_facts_of_embedded_drafters_are_those_of_their_layout(tmp_path, name):
    """The counts that `dspark-hf inspect` finds for a checkpoint of the published shapes."""
    folder = write_sparse_checkpoint(tmp_path / name, published_config(name.lower()))
    found = describe(str(folder))
    _, sections = read_card(ROOT / "model_cards" / f"DeepSeek-V4-{name}-DSpark.md")
    facts = {row[0]: row[-1].replace(",", "") for row in table(sections["Facts"])}
    assert facts["tensors and parameters"].startswith(f"{found['num_tensors']} tensors")
    assert str(round(found["num_parameters"], -6)) in facts["tensors and parameters"]
    assert facts["bytes stored"] == str(found["num_bytes"])
    assert facts["bytes in memory"].startswith(f"{found['num_bytes_in_memory']}:")
    taps = [int(tap) for tap in re.findall(r"\d+(?= |$)", facts["taps"].split("(")[0])]
    assert taps == found["target_layer_ids"]
    assert str(found["mask_token_id"]) in facts["mask token id"]
    assert f"rank {found['markov_rank']}" in facts["Markov head"]
