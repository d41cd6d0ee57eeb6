"""Servers whose models say what a test dictates: every layer is real but the last word, so parsers are truly run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from shardwise.config import Coordinates
from shardwise.parallel.axis import Axis
from shardwise.runtime.executor import Figures
from shardwise.runtime.runner import Runner
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Step, StepResult
from shardwise.server.deps import Deps
from tests import tiny
from tests.harness import start_threads
from tests.server.conftest import Router, client_of, deps_on, serving

END = 258
TEMPLATE = (
    "{% if messages[0].content == 'forbidden' %}{{ raise_exception('no such words here') }}{% endif %}"
    "{% if tools %}<s>tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}</s>{% endfor %}"
    "{% if reasoning_effort %}<s>effort: {{ reasoning_effort }}</s>{% endif %}"
    "{% if add_generation_prompt %}<s>assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def save_chat_model(path: Path) -> Path:
    """The tiny text model with a longer context, and a template that reads tools, reasoning and two variables."""
    tiny.save_text_model(path)
    for name, values in (
        ("config.json", {"max_position_embeddings": 4096}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return path


class Script:
    """What the model says. ``line`` is for sequences that begin from now on; None lets the model speak for itself."""

    def __init__(self) -> None:
        self.line: list[int] | None = None
        self.spoken = 0
        """Tokens of the sequence that spoke last."""
        self.hold_at = -1
        """At this token of a sequence the model waits for ``go``."""
        self.go = threading.Event()
        self._lines: dict[int, tuple[int, list[int] | None]] = {}

    def rank(self, spec: RunnerSpec, place: Coordinates, tp: Axis, pp: Axis) -> Dictated:
        """A rank that keeps to the script."""
        return Dictated(Runner(spec, place, tp, pp), self)

    def word(self, sequence: int, end: int) -> int | None:
        """The token at a position."""
        begin, line = self._lines.setdefault(sequence, (end, self.line))
        at = end - begin
        self.spoken = at + 1
        if at == self.hold_at:
            assert self.go.wait(60)
        return None if line is None else line[at] if at < len(line) else END


class Dictated:
    """A rank whose drawn tokens are replaced."""

    def __init__(self, runner: Runner, script: Script) -> None:
        self._runner = runner
        self._script = script

    def load(self) -> Figures | None:
        return self._runner.load()

    def close(self) -> None:
        self._runner.close()

    def step(self, step: Step) -> StepResult | None:
        found = self._runner.step(step)
        if found is None:
            return None
        tokens, logprobs = [list(each) for each in found.tokens], [list(each) for each in found.logprobs]
        for at, chunk in enumerate(step.chunks):
            if chunk.sampling is None:
                continue
            word = self._script.word(chunk.sequence, chunk.start + len(chunk.tokens))
            if word is not None:
                tokens[at] = [word]
                if chunk.sampling.logprobs >= 0:
                    logprobs[at][-1] = replace(logprobs[at][-1], token=word)
        return replace(found, tokens=tokens, logprobs=logprobs)


class Api:
    """A server, a client of it, and what its model says."""

    def __init__(self, deps: Deps, script: Script, http: httpx.Client, url: str) -> None:
        self.deps, self.script, self.http, self.url = deps, script, http, url

    def say(self, text: str | None) -> None:
        """The next answers."""
        self.script.line = None if text is None else self.deps.intake.tokenizer.encode(text, add_special_tokens=False)

    def send(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json={"model": "tiny", **body})

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        answer = self.send(route, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refused(self, route: str, param: str | None, **body: Any) -> str:
        """The message of a 400 that names a field."""
        answer = self.send(route, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        return str(error["message"])

    def events(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """Every event of a stream but [DONE]."""
        with self.http.stream("POST", route, json={"model": "tiny", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]

    def check_idle(self) -> None:
        """Nothing of any request is left."""
        assert self.deps.service.num_open == 0
        assert self.deps.service.admission.num_open == 0


@contextmanager
def dictated(path: Path, layout: str = "1", *routers: Router, **settings: Any) -> Iterator[Api]:
    """A server on a socket whose model says what it is told to."""
    script = Script()
    ranks = partial(start_threads, rank=script.rank)
    with (
        deps_on(path, layout, ranks, served_model_names=("tiny",), **settings) as deps,
        serving(deps, *routers) as url,
        client_of(url) as http,
    ):
        api = Api(deps, script, http, url)
        yield api
        api.check_idle()
