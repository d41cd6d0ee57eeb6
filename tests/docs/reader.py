"""Does what a page says, in order and in a folder of its own: writes its files, starts its servers, runs its commands.

What it changes: the usual ports become free ones, and nothing is fetched from anywhere.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.docs.pages import PYTHON, ROOT, Block, commands_of
from tests.server.dictation import save_chat_model
from tests.tiny import save_text_model

LIMIT = 600.0
"""Seconds for one command, and for a server to become ready."""
SERVER = re.compile(r"\bshardwise\s+serve\b")
PORTS = re.compile(r"(?<![\d.])(8000|8080|8081|8082)\b")
CARRIED = ("cd ", "export ", "source ", ". ")
"""Commands that change what follows them."""


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
}
GIVEN = {
    "prompts.jsonl": lines(*({"prompt": f"{word} is", "max_tokens": 5} for word in ("Water", "Air", "Fire"))),
    "texts.jsonl": lines("one", "three", "seventeen"),
    "words.jsonl": lines("one", "three", "seventeen"),
    "person.json": json.dumps({**SCHEMA, "required": ["name", "age"]}),
}
"""Files that pages speak of as the reader's own."""
MODELS: dict[str, Callable[[Path], object]] = {"MODEL": save_text_model, "Qwen3-0.6B": save_chat_model}
"""Models that stand for the reader's."""


class Reader:
    """Somebody who follows one page; close it at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        self._server: subprocess.Popen[str] | None = None
        self._told: Path | None = None
        self._before = ""
        for name in ("examples", "bench", "scripts", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 250\n")
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "SHARDWISE_API_KEY"},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CURL_HOME": str(folder),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
        }

    def prepare(self, blocks: list[Block]) -> None:
        """Make what the page takes for granted, and the files that it shows."""
        said = "".join(block.text for block in blocks if block.runs or block.file)
        for name, text in GIVEN.items():
            if name in said:
                (self._folder / name).write_text(text)
        for name, save in MODELS.items():
            if re.search(rf"\b{re.escape(name)}\b", said):
                save(self._folder / name)
        for block in blocks:
            if block.file:
                path = self._folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._text(block.text))

    def follow(self, block: Block) -> None:
        """Run one block. AssertionError with what it printed if it doesn't do."""
        if block.language in PYTHON:
            name = f"at_line_{block.line}.py"
            (self._folder / name).write_text(self._text(block.text))
            self._run(f"python {name}", str(block))
            return
        for command in commands_of(block.text, block.language):
            self.command(command, str(block))

    def command(self, command: str, place: str) -> None:
        """Run one command, or start it if it serves."""
        command = self._text(command)
        if SERVER.search(command):
            self._serve(command, place)
            return
        self._run(command, place)
        if command.startswith(CARRIED):
            self._before += command

    def close(self) -> None:
        """Stop what serves, as a reader would. AssertionError if it doesn't end well."""
        server, self._server = self._server, None
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
        assert self._told is not None
        assert code == 0, f"the server ended with {code}:\n{self._told.read_text()[-4000:]}"

    def _text(self, text: str) -> str:
        return PORTS.sub(lambda match: self._port(match[0]), text)

    def _port(self, usual: str) -> str:
        if usual not in self._ports:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                self._ports[usual] = str(listener.getsockname()[1])
        return self._ports[usual]

    def _run(self, command: str, place: str) -> None:
        if "shardwise chat" in command and "<" not in command:
            command = f"{command.rstrip()} <<< $'/params max_tokens=16\\nHello!'"  # somebody types, and has little time
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", self._before + command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=LIMIT)
            except BaseException:  # all of it, so that nothing is left behind
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, f"{place}: {command.strip()}\nended with {process.returncode}:\n{said[-4000:]}"

    def _serve(self, command: str, place: str) -> None:
        self.close()
        words = shlex.split(command, comments=True)
        if "--port" not in words:
            words += ["--port", self._port("8000")]
        if "smollm2" in words:
            words += ["--max-model-len", "1024"]  # an answer without max_tokens may be as long as the context
        if "--model-store" in words and "--management-port" not in words:
            words += ["--management-port", self._port("8081")]
        port = words[words.index("--port") + 1]
        self._told = self._folder / "server.log"
        with self._told.open("w") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"{self._before}exec env {shlex.join(words)}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        deadline = time.monotonic() + LIMIT
        while not any(answers(f"http://127.0.0.1:{port}{route}") for route in ("/health/ready", "/ping")):
            ended = self._server.poll()
            told = f"{place}: {command.strip()}\n{self._told.read_text()[-4000:]}"
            assert ended is None, f"ended with {ended}: {told}"
            assert time.monotonic() < deadline, f"never became ready: {told}"
            time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether somebody is there who is well."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
