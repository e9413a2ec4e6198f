"""Rows of `datasets` tables: folders, files and the Hub; what cannot be used is named by row."""

import dataclasses
import shutil
import sys
from pathlib import Path

import datasets
import pytest
from rich.console import Console

from dspark_hf.training.collecting import read_prompts
from dspark_hf.training.data import MalformedRow, make_example, usable_rows
from dspark_hf.training.run import RunConfig, load_examples
from dspark_hf.training.sources import DatasetRows, open_source
from small_runs import make_trainer
from small_tokenizer import make_tokenizer

TALKS = [
    {
        "id": i,
        "messages": [
            {"role": "user", "content": f"why {i}"},
            {"role": "assistant", "content": "because" if i != 3 else ""},
        ],
    }
    for i in range(5)
]
COMMIT = "c0ffee" * 6 + "abcd"


@pytest.fixture(scope="module", autouse=True)
def _quiet_and_away(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def here(tmp_path_factory, _quiet_and_away):
    """The same rows in all forms."""
    folder, rows = tmp_path_factory.mktemp("tables"), datasets.Dataset.from_list(TALKS)
    rows.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(folder / "splits")
    (folder / "parquet").mkdir()
    rows.to_parquet(folder / "parquet" / "train-0.parquet")
    rows.select([0]).to_parquet(folder / "parquet" / "test-0.parquet")
    (folder / "json").mkdir()
    rows.to_json(folder / "json" / "any.jsonl")
    shutil.copy(next((folder / "saved").glob("*.arrow")), folder / "file.arrow")
    return folder


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("saved", 5),
        ("saved[:2]", 2),
        ("saved[:9]", 5),
        ("splits:train", 5),
        ("splits:test[:3]", 1),
        ("parquet:train", 5),
        ("parquet:default:train[:2]", 2),
        ("parquet/train-0.parquet", 5),
        ("file.arrow", 5),
        ("json", 5),
    ],
)
def test_every_form_gives_the_same_rows(here, name, count):
    table = open_source(str(here / name))
    expected = [{"messages": row["messages"]} for row in TALKS[:count]]
    named = [(f"{here / name}, row {i}", row) for i, row in enumerate(expected)]
    # As often as it is asked for.
    assert list(table) == list(table) == named
    assert table.revision is None


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("splits", ValueError, r"which split\? There are train, test; name one as in .*:train"),
        ("parquet", ValueError, r"which split\? There are train, test; name"),
        ("splits:dev", ValueError, r"no split 'dev'\? There are train, test"),
        ("saved:train", ValueError, "saved without the 'train' that"),
        ("parquet:other:train", OSError, "could not be read as a dataset: .*'other' not found"),
        ("parquet@main:train", ValueError, "only datasets on the Hub have revisions"),
        ("parquet:train[2:3]", FileNotFoundError, "is not a file: neither a JSONL file nor"),
        ("none.jsonl", FileNotFoundError, "is not a file: neither a JSONL file nor"),
        ("empty", OSError, "could not be read as a dataset"),
        ("other.parquet", ValueError, "has the columns id; it needs one of messages, "),
    ],
)
def test_names_that_lead_nowhere(here, name, error, message):
    (here / "empty").mkdir(exist_ok=True)
    datasets.Dataset.from_list(TALKS).remove_columns("messages").to_parquet(here / "other.parquet")
    with pytest.raises(error, match=message):
        open_source(str(here / name))


def test_a_missing_file_is_not_looked_for_on_the_hub(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    for name in ("data/rows.jsonl", "rows", "./data/rows", "data/rows.json:train"):
        with pytest.raises(FileNotFoundError, match="is not a file"):
            open_source(name)


def test_without_the_library_jsonl_is_read_all_the_same(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert isinstance(open_source(str(here / "json" / "any.jsonl")), Path)
    with pytest.raises(ValueError, match="pip install datasets"):
        open_source("lab/chat:train")


@pytest.fixture
def hub(here, monkeypatch):
    """`lab/chat` on the Hub, as the library's builder shows it."""
    asked = []
    build = datasets.load_dataset_builder

    def load_dataset_builder(path, *arguments, **options):
        if not path.startswith("lab/"):
            return build(path, *arguments, **options)
        asked.append((path, *arguments, options["revision"]))
        if path != "lab/chat":
            raise ConnectionError("no route")
        builder = build(str(here / "parquet"))
        builder.hash = COMMIT
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return asked


def test_the_hub_is_asked_for_what_is_spelled(hub):
    table = open_source("lab/chat:train")
    assert table.revision == COMMIT
    assert str(table) == f"lab/chat:train, revision {COMMIT}"
    assert [where for where, _ in table][-1] == "lab/chat:train, row 4"
    part = open_source("lab/chat@v1.0:main:train[:2]")
    assert isinstance(part.rows, datasets.IterableDataset)
    assert len(list(part)) == 2
    with pytest.raises(OSError, match=r"lab/none:x could not be read .*no route.*It is spelled"):
        open_source("lab/none:x")
    assert hub == [("lab/chat", None, None), ("lab/chat", "main", "v1.0"), ("lab/none", None, None)]


def test_another_commit_from_the_cache_is_not_taken(hub):
    assert open_source(f"lab/chat@{COMMIT}:train").revision == COMMIT
    with pytest.raises(OSError, match=f"holds commit {COMMIT} only"):
        open_source(f"lab/chat@{'0' * 40}:train")


def test_a_table_that_breaks_off_is_named():
    def rows():
        yield {"prompt": "hi"}
        raise ConnectionError("reset by peer")

    named = DatasetRows("lab/chat:train", None, rows())
    with pytest.raises(OSError, match=r"lab/chat:train could not be read .*reset by peer"):
        list(read_prompts([named], True, Console(quiet=True)))


def test_rows_that_cannot_be_used_are_named_by_dataset_and_row(here):
    name = str(here / "saved")
    with pytest.raises(MalformedRow, match=r"saved, row 3: a turn needs a role and text"):
        list(read_prompts([open_source(name)], False, Console(quiet=True)))
    console = Console(record=True, width=300)
    assert len(list(read_prompts([open_source(name)], True, console))) == 4
    assert "saved, row 3: a turn needs" in console.export_text()


def config(tmp_path, **fields):
    drafter = {"mask_token_id": 4, "block_size": 3}
    return RunConfig("target", output=str(tmp_path), drafter=drafter, **fields)


def test_a_run_takes_a_table_as_its_data(hub, here, tmp_path):
    """With the revision for the model card."""
    run = config(tmp_path, data="lab/chat:train", on_error="skip")
    console = Console(record=True, width=300)
    train, validation = load_examples(run, make_tokenizer(), 3, console)
    assert "skipped lab/chat:train, row 3" in console.export_text()
    assert (len(train), len(validation)) == (4, 0)
    assert train.revision == COMMIT
    tokenizer = make_tokenizer()
    rows = usable_rows(
        open_source(str(here / "saved")),
        lambda row, where: make_example(row, where, tokenizer, 4096),
        lambda error: None,
    )
    assert train.examples == list(rows)
    with pytest.raises(MalformedRow, match="lab/chat:train, row 3"):
        load_examples(config(tmp_path, data="lab/chat:train"), tokenizer, 3, console)


def test_the_trainer_takes_a_dataset(here, tmp_path):
    """Mapped by `make_example`; it trains on the same batches as with examples in memory."""
    tokenizer, losses = make_tokenizer(), []
    rows = datasets.load_from_disk(here / "saved").select([0, 1, 2, 4])
    mapped = rows.map(
        lambda row: dataclasses.asdict(make_example(row, "row", tokenizer, 99)),
        remove_columns=rows.column_names,
    )
    (tmp_path / "data").mkdir()
    rows.to_json(tmp_path / "rows.jsonl")
    in_memory, _ = load_examples(
        config(tmp_path, data=str(tmp_path / "rows.jsonl")), tokenizer, 3, Console(quiet=True)
    )
    for data in (mapped, in_memory):
        trainer = make_trainer(tmp_path / "run", train=data, validation=data, max_steps=1)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"holds `input_ids` and a `loss_mask` .* found id, mess"):
        make_trainer(tmp_path / "run", train=rows).train()
