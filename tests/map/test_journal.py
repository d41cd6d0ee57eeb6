"""The output and its journal: whatever is left of them after an interruption, going on gives the whole answer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from shardwise.mapping.journal import AHEAD, Journal

COUNT = 12
LINES = [b'"item %d"' % index for index in range(COUNT)]
BODIES = [b'"output": "%s"' % (b"x" * index) for index in range(COUNT)]
HEAD = {"factory": "a:b", "settings": {"k": 1}}
WHOLE = b"".join(b'{"index": %d, %s}\n' % pair for pair in enumerate(BODIES))


def do(journal: Journal, indexes: list[int]) -> list[int]:
    """Do those that aren't done; which those are."""
    todo = [index for index in indexes if not journal.knows(index, LINES[index])]
    for index in todo:
        for _ in journal.write(index, LINES[index], BODIES[index]):
            pass
    return todo


@pytest.mark.parametrize("seed", range(4))
def test_any_end_can_be_gone_on_from(tmp_path: Path, seed: int) -> None:
    """Guards results from kills and power cuts: both files may end anywhere, and no answer is lost, doubled or torn."""
    choice = random.Random(seed)
    order = choice.sample(range(COUNT), COUNT - 3)
    path = tmp_path / "out"
    journal = Journal(path, HEAD)
    do(journal, order)
    notes, output = journal.notes.read_bytes(), path.read_bytes()
    journal.close()
    for _ in range(40):
        journal.notes.write_bytes(notes[: choice.randint(0, len(notes))])
        path.write_bytes(output[: choice.randint(0, len(output))])
        if b"\n" not in journal.notes.read_bytes() and path.stat().st_size:
            with pytest.raises(ValueError, match="is empty: --overwrite"):  # results are not thrown away
                Journal(path, HEAD)
            continue
        again = Journal(path, HEAD)
        assert len(do(again, list(range(COUNT)))) == COUNT - again.resumed
        again.end(COUNT)
        again.close()
        assert path.read_bytes() == WHOLE
    path.write_bytes(output)
    journal.notes.write_bytes(notes)
    again = Journal(path, HEAD)
    assert again.resumed == len(order)
    assert sorted(do(again, list(range(COUNT)))) == sorted(set(range(COUNT)) - set(order))
    again.close()


def test_answers_come_in_order_without_a_file() -> None:
    """Guards streams: each line once, in its turn, whatever the order in which items are done; the store is emptied."""
    journal = Journal(None, HEAD)
    order = random.Random(1).sample(range(COUNT), COUNT)
    lines = [line for index in order for line in journal.write(index, LINES[index], BODIES[index])]
    assert b"".join(lines) == WHOLE
    assert journal._journal.tell() == 0
    assert not journal.knows(COUNT, b"")
    assert journal.room(COUNT + AHEAD - 1)
    assert not journal.room(COUNT + AHEAD)
    journal.close()


def test_a_share_of_several_processes(tmp_path: Path) -> None:
    """Guards parts of a world: indexes keep their stride, errors are counted, also after an interruption."""
    bad = b'"error": {"type": "E", "message": ""}'
    for _ in range(2):
        journal = Journal(tmp_path / "out", HEAD, first=1, step=3, run="abc")
        for index in (4, 1):
            if not journal.knows(index, LINES[index]):
                list(journal.write(index, LINES[index], bad if index == 4 else BODIES[index]))
        assert (journal.next, journal.failed) == (7, 1)
        journal.end(7)
        journal.close()
    assert journal.resumed == 2
    assert [json.loads(line)["index"] for line in (tmp_path / "out").read_bytes().splitlines()] == [1, 4]


def test_what_can_not_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    """Guards finished results from being written over, and answers from being mixed with those of another input."""
    path = tmp_path / "out"
    journal = Journal(path, HEAD)
    do(journal, [0, 1, 5])
    with pytest.raises(ValueError, match="being written by another process"):
        Journal(path, HEAD)
    journal.close()
    with pytest.raises(ValueError, match=r"begun otherwise.*\"k\": 1.*\"k\": 2.*--overwrite"):
        Journal(path, {**HEAD, "settings": {"k": 2}})
    again = Journal(path, HEAD)
    with pytest.raises(ValueError, match="line 2 of the input is not the one"):
        again.knows(1, b'"other"')
    with pytest.raises(ValueError, match="only 2 lines"):
        again.end(2)
    again.close()
    journal.notes.write_bytes(journal.notes.read_bytes() + b"12 nonsense\n")
    with pytest.raises(ValueError, match="damaged"):
        Journal(path, HEAD)
    journal.notes.unlink()
    with pytest.raises(ValueError, match=r"exists.*--overwrite"):
        Journal(path, HEAD)
    fresh = Journal(path, HEAD, overwrite=True)
    assert (fresh.resumed, path.read_bytes()) == (0, b"")
    do(fresh, [0])
    fresh.close()
    path.unlink()
    anew = Journal(path, HEAD)
    assert anew.resumed == 0  # whoever removes the output wants it anew
    anew.close()
    with pytest.raises(ValueError, match="no directory"):
        Journal(tmp_path / "nowhere" / "out", HEAD)
