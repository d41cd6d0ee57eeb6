"""Inputs as lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.mapping.source import Pipe, Source, encode_values, open_lines

DATA = b'\xef\xbb\xbf"a"\r\n\n  \n"b\xff"\n{"c": 1}'
LINES = [b'"a"', b"", b"  ", b'"b\xff"', b'{"c": 1}']


def rest(source: Source) -> list[bytes]:
    found = []
    while not source.ended:
        if (line := source.take()) is not None:
            found.append(line)
    return found


def test_a_file_and_a_pipe_have_the_same_lines(tmp_path: Path) -> None:
    """Guards line numbers: a blank line is an item too, the last may have no end, marks and CRs are no content."""
    (tmp_path / "in").write_bytes(DATA)
    source = open_lines(tmp_path / "in")
    assert rest(source) == LINES
    source.close()
    for data in (DATA, DATA + b"\n"):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        pipe = Pipe(read)
        assert rest(pipe) == LINES
        assert pipe.take() is None
        pipe.close()


def test_a_slow_pipe_is_not_waited_for() -> None:
    """Guards answers from waiting for the next input: `take` has nothing yet, and says what to wait for."""
    read, write = os.pipe()
    pipe = Pipe(read)
    assert pipe.take() is None
    assert not pipe.ended
    assert pipe.wake() == read
    os.write(write, b"1\n2")
    assert pipe.take() == b"1"
    assert pipe.take() is None
    os.close(write)
    assert rest(pipe) == [b"2"]
    pipe.close()


def test_a_fifo_is_a_pipe(tmp_path: Path) -> None:
    """Guards --input FIFO, which can't be read as a file is."""
    os.mkfifo(tmp_path / "fifo")
    end = os.open(tmp_path / "fifo", os.O_RDWR)
    source = open_lines(tmp_path / "fifo")
    assert source.take() is None
    os.write(end, b"7\n")
    assert source.take() == b"7"
    source.close()
    os.close(end)


def test_values_are_taken_one_by_one() -> None:
    """Guards memory, and generators that depend on what was answered; a value that can't travel is named."""
    taken = []

    def values() -> object:
        for value in ({"a": "\ud800"}, [1, None], {2}):
            taken.append(value)
            yield value

    source = encode_values(values())  # type: ignore[arg-type]
    assert not taken
    assert source.take() == b'{"a": "\\ud800"}'
    assert len(taken) == 1
    assert source.take() == b"[1, null]"
    with pytest.raises(ValueError, match="item 2 must be a JSON value"):
        source.take()


def test_an_input_that_can_not_be_read(tmp_path: Path) -> None:
    """Guards against a traceback."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="--input"):
            open_lines(path)
