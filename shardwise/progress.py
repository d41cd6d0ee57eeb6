"""Remarks, spinners and bars for people on a terminal; quiet in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """A remark for people."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose text can be changed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as spinner:
        yield spinner.update


@contextmanager
def bar(total: int | None, what: str = "generating") -> Iterator[Callable[[], None]]:
    """A bar over ``total`` prompts or items, none for a single one; None: nobody knows how many there are."""
    if not sys.stderr.isatty() or (total is not None and total < 2):
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
