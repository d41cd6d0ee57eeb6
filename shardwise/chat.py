"""`shardwise chat` once its options are read: a conversation with a model, in a terminal or through a pipe.

Knows where lines come from and go to, and what commands mean; where answers come from is `answers`' business.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.answers import Local, NoAnswer, Server, Source
from shardwise.conversation import Conversation

HELP = """\
/help              this
/clear             forget the conversation
/system TEXT       tell the model who it is; without TEXT: no longer
/undo              forget the last question and its answer
/retry             ask the last question again
/save FILE         write the conversation to a new file
/load FILE         go on with a conversation from a file
/params name=value set a sampling field, such as temperature=0.7; name= takes it back; alone: show them
/quit              leave, as Ctrl-D does
//text             a message that begins with /
Ctrl-C stops an answer; what came of it stays."""


@dataclass(frozen=True)
class Job:
    """What the command line asks for."""

    url: str | None
    """Of a server; None loads the model here."""
    api_key: str = ""
    model: str | None = None
    """The server's name for it (None: its first), or what to load."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig that were given, for a model that is loaded here."""
    generation_config: bool = True
    system: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields that were given, of those in PARAMS."""


def run(job: Job) -> int:
    """Talk until the input ends; returns the exit code: 1 if something failed in a pipe.

    Raises ValueError for what can't be done at all.
    """
    talk = Conversation(job.system, job.params)
    if job.url is not None:
        if job.settings:
            raise ValueError(f"{', '.join(job.settings)}: how the model runs is the server's choice; leave it out")
        source: Source = Server(job.url, job.api_key, job.model)
    else:
        source = Local(job.model or "smollm2", job.settings, job.generation_config)
    with closing(source):
        return Chat(source, talk, terminal=sys.stdin.isatty() and sys.stdout.isatty()).run()


class Chat:
    """Lines in, answers out. Without a ``terminal``: a message per line, and nothing but answers."""

    def __init__(self, source: Source, talk: Conversation, terminal: bool) -> None:
        self._source = source
        self._talk = talk
        self._terminal = terminal
        self._leaving = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._note(HELP),
            "clear": lambda _: talk.clear(),
            "system": self._set_system,
            "undo": lambda _: self._note(f"forgotten: {talk.undo()}"),
            "retry": lambda _: self.ask(talk.undo()),
            "save": self._save,
            "load": self._load,
            "params": self._set_params,
            "quit": self._quit,
        }

    def run(self) -> int:
        """Talk until the input ends; the exit code."""
        failed = False
        if self._terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines and knows earlier ones)
            self._note(f"{self._source.name} · /help tells of commands, Ctrl-D leaves")
        while not self._leaving and (line := self._line()) is not None:
            try:
                self.take(line)
            except (ValueError, NoAnswer) as error:
                failed = True
                self._complain(str(error))
        return int(failed and not self._terminal)

    def take(self, line: str) -> None:
        """One line: a command or a message. Raises ValueError or NoAnswer with a sentence for people."""
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name not in self._commands:
                raise ValueError(f"there is no command /{name}; /help lists them")
            self._commands[name](rest.strip())
        elif text:
            self.ask(text.removeprefix("/"))

    def ask(self, question: str) -> None:
        """Ask, and print the answer as it comes; what comes of it is kept, even if that isn't all. Raises NoAnswer."""
        messages = self._talk.ask(question)
        answer, reason, thought = "", None, False
        try:
            with (
                stoppable(self._source.can_interrupt) as check,
                closing(self._source.answer(messages, self._talk.params)) as pieces,
            ):
                for piece in pieces:
                    if piece.reasoning and self._terminal:
                        self._print(piece.reasoning, dim=True)
                        thought = True
                    if piece.text:
                        gap = "\n\n" if thought and not answer else ""
                        answer += piece.text  # first, since what is seen must be kept
                        self._print(gap + piece.text)
                    reason = piece.finish_reason or reason
                    check()
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            reason = "stopped"
        finally:
            if thought or answer:
                self._print("\n")
            self._talk.keep(answer)
        if reason == "stopped":
            self._note("stopped" if answer else "stopped before anything came; /retry asks again")
        elif reason == "length":
            self._note("cut off: max_tokens or the model's context is reached")
        elif reason == "abort":
            raise NoAnswer("the server ended the answer before it was done")
        elif not answer:
            raise NoAnswer("the model answered nothing")

    def _line(self) -> str | None:
        """The next line of input; None at its end."""
        if not self._terminal:
            try:
                return sys.stdin.readline() or None
            except UnicodeDecodeError:
                raise ValueError("the input is not text in UTF-8") from None
        while True:
            try:
                return input("> ")
            except EOFError:
                self._print("\n")
                return None
            except KeyboardInterrupt:
                self._print("\n")
                self._note("Ctrl-D or /quit leaves")

    def _set_system(self, text: str) -> None:
        self._talk.system = text

    def _save(self, name: str) -> None:
        path = _path(name, "/save FILE")
        self._talk.save(path)
        self._note(f"{len(self._talk.messages)} messages written to {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load FILE")
        self._talk.load(path)
        self._note(f"{len(self._talk.messages)} messages read from {path}")

    def _set_params(self, text: str) -> None:
        self._talk.set_params(text)
        shown = (f"{name}={json.dumps(value)}" for name, value in self._talk.params.items())
        self._note(" ".join(shown) or "no sampling fields are set; the model's defaults hold")

    def _quit(self, _: str) -> None:
        self._leaving = True

    def _print(self, text: str, dim: bool = False) -> None:
        if self._terminal:
            text = printable(text)
        sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if dim else text)
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        """A remark for people on a terminal."""
        if self._terminal:
            _show(text, "dim")

    def _complain(self, text: str) -> None:
        if self._terminal:
            _show(text, "red")
        else:
            print(f"shardwise: {printable(text)}", file=sys.stderr)


@contextmanager
def stoppable(at_once: bool) -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C raises KeyboardInterrupt: if ``at_once`` wherever it comes, else at the next call of what
    is yielded; a second one, before that, ends the program.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if at_once:
            raise KeyboardInterrupt
        if pressed:
            sys.exit(130)
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def printable(text: str) -> str:
    """The text without what a terminal would obey; line ends and tabs stay."""
    return "".join(
        letter for letter in text if letter in "\n\t" or not (ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0)
    )


def _show(text: str, style: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(printable(text), style=style, markup=False, highlight=False)


def _path(name: str, usage: str) -> Path:
    if not name:
        raise ValueError(f"say which file: {usage}")
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"{name}: there is no such home") from None
