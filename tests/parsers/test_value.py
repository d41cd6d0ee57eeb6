"""The end of a JSON value against the standard library's reader."""

from __future__ import annotations

import json
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.parsers.value import Value
from tests.parsers.pieces import cuts
from tests.parsers.test_any_cut import JSON, written


@settings(max_examples=400, deadline=None)
@given(data=st.data(), behind=st.sampled_from(["", "}", '"', "]]", ",{}", "\\", "<", "x" * 99]))
def test_ends_where_the_library_ends(data: st.DataObject, behind: str) -> None:
    """Guards against brackets counted in strings, escapes misread, and what comes behind being taken along."""
    value = data.draw(JSON.filter(lambda value: isinstance(value, (dict, list, str))))
    text = data.draw(written(value)) + behind
    _, end = json.JSONDecoder().raw_decode(text)
    scan = Value(text[0])
    left, place = "", 0
    ends = [*sorted(data.draw(cuts(text))), len(text)]
    for start, stop in zip([0, *ends], ends, strict=False):
        if not scan.done:
            left += text[start:stop]
            passed = scan.scan(left, 0)
            left, place = left[passed:], place + passed
    assert scan.done
    assert not scan.broken
    assert place == end


def test_long_values() -> None:
    """Guards against windows that cut escapes, strings or brackets wrongly, and depths that are counted wrongly."""
    for unit in ('"\\"",', "[],", '{"a":"}"},', "\\\\,", "é,", '"\\\\",', '[[["]"]]],'):
        for shift in range(4):
            text = "[" * 300 + " " * shift + unit * 3000 + "]" * 300
            scan = Value("[")
            assert scan.scan(text + "]]", 0) == len(text)
            assert scan.done
    scan = Value("{")
    assert scan.scan('{"a": "<", <', 0) == len('{"a": "<", ')
    assert (scan.done, scan.broken) == (False, True)


def test_what_lies_behind_costs_nothing() -> None:
    """R16: guards against a short value that has all the text behind it searched, call after call."""

    def seconds(text: str) -> float:
        start = time.thread_time()
        for _ in range(200):
            Value("{").scan(text, 0)
        return time.thread_time() - start

    text = '{"a": [1], "b": "c"}'
    assert seconds(text + "x" * 1_000_000) < 10 * max(1e-3, seconds(text))
