"""The lines of a run, and the folder they are in."""

import json

import pytest

from dspark_hf.evaluation.records import Record, RecordFolder

ROUNDS = [[3, 4, 4, 2], [1, 4, 4, 0], [2, 4, 2, 2]]
CONFIDENCES = [[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4], [0.5, 0.5]]
RECORD = Record("d", 1.0, "a", 0, "x", 5, list(range(10, 17)), 2.0, 0.5, 1.0, ROUNDS, CONFIDENCES)


def test_a_record_gives_back_the_rounds_and_their_statistics():
    """The first token belongs to no round; the last round stopped inside its accepted run."""
    records = RECORD.round_records()
    assert [r.tokens for r in records] == [[11, 12, 13], [14], [15, 16]]
    assert [r.num_accepted for r in records] == [2, 0, 2]
    assert records[2].confidences == [0.5, 0.5]
    statistics = RECORD.statistics()
    assert (statistics.rounds, statistics.committed, statistics.accepted) == (3, 6, 4)
    assert statistics.new_tokens == 7
    assert statistics.verify_rate == 6 / (10 + 3)
    assert statistics.other_seconds == pytest.approx(0.5)


def test_lines_are_read_back(tmp_path):
    """A record after a round trip is the record."""
    RecordFolder(tmp_path, {"a": (1, 2)}).append(RECORD)
    folder = RecordFolder(tmp_path, {"a": (1, 2)})
    assert folder.records == {RECORD.key: RECORD}


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"drafter": "d"}', '{"extra": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    """Only a last line without its end can come from an interruption."""
    RecordFolder(tmp_path, {}).append(RECORD)
    with open(tmp_path / "records.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 2: .*Remove the line"):
        RecordFolder(tmp_path, {})


def test_a_torn_last_line_is_dropped(tmp_path):
    """And the next record starts on a line of its own."""
    RecordFolder(tmp_path, {}).append(RECORD)
    path = tmp_path / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    folder = RecordFolder(tmp_path, {})
    assert len(folder.records) == 1
    folder.append(RECORD)
    assert path.read_text() == whole * 2


def test_settings_are_compared_key_by_key(tmp_path):
    """Missing and added ones are differences too."""
    RecordFolder(tmp_path, {"dtype": "float32", "threads": 1})
    with pytest.raises(ValueError, match="other settings") as raised:
        RecordFolder(tmp_path, {"threads": 2, "device": "cpu"})
    text = str(raised.value)
    assert "dtype is 'float32' there and None now" in text
    assert "threads is 1 there and 2 now" in text
    assert "device is None there and 'cpu' now" in text


def test_a_full_disk_and_a_file_in_place_of_the_folder(tmp_path, monkeypatch):
    folder = RecordFolder(tmp_path / "out", {})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*answers before it are kept"):
        folder.append(RECORD)
    with pytest.raises(ValueError, match="is a file; give a folder"):
        RecordFolder(tmp_path / "out" / "records.jsonl", {})


def test_records_without_readable_settings_are_not_trusted(tmp_path):
    """Nobody knows what they depend on."""
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(ValueError, match="another output folder"):
        RecordFolder(tmp_path, {})
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        RecordFolder(tmp_path, {})
    assert json.loads(
        (RecordFolder(tmp_path / "new", {"a": 1}).folder / "settings.json").read_text()
    )
