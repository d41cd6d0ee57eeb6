"""`shardwise chat`: what lines do, a server's answers over a socket, a local model, and Ctrl-C on a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from shardwise.answers import Local, Messages, NoAnswer, Piece, Server, events
from shardwise.chat import Chat, Job, printable, run, stoppable
from shardwise.cli import app
from shardwise.conversation import PARAMS, Conversation
from tests.harness import start_threads
from tests.server.conftest import deps_on, serving
from tests.tiny import save_text_model


class Echo:
    """Answers each question with itself, word by word."""

    name = "echo"

    def __init__(self, can_interrupt: bool = True) -> None:
        self.can_interrupt = can_interrupt
        self.asked: list[list[Mapping[str, str]]] = []
        self.params: Mapping[str, Any] = {}
        self.num_open = 0

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Generator[Piece, None, None]:
        self.asked.append(list(messages))
        self.params = dict(params)
        self.num_open += 1
        try:
            for word in messages[-1]["content"].split():
                if word == "fail":
                    raise NoAnswer("it failed")
                if word == "press":
                    signal.raise_signal(signal.SIGINT)
                yield Piece(f"{word} ")
            yield Piece(finish_reason="stop")
        finally:
            self.num_open -= 1

    def close(self) -> None:
        pass


def talk(
    source: Any, *lines: str, terminal: bool = False, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[int, Conversation]:
    """The exit code and the conversation of these lines."""
    conversation = Conversation(**settings)
    if terminal:
        left = iter(lines)

        def answer(prompt: str) -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", answer)
    else:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return Chat(source, conversation, terminal).run(), conversation


def roles(messages: list[Mapping[str, str]]) -> str:
    return " ".join(f"{each['role'][0]}:{each['content'].strip()}" for each in messages)


def test_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards scripts: a message per line, answers alone on stdout, the history goes along, the exit code is 0."""
    source = Echo()
    code, conversation = talk(source, "one two", "", "//three", monkeypatch=monkeypatch, system="be brief")
    told = capsys.readouterr()
    assert (code, told.out, told.err) == (0, "one two \n/three \n", "")
    assert roles(source.asked[1]) == "s:be brief u:one two a:one two u:/three"
    assert roles(list(conversation.messages)) == "u:one two a:one two u:/three a:/three"


def test_pipe_tells_of_failures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards scripts: what failed is on stderr and in the exit code, what came before stays, the next line goes on."""
    source = Echo()
    code, conversation = talk(source, "now fail", "/nonsense", "fail", "next", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert code == 1
    assert told.out == "now \nnext \n"
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["shardwise"] * 3
    assert roles(list(conversation.messages)) == "u:now fail a:now u:next a:next"
    assert source.num_open == 0


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards every command: what the model is asked afterwards shows what it did."""
    file = tmp_path / "talk.json"
    source = Echo()
    lines = (
        *("/help", "a", "/system you are B", '/params temperature=0.5 stop=["x"]', "b", "/undo", "c", "/retry"),
        *(f"/save {file}", "/clear", "d", f"/load {file}", "e", f"/save {file}", "/params temperature= seed=7"),
        *("/params", "/system", "/clear", "f", "/quit", "never"),
    )
    code, conversation = talk(source, *lines, terminal=True, monkeypatch=monkeypatch)
    assert code == 0
    assert [roles(messages) for messages in source.asked] == [
        "u:a",
        "s:you are B u:a a:a u:b",
        "s:you are B u:a a:a u:c",
        "s:you are B u:a a:a u:c",
        "s:you are B u:d",
        "s:you are B u:a a:a u:c a:c u:e",
        "u:f",
    ]
    assert source.params == conversation.params == {"stop": ["x"], "seed": 7}
    saved = json.loads(file.read_text())
    assert roles(saved["messages"]) == "u:a a:a u:c a:c u:e a:e"
    assert saved["params"] == {"temperature": 0.5, "stop": ["x"]}
    told = capsys.readouterr()
    assert told.out == "".join(f"{letter} \n" for letter in "abccdef")
    assert "/retry" in told.err
    assert "seed=7" in told.err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nonsense", "no command /nonsense"),
        ("/undo", "nothing was asked"),
        ("/retry", "nothing was asked"),
        ("/save", "say which file"),
        ("/load", "say which file"),
        ("/load {dir}/none.json", "can't be read: No such file"),
        ("/load {dir}", "can't be read: Is a directory"),
        ("/load {dir}/bad.json", "not valid JSON"),
        ("/load {dir}/latin.json", "not valid JSON"),
        ("/load {dir}/number.json", "not a conversation"),
        ("/load {dir}/turns.json", "by turns"),
        ("/load {dir}/params.json", "'n' can't be set"),
        ("/load {dir}/content.json", "role and content"),
        ("/save {dir}/bad.json", "exists already"),
        ("/save {dir}/none/x.json", "can't be written: No such file"),
        ("/save ~nosuchuser/x", "no such home"),
        ("/params temperature", "name=value"),
        ("/params temperature=hot", "temperature"),
        ("/params n=2", "'n' can't be set"),
        ("/params max_tokens=5 min_tokens=6", "min_tokens 6 is more than"),
    ],
)
def test_bad_input(line: str, says: str, tmp_path: Path) -> None:
    """Guards against a traceback or silence: each mistake has its sentence, and nothing is changed by it."""
    question = {"role": "user", "content": "q"}
    for name, data in {
        "bad": b"{",
        "latin": b'["\xe9"]',
        "number": b"3",
        "turns": json.dumps([question, question]).encode(),
        "params": b'{"messages": [], "params": {"n": 2}}',
        "content": b'[{"role": "user", "content": null}]',
    }.items():
        (tmp_path / f"{name}.json").write_bytes(data)
    before = sorted(tmp_path.iterdir())
    conversation = Conversation("system", {"seed": 1})
    chat = Chat(Echo(), conversation, terminal=False)
    with pytest.raises(ValueError, match=says):
        chat.take(line.format(dir=tmp_path))
    assert (conversation.system, conversation.params, conversation.messages) == ("system", {"seed": 1}, [])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("can_interrupt", [True, False])
def test_ctrl_c_stops_an_answer(
    can_interrupt: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C80: guards Ctrl-C in both of its ways: the answer ends, what came of it stays, and the chat goes on."""
    handler = signal.getsignal(signal.SIGINT)
    source = Echo(can_interrupt)
    lines = ("one press two", "press", "/retry", "more")
    code, conversation = talk(source, *lines, terminal=True, monkeypatch=monkeypatch)
    assert code == 0
    said = roles(list(conversation.messages))
    if can_interrupt:
        assert said == "u:one press two a:one u:more a:more"
        assert [each[-1]["content"] for each in source.asked] == ["one press two", "press", "press", "more"]
    else:
        assert said == "u:one press two a:one press u:press a:press u:more a:more"
    assert "stopped" in capsys.readouterr().err
    assert source.num_open == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_ends_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """C80: guards scripts: there Ctrl-C ends it all."""
    with pytest.raises(KeyboardInterrupt):
        talk(Echo(), "one press", "two", monkeypatch=monkeypatch)


def test_second_ctrl_c_does_not_wait() -> None:
    """C80: guards against a terminal that is stuck while a local model reads a long prompt."""
    with pytest.raises(SystemExit), stoppable(at_once=False):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_terminal_is_not_told_what_to_do() -> None:
    """R39: guards the terminal against a model that writes its control codes."""
    assert printable("a\x1b[2J\x9b1m\tb\nc\r\x07é") == "a[2J1m\tb\ncé"


class Handler(BaseHTTPRequestHandler):
    """A server that answers by the last message: see `test_server`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer sk-1":
            return self._reply(401, {"error": {"message": "a valid API key is required"}})
        return self._reply(200, {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self._reply(429, {"error": {"message": "too many requests"}}, {"Retry-After": "7"})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if text == "garbage":
            self._chunk(b"data: {nonsense\n\n")
            return
        self._say({"role": "assistant", "content": ""})
        self._say({"reasoning_content": "hm"})
        self._say({"content": "grü"})
        self._say({"content": "ße"})
        if text == "cut":
            return
        if text == "break":
            self._chunk(b'data: {"error": {"message": "internal error"}}\n\n')
            return
        if text == "wait":  # until the client leaves
            self.connection.settimeout(30)
            if self.connection.recv(1) == b"":
                self.server.left.set()  # type: ignore[attr-defined]
            return
        self._say({}, "length")
        self._chunk(b'data: {"choices": [], "usage": {}}\n\n: a remark\n\ndata: [DONE]\n\n')
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, status: int, document: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def _say(self, delta: Any, reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        self._chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        for part in (data[:7], data[7:]):  # events don't end where chunks do
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.flush()


@pytest.fixture
def web() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    server.bodies, server.left = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def url_of(web: Any) -> str:
    return f"http://127.0.0.1:{web.server_port}/v1"


def test_server(web: Any) -> None:
    """Guards the client: what is asked, pieces as they come, and a sentence for each way in which an answer fails."""
    source = Server(url_of(web) + "/", "sk-1")
    assert source.name == "tiny"
    pieces = list(source.answer([{"role": "user", "content": "hello"}], {"temperature": 0.5, "top_k": 3}))
    assert "".join(piece.text for piece in pieces) == "grüße"
    assert "".join(piece.reasoning for piece in pieces) == "hm"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert web.bodies[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 0.5,
        "top_k": 3,
    }
    for question, came, says in (
        ("refuse", "", r"too many requests \(status 429, try again in 7 s\)"),
        ("cut", "grüße", "the connection was lost"),
        ("break", "grüße", "internal error"),
        ("garbage", "", "makes no sense"),
    ):
        text = ""
        with pytest.raises(NoAnswer, match=says):  # noqa: PT012
            for piece in source.answer([{"role": "user", "content": question}], {}):
                text += piece.text
        assert text == came


def test_our_own_server(tmp_path: Path) -> None:
    """Guards the two ends of shardwise against each other: the server takes every field that the chat may send."""
    with deps_on(save_text_model(tmp_path), api_keys=("sk-1",)) as deps, serving(deps) as url:
        source = Server(f"{url}/v1", "sk-1")
        question = [{"role": "user", "content": "hello"}]
        fields: dict[str, Any] = {
            "max_tokens": 20,
            "temperature": 0.5,
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": 3,
        }
        fields |= {"stop": ["none"], "stop_token_ids": [1], "ignore_eos": True, "min_tokens": 1, "bad_words": ["zz"]}
        fields |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
        fields |= {"skip_special_tokens": True}
        assert fields.keys() == set(PARAMS)
        pieces = list(source.answer(question, fields))
        assert "".join(piece.text for piece in pieces)
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] in (["length"], ["stop"])
        with pytest.raises(NoAnswer, match="status 404"):
            list(Server(f"{url}/v1", "sk-1", "nonsense").answer(question, {}))
    with pytest.raises(ValueError, match="can't reach"):
        Server(f"{url}/v1", "sk-1")


def test_server_stops_when_the_answer_is_closed(web: Any) -> None:
    """C71: guards the server's work: it hears at once that nobody wants the rest."""
    answer = Server(url_of(web), "sk-1").answer([{"role": "user", "content": "wait"}], {})
    while next(answer).text != "ße":
        pass
    assert not web.left.is_set()
    answer.close()
    assert web.left.wait(10)


def test_server_that_cannot_be_asked(web: Any) -> None:
    """Guards the start: a wrong address, a wrong key and a server that isn't there are one line each."""
    for url, key, says in (
        (url_of(web), "wrong", "a valid API key is required"),
        (url_of(web), "two\r\nlines", "printable ASCII"),
        ("127.0.0.1:8000", "", "must be like http://"),
        ("file:///etc/passwd", "", "must be like http://"),
        ("http://127.0.0.1:99999/v1", "", "port must be a number"),
        ("http://127.0.0.1:1/v1", "", "can't reach http://127.0.0.1:1/v1: Connection refused"),
    ):
        with pytest.raises(ValueError, match=says) as found:
            Server(url, key)
        assert key not in str(found.value) or not key
    with pytest.raises(ValueError, match="layout: how the model runs is the server's choice"):
        run(Job(url_of(web), "sk-1", settings={"layout": "tp2"}))
    with pytest.raises(ValueError, match="'n' can't be set"):
        run(Job(url_of(web), "sk-1", params={"n": 3}))


def test_events() -> None:
    """Guards the reading of server-sent events: remarks, other fields, several lines of data, both line ends."""
    lines = [
        b": hello\n",
        b"event: x\n",
        b"data:a\r\n",
        b"data: b\n",
        b"\r\n",
        b"\n",
        b"data: c\n",
        b"\n",
        b"data: d\n",
    ]
    assert list(events(lines)) == [b"a\nb", b"c"]


def test_local_model(tmp_path: Path) -> None:
    """C71: guards the model at hand: it answers with the room that there is, and a closed answer goes no further."""
    with patch("shardwise.llm.launch", start_threads):
        source = Local(str(save_text_model(tmp_path)), {"kv_tokens": 96, "device": "cpu"})
    try:
        question = [{"role": "user", "content": "hello"}]
        pieces = list(source.answer(question, {"ignore_eos": True, "seed": 1}))
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
        assert len("".join(piece.text for piece in pieces)) > 20
        answer = source.answer(question, {"ignore_eos": True, "max_tokens": 70})
        next(answer)
        assert source._llm._replicas.has_work
        answer.close()
        assert not source._llm._replicas.has_work
        with pytest.raises(NoAnswer, match="max_tokens"):
            list(source.answer(question, {"max_tokens": 100_000}))
        with pytest.raises(NoAnswer, match="temperature"):
            list(source.answer(question, {"temperature": -1}))
    finally:
        source.close()


class Terminal:
    """A chat with ``url`` on a terminal of its own."""

    CODE = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from shardwise.chat import Job, run\n"
        "sys.exit(run(Job(sys.argv[1], 'sk-1')))"
    )

    def __init__(self, url: str) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait(self, condition: Callable[[str], bool], seconds: float = 60) -> str:
        """What came until it holds for that; it is not waited for again."""
        deadline = time.monotonic() + seconds
        while not condition(self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"came: {self.text!r}"
            if select.select([self._fd], [], [], min(left, 0.5))[0]:
                self.text += os.read(self._fd, 65536).decode(errors="replace")
        found, self.text = self.text, ""
        return found

    def wait_for(self, *parts: str) -> str:
        return self.wait(lambda text: all(part in text for part in parts))

    def interrupt(self, *parts: str) -> None:
        """Press Ctrl-C until these come: Python may miss one in the moment before it begins to wait for something."""
        pressed = 0.0

        def came(text: str) -> bool:
            nonlocal pressed
            if time.monotonic() - pressed > 1:
                pressed = time.monotonic()
                self.type("\x03")
            return all(part in text for part in parts)

        self.wait(came)


def test_ctrl_c_on_a_terminal(web: Any, tmp_path: Path) -> None:
    """C80: guards Ctrl-C and Ctrl-D as a terminal sends them: the answer stops while nothing more comes, the server
    hears of it, what came is kept, and the program ends well."""
    with Terminal(url_of(web)) as terminal:
        terminal.wait_for("tiny", "> ")
        terminal.type("wait\n")
        terminal.wait_for("grüße")
        terminal.interrupt("stopped", "> ")
        assert web.left.wait(10)
        terminal.interrupt("/quit leaves", "> ")
        terminal.type(f"/save {tmp_path}/talk.json\n")
        terminal.wait_for("2 messages written", "> ")
        terminal.type("refuse\n")
        terminal.wait_for("try again in 7 s", "> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert roles(saved["messages"]) == "u:wait a:grüße"


def test_a_variable_for_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server's list of keys being sent as if it were one."""
    jobs: list[Job] = []
    monkeypatch.setattr("shardwise.chat.run", lambda job: jobs.append(job) or 0)
    for keys in ("sk-one sk-two", "sk-one", " ", ""):
        done = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:1/v1"], env={"SHARDWISE_API_KEY": keys})
        assert done.exit_code == 0, done.output
    assert [job.api_key for job in jobs] == ["sk-one", "sk-one", "", ""]
