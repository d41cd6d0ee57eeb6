"""The completions route on threaded layouts, over real sockets: OpenAI's and vLLM's fields, their refusals, streams."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from tokenizers import Tokenizer as Backend

from shardwise.engine import Engine, Output
from shardwise.llm import LLM
from shardwise.params import SamplingParams
from shardwise.schedule.sequence import News
from shardwise.server import completions, tokens
from shardwise.server.deps import Deps
from tests.harness import threaded_llm
from tests.server.conftest import client, client_of, deps_on, held, serving, wait_for

ROUTES = completions.router, tokens.router
LAYOUTS = ["1", "tp2", "pp2"]
PROMPT = "the quick brown fox jumps over the lazy dog"


class Api:
    """A server and a client of it."""

    def __init__(self, deps: Deps, http: httpx.Client) -> None:
        self.deps, self.http = deps, http

    def send(self, route: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(route, json={"model": "tiny", **body})

    def post(self, route: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        answer = self.send(route, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text(self, prompt: Any = PROMPT, **body: Any) -> str:
        return str(self.post(prompt=prompt, **{"temperature": 0, **body})["choices"][0]["text"])

    def refused(self, param: str | None, **body: Any) -> str:
        """The message of a 400 that names a field."""
        answer = self.send(**body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), answer.text
        assert error["type"] == "invalid_request_error"
        return str(error["message"])

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Every event of a stream but [DONE], which must end it."""
        with self.http.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture(scope="module", params=LAYOUTS)
def api(request: pytest.FixtureRequest, text_model: Path) -> Iterator[Api]:
    with server(text_model, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def single(text_model: Path) -> Iterator[Api]:
    """For what no layout can change."""
    with server(text_model) as found:
        yield found


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with threaded_llm(text_model) as found:
        yield found


class server:  # noqa: N801
    """``with server(path, layout, **settings) as api``."""

    def __init__(self, path: Path, layout: str = "1", **settings: Any) -> None:
        self._deps = deps_on(path, layout, served_model_names=("tiny",), **settings)

    def __enter__(self) -> Api:
        deps = self._deps.__enter__()
        self._serving = serving(deps, *ROUTES)
        self._http = client_of(self._serving.__enter__())
        return Api(deps, self._http)

    def __exit__(self, *error: Any) -> None:
        self._http.close()
        self._serving.__exit__(None, None, None)
        self._deps.__exit__(None, None, None)


# Prompts


def test_prompts_of_every_form(api: Api, llm: LLM) -> None:
    """Guards against a form of the prompt (text, texts, ids, lists of ids) that is read otherwise than the others."""
    ids = llm.intake.encode(PROMPT)[1]
    other = llm.intake.encode("abc")[1]
    expected, short = (llm.generate(p, SamplingParams(max_tokens=9))[0] for p in (PROMPT, "abc"))
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        answer = api.post(prompt=prompt, temperature=0, max_tokens=9)
        assert [choice["text"] for choice in answer["choices"]] == [expected.text], prompt
    for prompt in ([PROMPT, "abc"], [ids, other]):
        answer = api.post(prompt=prompt, temperature=0, max_tokens=9)
        assert [choice["text"] for choice in answer["choices"]] == [expected.text, short.text]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        num_prompt, num_new = len(ids) + len(other), len(expected.token_ids) + len(short.token_ids)
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


def test_empty_prompts(api: Api) -> None:
    """C34: an empty prompt killed the server where the tokenizer has no token to begin with."""
    for prompt in ("", [""], [], [[]], ["a", ""]):
        assert api.refused("prompt", prompt=prompt)
    assert api.send(prompt=None).status_code == 400
    assert api.text(max_tokens=3)


def test_prompts_with_a_beginning_token(text_model: Path, tmp_path: Path) -> None:
    """C34, C38: where the tokenizer has a token to begin with, an empty prompt is that token, and others get one."""
    backend = json.loads((text_model / "tokenizer.json").read_text())
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
    }
    clone(text_model, tmp_path, backend, bos_token="<s>")
    with server(tmp_path) as api:
        for prompt, count in (("", 1), ("abc", 4)):
            answer = api.post(prompt=prompt, max_tokens=1, return_token_ids=True, temperature=0)
            assert answer["usage"]["prompt_tokens"] == count
            assert answer["choices"][0]["prompt_token_ids"].count(257) == 1
            assert api.post("/tokenize", prompt=prompt)["tokens"] == answer["choices"][0]["prompt_token_ids"]
        chat = api.post("/tokenize", messages=[{"role": "user", "content": "hi"}])["tokens"]
        assert chat[:2] != [257, 257]
        whole = api.post(prompt="abc", max_tokens=0, echo=True, logprobs=0)["choices"][0]
        assert whole["text"] == "abc"
        assert whole["logprobs"]["text_offset"] == [0, 0, 1, 2]
        assert api.refused("prompt", prompt="", add_special_tokens=False, max_tokens=1)


def test_tokens_beyond_the_model(text_model: Path, tmp_path: Path) -> None:
    """C42: a tokenizer may know more tokens than the model has rows; a prompt with one is refused, and no more."""
    backend = Backend.from_file(str(text_model / "tokenizer.json"))
    backend.add_special_tokens([f"<extra{number}>" for number in range(40)])
    clone(text_model, tmp_path, json.loads(backend.to_str()))
    assert backend.token_to_id("<extra39>") >= 290
    with server(tmp_path) as api:
        assert "290" in api.refused("prompt", prompt=[1, 290])
        for prompt in ("a<extra39>", ["fine", "a<extra39>"]):
            ids = api.post("/tokenize", prompt="a<extra39>")["tokens"]
            if max(ids) >= 290:  # else it is read as text
                assert api.refused("prompt", prompt=prompt)
        assert api.text(max_tokens=3)


def test_more_than_the_context(api: Api) -> None:
    """C37: a huge max_tokens is cut to the context; a prompt that fills it is refused with OpenAI's code."""
    answer = api.post(prompt="x" * 240, max_tokens=10**9, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    refusal = api.send(prompt="x" * 256)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert api.post(prompt="x" * 256, max_tokens=0)["usage"]["completion_tokens"] == 0


# Small caches


def test_fewer_tokens_than_asked_for(single: Api) -> None:
    """Guards against a refusal that speaks of a max_tokens which nobody has said."""
    message = single.refused("min_tokens", prompt=[5] * 250, max_tokens=100, min_tokens=50)
    assert "room for 6 tokens" in message
    assert "max_tokens" not in message
    assert single.post(prompt=[5] * 250, max_tokens=100, min_tokens=6)["usage"]["completion_tokens"] == 6


def test_more_than_the_cache(text_model: Path) -> None:
    """C61, R12: what can never fit is refused at once, and what comes after it is served."""
    for layout in LAYOUTS:
        with server(text_model, layout, kv_tokens=64, max_queue_tokens=1000) as api:
            assert "kv_tokens" in api.refused("prompt", prompt="x" * 100)
            assert "kv_tokens" in api.refused("prompt", prompt="x" * 10, max_tokens=100)
            assert api.refused(None, prompt=["x" * 10] * 20, max_tokens=40, n=2)
            assert api.post(prompt="x" * 10, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_saturated_cache(text_model: Path, llm: LLM) -> None:
    """C62: more decodes than the cache holds: they take turns, all end, and with the tokens they have alone."""
    prompts = [f"{number} bottles" for number in range(8)]
    expected = [out.text for out in llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))]
    for layout in LAYOUTS:
        with server(text_model, layout, kv_tokens=112) as api:
            answer = api.post(prompt=prompts, max_tokens=40, ignore_eos=True, temperature=0)
            assert [choice["text"] for choice in answer["choices"]] == expected
            assert any(engine.scheduler.num_preempted for engine in api.deps.service.replicas.engines)


# Echo and log-probabilities


def test_no_tokens(api: Api) -> None:
    """C35: max_tokens=0 crashed; it gives no new token, and with echo the prompt and its log-probabilities."""
    for body in ({}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 2}):
        (choice,) = api.post(prompt=PROMPT, max_tokens=0, **body)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == (PROMPT if "echo" in body else "")
        if "logprobs" not in body:
            assert choice["logprobs"] is None
            continue
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert {len(values) for values in told.values()} == {len(choice["text"])}
        assert told["text_offset"] == list(range(len(choice["text"])))
        if "echo" in body:
            assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
            assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])


@torch.no_grad()
def test_lm_eval_requests(api: Api, text_model: Path) -> None:
    """The requests of lm-eval's local-completions give transformers' log-likelihoods to 1e-4."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(text_model, dtype=torch.float32).eval()
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (2, 17, 40, 90)]
    likely = [0.0] * len(prompts)
    for max_tokens in (0, 1):
        body = {"max_tokens": max_tokens, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
        answer = api.post(prompt=prompts, **body)
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            truth = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            told = choice["logprobs"]
            end = len(told["token_logprobs"]) - max_tokens
            context = len(prompt) // 2
            found = told["token_logprobs"][context:end]
            expected = [truth[at - 1, prompt[at]].item() for at in range(context, len(prompt))]
            assert found == pytest.approx(expected, abs=1e-4)
            likely[choice["index"]] = sum(found)
            for at in range(1, end):
                best = max(told["top_logprobs"][at].values())
                assert best == pytest.approx(truth[at - 1].max().item(), abs=1e-4)
                assert (told["token_logprobs"][at] == best) == (truth[at - 1].argmax().item() == prompt[at])
    assert all(likely)


def test_logprobs_of_the_answer(api: Api, llm: LLM) -> None:
    """Guards against places and texts of tokens that don't fit the text, in the older form of log-probabilities."""
    by = SamplingParams(max_tokens=12, logprobs=3, seed=3, temperature=1.0)
    (expected,) = llm.generate(PROMPT, by)
    (choice,) = api.post(prompt=PROMPT, max_tokens=12, logprobs=3, seed=3, echo=True)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == PROMPT + expected.text
    new = slice(len(PROMPT), None)
    assert told["token_logprobs"][new] == [score.logprob for score in expected.outputs[0].logprobs]
    assert told["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][-1] <= len(choice["text"])
    for name, top, score in zip(
        told["tokens"][new], told["top_logprobs"][new], expected.outputs[0].logprobs, strict=True
    ):
        assert top[name] == score.logprob
        assert max(top.values()) == score.top[0][1]
    (named,) = api.post(prompt=PROMPT, max_tokens=12, logprobs=3, seed=3, return_tokens_as_token_ids=True)["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected.token_ids]


def test_prompt_logprobs(api: Api, llm: LLM) -> None:
    """Guards against log-probabilities of a prompt that n or several prompts mix up."""
    prompts = ["abcdef", PROMPT]
    answer = api.post(prompt=prompts, max_tokens=2, n=2, prompt_logprobs=1, echo=True, logprobs=2, temperature=0)
    results = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=2))
    for choice in answer["choices"]:
        result = results[choice["index"] // 2]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [
            scores[str(score.token)]["logprob"] for scores, score in zip(rest, result.prompt_logprobs, strict=True)
        ] == [score.logprob for score in result.prompt_logprobs]
        assert all(1 <= len(scores) <= 2 for scores in rest)
        told = choice["logprobs"]["token_logprobs"][: len(result.prompt_token_ids)]
        assert told == [None, *(score.logprob for score in result.prompt_logprobs)]


# Fields


SEEDED = {"temperature": 1.0, "seed": 11}
FIELDS: list[tuple[dict[str, Any], SamplingParams]] = [
    ({}, SamplingParams()),
    (SEEDED, SamplingParams(**SEEDED)),
    ({**SEEDED, "top_p": 0.5}, SamplingParams(**SEEDED, top_p=0.5)),
    ({**SEEDED, "top_k": 3}, SamplingParams(**SEEDED, top_k=3)),
    ({**SEEDED, "top_k": -1}, SamplingParams(**SEEDED)),
    ({**SEEDED, "min_p": 0.3}, SamplingParams(**SEEDED, min_p=0.3)),
    ({"repetition_penalty": 1.9}, SamplingParams(repetition_penalty=1.9)),
    ({"presence_penalty": 1.5}, SamplingParams(presence_penalty=1.5)),
    ({"frequency_penalty": 2}, SamplingParams(frequency_penalty=2)),
    ({"logit_bias": {"65": 100}}, SamplingParams(logit_bias={65: 100})),
    ({"allowed_token_ids": [66, 67]}, SamplingParams(allowed_token_ids=(66, 67))),
    ({"stop_token_ids": list(range(128))}, SamplingParams(stop_token_ids=tuple(range(128)))),
    (
        {"min_tokens": 5, "stop_token_ids": list(range(128))},
        SamplingParams(min_tokens=5, stop_token_ids=tuple(range(128))),
    ),
    ({"bad_words": ["f", "A"]}, SamplingParams(bad_words=("f", "A"))),
    ({"skip_special_tokens": False, "ignore_eos": True}, SamplingParams(skip_special_tokens=False, ignore_eos=True)),
    ({"guided_regex": "[ab]{6}"}, SamplingParams(regex="[ab]{6}")),
    ({"guided_choice": ["yes", "no"]}, SamplingParams(choice=("yes", "no"))),
    ({"guided_grammar": 'root ::= "x" [0-9]'}, SamplingParams(ebnf='root ::= "x" [0-9]')),
    ({"guided_json": {"type": "boolean"}}, SamplingParams(json_schema='{"type": "boolean"}')),
    ({"guided_json": '{"type": "boolean"}'}, SamplingParams(json_schema='{"type": "boolean"}')),
    ({"structured_outputs": {"json": {"type": "null"}}}, SamplingParams(json_schema='{"type": "null"}')),
    ({"structured_outputs": {"regex": "c{4}"}}, SamplingParams(regex="c{4}")),
    ({"response_format": {"type": "text"}}, SamplingParams()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"enum": ["q"]}}}},
        SamplingParams(json_schema='{"enum": ["q"]}'),
    ),
]


def test_fields_are_honoured(api: Api, llm: LLM) -> None:
    """Guards against a documented field that does nothing: each gives what SamplingParams' own field gives."""
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=8))[0].text
    for body, by in FIELDS:
        (expected,) = llm.generate(PROMPT, SamplingParams(**{**vars(by), "max_tokens": 8}))
        assert api.text(**body, max_tokens=8) == expected.text, body
        if not body.keys() & {"response_format", "ignore_eos"}:
            assert expected.text != plain or body in ({}, {"response_format": {"type": "text"}}), body


def test_stop(api: Api) -> None:
    """Guards against stop as one text, as several, and as an empty list, and against its log-probabilities' places."""
    whole = api.text(max_tokens=10, ignore_eos=True)
    cut = whole[4:6]
    for stop in (cut, ["never there", cut]):
        answer = api.post(prompt=PROMPT, temperature=0, max_tokens=10, ignore_eos=True, stop=stop, logprobs=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(cut)], "stop")
        assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])
    assert api.text(max_tokens=10, ignore_eos=True, stop=[]) == whole


def test_defaults(single: Api) -> None:
    """Guards against defaults other than OpenAI's: 16 tokens, drawn at temperature 1, one choice."""
    answer = single.post(prompt=PROMPT, ignore_eos=True)
    assert (answer["usage"]["completion_tokens"], len(answer["choices"])) == (16, 1)
    assert len({single.post(prompt=PROMPT)["choices"][0]["text"] for _ in range(4)}) > 1
    same = {single.post(prompt=PROMPT, seed=9)["choices"][0]["text"] for _ in range(3)}
    assert len(same) == 1


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("nonsense", {"nonsense": 1}),
        ("suffix", {"suffix": "x"}),
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": 2, "n": 3}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("n", {"n": "2"}),
        ("n", {"n": True}),
        ("n", {"n": 2.5}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 2**40}),
        ("max_tokens", {"max_tokens": "many"}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 20, "max_tokens": 10}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": True}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**63}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": True}),
        ("top_p", {"top_p": 0}),
        ("top_k", {"top_k": -2}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop", {"stop": [1]}),
        ("stop", {"stop": ""}),
        ("logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("logit_bias", {"logit_bias": {"4000": 1}}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("prompt", {"prompt": ["x"] * 65}),
        ("prompt", {"prompt": {"text": "x"}}),
        ("prompt", {"prompt": ["x", 5]}),
        ("prompt", {"prompt": [5, "x"]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [True]}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("store", {"store": True}),
        ("service_tier", {"service_tier": "priority"}),
        ("guided_json", {"guided_json": 5}),
        ("guided_json", {"guided_json": {"type": "nothing"}}),
        ("guided_regex", {"guided_regex": "("}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_grammar", {"guided_grammar": "root = ??"}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
        ("structured_outputs.regex", {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        ("priority", {"priority": 2**40}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_fields_are_refused(single: Api, param: str, body: dict[str, Any]) -> None:
    """R11, R18: a field out of its range, of another type or of no meaning here is 400 and named, in our own words."""
    message = single.refused(param, **{"prompt": PROMPT, **body})
    assert len(message) < 500
    assert not any(inside in message for inside in ("Traceback", "0x", "site-packages", "/work", "/usr", "/tmp"))


def test_limits_of_the_operator(text_model: Path) -> None:
    """R11: the operator's own limits hold, before anything is tokenised."""
    with server(text_model, max_n=2, max_prompts=2, max_logprobs=1) as api:
        assert api.refused("n", prompt="x", n=3)
        assert api.refused("prompt", prompt=["x"] * 3)
        assert api.refused("logprobs", prompt="x", logprobs=2)
        assert len(api.post(prompt=["x", "y"], n=2, logprobs=1, max_tokens=1)["choices"]) == 4


def test_harmless_fields(single: Api) -> None:
    """Guards against refusing what OpenAI's clients send and what changes nothing here."""
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "best_of": 1,
        "suffix": None,
    }
    assert single.text(max_tokens=3, **harmless, safety_identifier="s", prompt_cache_key="k", stop=None, n=None)


def test_unknown_model(single: Api) -> None:
    """R21: a model is asked for by a served name; anything else is 404, a path or none."""
    for name in ("other", "../tiny", "/etc/passwd", "tiny/", ""):
        answer = single.send(model=name, prompt="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert single.http.post("/v1/completions", json={"prompt": "x"}).json()["error"]["param"] == "model"


# Streams


@pytest.mark.parametrize("echo", [False, True])
def test_streams_add_up(api: Api, echo: bool) -> None:
    """Guards against a stream that says something else than the whole answer: several prompts, n, log-probabilities."""
    body = {"prompt": ["abc", PROMPT], "n": 2, "seed": 5, "max_tokens": 9, "logprobs": 1, "echo": echo, "stop": ["zz"]}
    body |= {"return_token_ids": True, "prompt_logprobs": 0}
    whole = api.post(**body)
    events = api.events(**body, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    *pieces, last = events
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None for event in pieces)
    found: dict[int, dict[str, Any]] = {}
    for event in pieces:
        (choice,) = event["choices"]
        before = found.setdefault(choice["index"], choice)
        if before is not choice:
            completions._extend(before, choice)
    assert [found[index] for index in sorted(found)] == whole["choices"]


def test_stream_without_usage(api: Api) -> None:
    """Guards against usage that wasn't asked for, or that is wrong on the way."""
    events = api.events(prompt=PROMPT, max_tokens=5, ignore_eos=True)
    assert all("usage" not in event for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    events = api.events(prompt=PROMPT, max_tokens=5, ignore_eos=True, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_streamed_refusals(single: Api) -> None:
    """Guards against a 200 for a stream that never begins."""
    for body in ({"n": 0}, {"prompt": "x" * 300}, {"guided_regex": "("}, {"prompt": ""}):
        answer = single.send(**{"prompt": "x", **body}, stream=True)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"]


# Many at once, and what goes wrong


def test_one_request_id_twice(api: Api) -> None:
    """C74: two requests of the same id at once mix nothing up."""
    prompts = ["first", "second one"]
    expected = [api.text(prompt, max_tokens=30) for prompt in prompts]

    def ask(prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 30, "temperature": 0}
        answer = api.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts * 4)) == expected * 4


def test_odd_number_on_replicas(text_model: Path, llm: LLM) -> None:
    """C82: an odd number of requests on two replicas: the idle one holds nobody up."""
    prompts = [f"prompt {number}" for number in range(7)]
    expected = [out.text for out in llm.generate(prompts, SamplingParams(max_tokens=9))]
    with server(text_model, "dp2") as api, ThreadPoolExecutor(7) as pool:
        assert list(pool.map(lambda prompt: api.text(prompt, max_tokens=9), prompts)) == expected
        assert api.deps.service.num_open == 0


def test_many_threads_at_once(single: Api) -> None:
    """C41: tokenising for 64 clients at once, bad_words included, failed with "Already borrowed"."""
    expected = single.text("cat dog", max_tokens=2, bad_words=["a", "bb"])

    def ask(_: int) -> str:
        return single.text("cat dog", max_tokens=2, bad_words=["a", "bb"])

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(ask, range(64))) == {expected}


def test_mixed_requests_at_once(api: Api) -> None:
    """C85: 200 valid and invalid bodies, 32 at once: nothing but 200 and 400, and the answers that each has alone."""
    rng = random.Random(7)
    bodies = [_random_body(rng) for _ in range(200)]

    def ask(body: dict[str, Any]) -> tuple[int, Any]:
        answer = api.send(**body)
        assert answer.status_code in (200, 400), answer.text
        return answer.status_code, answer.json().get("choices")

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, bodies))
    assert {status for status, _ in together} == {200, 400}
    for body, found in zip(bodies[::5], together[::5], strict=True):
        assert ask(body) == found
    assert api.deps.service.num_open == 0


def _random_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": rng.choice(["a", PROMPT, [1, 2, 3], ["x", "yz"], [[5], [6, 7]]]),
        "max_tokens": rng.choice([0, 1, 5, 12]),
        "seed": rng.randrange(1000),
    }
    choices: dict[str, Sequence[Any]] = {
        "temperature": (0, 0.7, 2, -1),
        "n": (1, 2, 3, 0),
        "echo": (True, False, "yes"),
        "logprobs": (0, 2, 30),
        "stop": ("e", ["a", "b"], [], 5),
        "top_p": (0.5, 1, 2),
        "prompt": ("", [], [-1], "x" * 400),
        "guided_regex": ("[0-9]+", "("),
        "extra": (1,),
        "min_tokens": (1, 50),
    }
    for name in rng.sample(sorted(choices), 2):
        body[name] = rng.choice(choices[name])
    return body


def test_a_client_that_leaves(api: Api) -> None:
    """R24, C71: a client that goes mid-stream or mid-answer frees what its request holds."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "n": 8}
    with api.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_for(lambda: api.deps.service.num_open == 0)
    with pytest.raises(httpx.ReadTimeout):
        api.http.post("/v1/completions", json={**body, "n": 64}, timeout=0.05)
    wait_for(lambda: api.deps.service.num_open == 0)
    wait_for(lambda: all(not engine.scheduler.has_work for engine in api.deps.service.replicas.engines))


def test_a_full_queue(text_model: Path) -> None:
    """R26: where nothing more is let in, that is said and counted at once, before the body is looked at."""
    ok = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    with (
        deps_on(text_model, max_queue_requests=2, served_model_names=("tiny",)) as deps,
        serving(deps) as url,
        client_of(url) as http,
    ):
        admission = deps.service.admission
        ticket = admission.enter(10, 2, key="", priority=0)
        for path in ("completions", "chat/completions", "responses", "embeddings"):
            answer = http.post(f"/v1/{path}", json={"model": "none"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        admission.leave(ticket)
        assert http.post("/v1/completions", json=ok).status_code == 200
        for more in ({"n": 3}, {"prompt": ["x"] * 3}):
            assert http.post("/v1/completions", json={**ok, **more}).status_code == 400
        one = admission.enter(10, 1, key="", priority=0)
        assert http.post("/v1/completions", json={**ok, "n": 2}).status_code == 429  # only this tells how much it asks
        admission.leave(one)
        assert admission.num_open == 0
        assert b'status="429"} 5.0' in deps.service.metrics.render(deps.service)


def test_too_slow(text_model: Path) -> None:
    """Guards against a request that holds its place for ever: the operator's limit ends it, with an error."""
    with server(text_model, request_timeout=0.01) as api:
        answer = api.send(prompt=PROMPT, max_tokens=200, ignore_eos=True, n=32)
        assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
        assert answer.headers["x-should-retry"] == "false"
        wait_for(lambda: api.deps.service.num_open == 0)


@pytest.mark.parametrize("at", [0, 3])
def test_a_poisoned_request(text_model: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """R17, R18: where a request's text fails, it alone ends, with 500 or an error event that tells nothing inside."""
    plain: Callable[[Engine, News], Output] = Engine._text_of

    def poisoned(self: Engine, news: News) -> Output:
        if news.sequence.request.prompt[0] == 33 and news.sequence.num_generated > at:
            raise RuntimeError("secret /home/me at 0x7f00")
        return plain(self, news)

    monkeypatch.setattr(Engine, "_text_of", poisoned)
    body = {"max_tokens": 8, "temperature": 0, "allowed_token_ids": list(range(40, 90))}  # letters, whole at once
    with server(text_model) as api, ThreadPoolExecutor(2) as pool:
        alone = api.text(**body)
        beside = pool.submit(api.text, **body)
        answer = api.send(prompt=[33, 34], **body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
        assert answer.headers["x-should-retry"] == "false"  # else clients bring the poison back by themselves
        assert beside.result() == alone
        if at == 0:
            assert api.send(prompt=[33, 34], stream=True, **body).status_code == 500
        else:
            *pieces, last = api.events(prompt=[33, 34], **body)
            assert (last["error"]["message"], len(pieces)) == ("internal error", at)
        assert api.send(prompt=["fine", "Boops"], **body).status_code in (200, 500)
        wait_for(lambda: api.deps.service.num_open == 0)


def test_a_request_that_leads_nowhere(text_model: Path) -> None:
    """Guards against an internal error, and an operator's alarm, where nothing fits all that a request asks."""
    with server(text_model) as api:
        letter = api.http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()["tokens"]
        body = {"max_tokens": 8, "guided_regex": "hhhi", "allowed_token_ids": letter}
        answer = api.send(prompt="oh", **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("no token satisfies allowed_token_ids, bad_words")
        *pieces, last = api.events(prompt="oh", **body)
        assert (len(pieces), last["error"]["message"]) == (2, error["message"])
        wait_for(lambda: api.deps.service.num_open == 0)


def clone(source: Path, path: Path, backend: dict[str, Any], **settings: str) -> None:
    """The model with another tokenizer."""
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "tokenizer.json").write_text(json.dumps(backend))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_drain_that_runs_out(text_model: Path, streamed: bool) -> None:
    """Guards against an answer without choices, where the prompt's scores never came: each tells that it is cut off."""
    body = {"model": "tiny", "prompt": "hi", "echo": True, "logprobs": 1, "n": 2, "stream": streamed}

    async def scene(deps: Deps) -> httpx.Response:
        async with client(deps) as http, held(deps):
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
            while deps.service.num_open < 2:
                await asyncio.sleep(0.01)
            await deps.service.drain(0.01)
            return await asked

    with deps_on(text_model, served_model_names=("tiny",)) as deps:
        answer = asyncio.run(scene(deps))
    lines = answer.text.split("\n\n")[:-2] if streamed else [answer.text]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert {choice["index"]: choice["finish_reason"] for choice in choices} == {0: "abort", 1: "abort"}
    assert all(choice["logprobs"]["token_logprobs"] == [None, None] for choice in choices)


def test_more_prompts_than_there_is_room_for(text_model: Path) -> None:
    """Guards memory and time: many prompts times many continuations are refused before any prompt is tokenised."""
    with server(text_model, max_queue_requests=8) as api, patch.object(completions, "encode", side_effect=ValueError):
        assert "9 continuations" in api.refused(None, prompt=["x"] * 3, n=3)


def test_official_client(text_model: Path) -> None:
    """Done-when 1: OpenAI's own client gets completions, streams, embeddings and models from the whole app."""
    from openai import BadRequestError, NotFoundError, OpenAI

    settings: dict[str, Any] = {"served_model_names": ("tiny",), "api_keys": ("secret",)}
    with (
        deps_on(text_model, "tp2", **settings) as deps,
        serving(deps) as url,
        OpenAI(api_key="secret", base_url=f"{url}/v1", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, "abc"], "seed": 4, "max_tokens": 6, "logprobs": 2}
        whole = client.completions.create(**asked, extra_body={"top_k": 5})
        pieces = list(client.completions.create(**asked, extra_body={"top_k": 5}, stream=True))
        for choice in whole.choices:
            parts = [part for piece in pieces for part in piece.choices if part.index == choice.index]
            assert "".join(part.text for part in parts) == choice.text
            assert parts[-1].finish_reason == choice.finish_reason
        assert whole.usage is not None
        assert whole.usage.completion_tokens == sum(
            len(each.logprobs.tokens or ()) for each in whole.choices if each.logprobs
        )
        found = client.embeddings.create(model="tiny", input=["abc", PROMPT])
        plain = client.embeddings.create(model="tiny", input=["abc", PROMPT], encoding_format="float")
        for one, other in zip(found.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, rel=1e-6)
        assert [card.id for card in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(BadRequestError) as refusal:
            client.completions.create(model="tiny", prompt="x", n=1000)
        assert refusal.value.param == "n"
