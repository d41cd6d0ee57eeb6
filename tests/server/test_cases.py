"""Cases of ../shared/cases.md through the whole server, each on the layouts 1, tp2 and pp2 whose ranks are threads.

Those that a module on one route holds on these layouts stand there: C61, C62, C71, C74 in test_completions, C77 in
test_tools. Those about processes are in test_cases_processes.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer as Backend

from shardwise.config import Coordinates
from shardwise.parallel.axis import Axis
from shardwise.runtime.executor import Executor, Figures
from shardwise.runtime.launch import RunPlan
from shardwise.runtime.runner import Runner
from shardwise.runtime.spec import RunnerSpec
from shardwise.schedule.step import Step, StepResult
from tests.harness import start_threads
from tests.server.conftest import wait_for
from tests.server.dictation import Api, dictated
from tests.server.test_completions import clone

LAYOUTS = ["1", "tp2", "pp2"]
TEXT, CHAT, VECTORS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"prompt": "plain words", "max_tokens": 24, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module", params=LAYOUTS)
def api(request: pytest.FixtureRequest, text_model: Path) -> Iterator[Api]:
    with dictated(text_model, request.param, tool_parser="hermes", max_queue_requests=4096) as found:
        yield found


@pytest.fixture(scope="module")
def single(text_model: Path) -> Iterator[Api]:
    """One rank, whose answers are the right ones."""
    with dictated(text_model, tool_parser="hermes", max_queue_requests=4096) as found:
        yield found


def choices(api: Api, route: str = TEXT, **body: Any) -> Any:
    return api.post(route, **body)["choices"]


# Prompts, tokenizers, templates


def test_empty_prompts(api: Api, single: Api) -> None:
    """C34: guards against an empty prompt that kills the server, on any route."""
    for prompt in ("", [""], [], [[]]):
        api.refused(TEXT, "prompt", prompt=prompt)
        api.refused(VECTORS, "input", input=prompt)
    api.refused(CHAT, "messages", messages=[])
    api.refused("/v1/responses", "input", input=[])
    assert choices(api, CHAT, messages=[{"role": "user", "content": ""}], max_tokens=3)
    assert choices(api, **PLAIN) == choices(single, **PLAIN)


def test_no_tokens_and_too_many(api: Api) -> None:
    """C35, C37: guards both ends of max_tokens: none in a chat is refused, a huge number is cut to the context."""
    api.refused(CHAT, "max_tokens", messages=HI, max_tokens=0)
    (choice,) = choices(api, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert (choice["text"], len(choice["logprobs"]["tokens"])) == ("abc", 3)
    found = api.post(CHAT, messages=HI, max_tokens=10**9, ignore_eos=True)
    assert found["usage"]["total_tokens"] == api.deps.max_model_len


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_tokenizer(text_model: Path, tmp_path: Path, layout: str) -> None:
    """C38, C42: guards against a second beginning-of-text token, and against tokens that the model has no row for."""
    backend = Backend.from_file(str(text_model / "tokenizer.json"))
    backend.add_tokens([f"<extra{number}>" for number in range(40)])
    document = json.loads(backend.to_str())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
    }
    clone(text_model, tmp_path, document, bos_token="<s>")
    with dictated(tmp_path, layout) as api:
        chat = api.post("/tokenize", messages=HI)["tokens"]
        assert chat[0] == 257 != chat[1]
        assert api.post(CHAT, messages=HI, max_tokens=1)["usage"]["prompt_tokens"] == len(chat)
        (choice,) = choices(api, prompt="abc", max_tokens=1, return_token_ids=True)
        assert choice["prompt_token_ids"][0] == 257
        assert choice["prompt_token_ids"].count(257) == 1
        right = choices(api, **PLAIN)
        assert "290" in api.refused(TEXT, "prompt", prompt=[1, 290])
        assert max(api.post("/tokenize", prompt="a<extra39>")["tokens"]) >= 290
        api.refused(TEXT, "prompt", prompt="a<extra39>")
        api.refused(VECTORS, "input", input="a<extra39>")
        assert choices(api, **PLAIN) == right


def test_a_template_that_refuses(api: Api) -> None:
    """C39: guards against a 500 for what the model's template rejects: 400 with the template's own words."""
    for route, name in ((CHAT, "messages"), ("/v1/responses", "input"), ("/tokenize", "messages")):
        for talk in ([{"role": "system", "content": "be nice"}], [*HI, {"role": "developer", "content": "x"}]):
            assert "no system role here" in api.refused(route, name, **{name: talk})
    assert "no system role here" in api.refused("/v1/responses", "input", input="hi", instructions="be nice")
    assert choices(api, CHAT, messages=HI * 2, max_tokens=3)


def test_tokenising_for_many_at_once(api: Api, single: Api) -> None:
    """C41: guards against "Already borrowed": 64 threads, with texts, chats, bad_words and counts of tokens."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": "cat dog " * 9, "max_tokens": 2, "seed": 1, "bad_words": ["a", "bb", "é"], "stop": ["zz"]}),
        (CHAT, {"messages": HI, "max_tokens": 2, "seed": 1, "bad_words": ["cat"]}),
        ("/tokenize", {"prompt": "some text " * 50}),
        (VECTORS, {"input": ["a", "cat dog"]}),
    ]
    expected = [told(single.post(route, **body)) for route, body in asked]
    barrier = Barrier(64)

    def ask(at: int) -> bool:
        barrier.wait(60)
        route, body = asked[at % len(asked)]
        return bool(told(api.post(route, **body)) == expected[at % len(asked)])

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(ask, range(64)))


def told(document: dict[str, Any]) -> Any:
    """What an answer says, without its id and its time."""
    return document.get("choices") or document.get("data") or document


def test_chats_and_texts_have_the_same_tokens(api: Api) -> None:
    """C43: guards against a chat whose tokens aren't those that /tokenize tells, and that a completion may send."""
    ids = api.post("/tokenize", messages=HI)["tokens"]
    asked = {"max_tokens": 20, "seed": 8, "ignore_eos": True}
    (chat,) = choices(api, CHAT, messages=HI, **asked)
    (text,) = choices(api, prompt=ids, **asked)
    assert text["text"] == chat["message"]["content"]
    assert api.post("/detokenize", tokens=ids)["prompt"] == "<s>user: hi</s><s>assistant:"


# Disconnects


def test_a_storm_of_resets(api: Api, single: Api) -> None:
    """C72: guards against what 200 resets at once leave behind, half said, whole, and streamed."""
    host, port = api.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)
    crowd = [socket.create_connection((host, int(port)), timeout=20) for _ in range(200)]
    for at, client in enumerate(crowd):
        client.sendall(data[: len(data) if at % 2 else at * 2])
    for client in crowd:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        client.close()
    assert choices(api, **PLAIN) == choices(single, **PLAIN)
    service = api.deps.service
    wait_for(lambda: service.num_open == 0 and not service.replicas.has_work)
    assert service.admission.num_open == 0
    for engine in service.replicas.engines:
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


# Constraints


def deep(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[dict[str, Any]] = [
    {"guided_regex": "("},
    {"guided_regex": "a{100000}"},
    {"guided_regex": "(?=a)b"},
    {"guided_regex": "a" * 10**6},
    {"guided_json": {"type": "nonsense"}},
    {"guided_json": {"$ref": "#/$defs/none"}},
    {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}},
    {"guided_json": "{"},
    {"guided_json": {"enum": ["x" * 1_100_000]}},
    {"guided_json": deep(27)},
    {"guided_grammar": 'root ::= root "a"\nother'},
    {"structured_outputs": {"json": {"type": "string", "pattern": "["}}},
]
"""Each is refused, or compiled if it can be: what it must not do is to last, or to harm others."""


def test_constraints_that_cannot_hold(api: Api, single: Api) -> None:
    """C75: guards everyone else against a bad expression or schema: a 400 that names the field, and soon."""
    right = choices(single, **PLAIN)
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(lambda: [choices(api, **PLAIN) for _ in range(12)])
        answers = list(pool.map(lambda body: api.send(TEXT, prompt="x", max_tokens=4, seed=1, **body), BAD))
        assert all(found == right for found in beside.result(60))
    for body, answer in zip(BAD, answers, strict=True):
        assert answer.status_code in (200, 400), body
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].split(".")[0] in body
    assert sum(answer.status_code == 400 for answer in answers) > len(BAD) // 2
    assert answers[0].status_code == answers[4].status_code == answers[5].status_code == answers[10].status_code == 400


def test_a_slow_grammar_beside_plain_requests(api: Api, single: Api) -> None:
    """C86: guards plain requests against a grammar that takes long to compile, and its answer against the layout."""
    values = [f"value {7919 * at % 100003}" for at in range(9990)]
    slow = {"prompt": "pick", "max_tokens": 30, "seed": 2, "guided_json": {"enum": values}}
    (expected,) = choices(single, **slow)
    right = choices(single, **PLAIN)
    with ThreadPoolExecutor(9) as pool:
        picked = [pool.submit(choices, api, **{**slow, "guided_json": {"enum": values[at:]}}) for at in range(3)]
        assert all(found == right for found in pool.map(lambda _: choices(api, **PLAIN), range(12)))
        assert picked[0].result(60) == [expected]
        for each in picked:
            assert json.loads(each.result(60)[0]["text"]) in values


# Replicas, faults, many at once


@pytest.mark.parametrize("layout", ["dp2", "dp2.tp2", "dp2.pp2", "dp3"])
def test_an_odd_number_on_replicas(text_model: Path, single: Api, layout: str) -> None:
    """C82: guards against an idle replica that holds up the others at the end, with texts and embeddings."""
    bodies = [{**PLAIN, "prompt": f"prompt {number}", "max_tokens": 4 + number} for number in range(7)]
    expected = [choices(single, **body) for body in bodies]
    texts = [f"text {number}" for number in range(5)]
    vectors = told(single.post(VECTORS, input=texts))
    with dictated(text_model, layout) as api, ThreadPoolExecutor(8) as pool:
        for count in (1, 7, 3):
            beside = pool.submit(api.post, VECTORS, input=texts)
            assert list(pool.map(lambda body: choices(api, **body), bodies[:count])) == expected[:count]
            assert told(beside.result(60)) == vectors


class Poisoned:
    """A rank that raises over a token that no other request has."""

    def __init__(self, spec: RunnerSpec, place: Coordinates, tp: Axis, pp: Axis) -> None:
        self._runner = Runner(spec, place, tp, pp)

    def load(self) -> Figures | None:
        return self._runner.load()

    def close(self) -> None:
        self._runner.close()

    def step(self, step: Step) -> StepResult | None:
        if any(chunk.start == 0 and chunk.tokens[0] == 255 for chunk in step.chunks):
            raise RuntimeError("secret /path at 0xdeadbeef")
        return self._runner.step(step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_breaks_the_forward_pass(text_model: Path, single: Api, layout: str) -> None:
    """C83: guards the others where the work on one request raises: that one gets a 500, the others their tokens."""

    def start(plan: RunPlan) -> list[Executor]:
        return start_threads(plan, rank=Poisoned)

    bodies = [{**PLAIN, "prompt": f"mate {number}", "max_tokens": 60} for number in range(6)]
    expected = [choices(single, **body) for body in bodies]
    with (
        patch("tests.server.dictation.Script.rank", lambda _, *place: Poisoned(*place)),
        dictated(text_model, layout) as api,
        ThreadPoolExecutor(9) as pool,
    ):
        mates = [pool.submit(choices, api, **body) for body in bodies]
        wait_for(lambda: api.deps.service.num_open > 0)
        bad = [pool.submit(api.send, TEXT, prompt=[255, 1], max_tokens=4, stream=stream) for stream in (False, True)]
        for each in bad:
            answer = each.result(60)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
        assert [mate.result(60) for mate in mates] == expected
        assert sum(engine.num_failures for engine in api.deps.service.replicas.engines) > 0
        wait_for(lambda: api.deps.service.state == "ok")
        assert choices(api, **bodies[0]) == expected[0]


def test_mixed_requests_at_once(api: Api, single: Api) -> None:
    """C85: 200 valid and invalid bodies for all routes, 32 at once: no 5xx, and the answers each has alone."""
    rng = random.Random(85)
    asked = [random_request(rng) for _ in range(200)]

    def ask(on: Api, request: tuple[str, dict[str, Any]]) -> tuple[int, Any]:
        answer = on.send(request[0], **request[1])
        assert answer.status_code in (200, 400, 404), (request, answer.text)
        return answer.status_code, told(answer.json()) if answer.status_code == 200 else None

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda request: ask(api, request), asked))
    assert {200, 400} <= {status for status, _ in together}
    for request, found in zip(asked[::4], together[::4], strict=True):
        assert ask(single, request) == found, request


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route, and a body for it with two more fields, of which some are wrong."""
    fields: dict[str, list[Any]] = {
        "temperature": [0, 0.7, 2, -1],
        "n": [1, 2, 3, 0],
        "stop": ["e", ["a", "b"], [], 5],
        "top_p": [0.5, 1, 2],
        "top_k": [5, -1, 10**9],
        "repetition_penalty": [1.2, 0],
        "logit_bias": [{"64": 5}, {"999999": 5}],
        "bad_words": [["e"], ["", "a"]],
        "guided_regex": ["[0-9]{3}", "("],
        "response_format": [{"type": "json_object"}, {"type": "json_schema"}],
        "nonsense": [1],
        "model": ["tiny", "other"],
    }
    more = {name: rng.choice(fields[name]) for name in rng.sample(sorted(fields), 2)}
    seeded = {"max_tokens": rng.choice([1, 5, 12]), "seed": rng.randrange(1000), **more}
    prompt = rng.choice(["a", "quick brown fox", [1, 2, 3], ["x", "yz"], "", [-1], "x" * 400])
    content = rng.choice(["hi", "a longer one", None])
    return rng.choice(
        [
            (TEXT, {"prompt": prompt, **seeded}),
            (CHAT, {"messages": [{"role": rng.choice(["user", "system"]), "content": content}], **seeded}),
            (VECTORS, {"input": prompt, **({"dimensions": rng.choice([48, 7])} if rng.random() < 0.3 else {})}),
            ("/tokenize", {"prompt": prompt}),
            ("/detokenize", {"tokens": prompt}),
        ]
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp3", "tp4"])
def test_scores_to_the_last_bit(text_model: Path, single: Api, layout: str) -> None:
    """C88: guards the promise at the server's door: equal log-probabilities on all layouts, alone and in any batch."""
    asked = {**PLAIN, "logprobs": 5, "max_tokens": 6, "echo": True}
    (expected,) = choices(single, **asked)
    with dictated(text_model, layout) as api, ThreadPoolExecutor(32) as pool:
        for batch in (1, 7, 32):
            bodies = [{**asked, "prompt": PLAIN["prompt"] if at == 0 else "x" * at} for at in range(batch)]
            found = list(pool.map(lambda body: choices(api, **body), bodies))
            assert found[0] == [expected], batch
