"""What a body asks a shipped handler for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.store.settings import HandlerKeys
from shardwise.store.styles import Style, choose


def ask(name: str, body: Any, kind: str = "", keys: dict[str, Any] | None = None, **defaults: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Style(name, HandlerKeys(**(keys or {}))).read(content, kind, defaults)


def test_gpt_fast() -> None:
    """Guards b8, b10, b12: greedy, 50 tokens, the continuation alone; max_new_tokens is default and cap."""
    (asked,) = ask("gpt_fast", {"prompt": "a", "temperature": 0.5, "top_k": 3}).asked
    assert (asked.prompt, asked.opening, asked.params.max_tokens) == ("a", "", 50)
    assert (asked.params.temperature, asked.params.top_k) == (0.5, 3)
    call = ask("gpt_fast", {"data": json.dumps({"prompt": "a"})}, repetition_penalty=2.0, temperature=1.0)
    assert call.stream
    assert (call.asked[0].params.temperature, call.asked[0].params.repetition_penalty) == (0.0, 1.0)
    assert ask("gpt_fast", {"prompt": "a"}, keys={"max_new_tokens": 7}).asked[0].params.max_tokens == 7
    assert (
        ask("gpt_fast", {"prompt": "a", "max_new_tokens": 5}, keys={"max_new_tokens": 7}).asked[0].params.max_tokens
        == 5
    )
    with pytest.raises(ValueError, match=r"8 is more than the 7 of handler\.max_new_tokens"):
        ask("gpt_fast", {"prompt": "a", "max_new_tokens": 8}, keys={"max_new_tokens": 7})
    assert not ask("gpt_fast", {"prompt": "a"}, keys={"stream": False}).stream
    assert ask("gpt_fast", {"prompt": "a", "stream": True}, keys={"stream": False}).stream


@pytest.mark.parametrize("name", ["pippy", "deepspeed", "accelerate"])
def test_transformers_like(name: str) -> None:
    """Guards c6, c7, c31: prompt and text, the model's own defaults, and max_new_tokens counts new tokens only."""
    call = ask(name, b"hello there", temperature=0.7, top_p=0.9)
    (asked,) = call.asked
    assert (asked.prompt, asked.opening, call.many, call.stream) == ("hello there", "hello there", False, False)
    assert (asked.params.temperature, asked.params.top_p) == (0.7, 0.9)
    keys = {"max_new_tokens": 60, "max_length": 50, "manual_seed": 40}
    (asked,) = ask(name, {"prompt": "a", "return_full_text": False}, keys=keys).asked
    assert (asked.opening, asked.params.max_tokens, asked.params.seed) == ("", 60, 40)
    style = Style(name, HandlerKeys(**keys))
    style.check_prompt(50)
    with pytest.raises(ValueError, match=r"51 tokens, more than the 50 of handler\.max_length"):
        style.check_prompt(51)
    sampled = ask(name, {"prompt": "a", "do_sample": True, "top_p": 0.95, "top_k": 60}).asked[0].params
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (1.0, 0.95, 60)


def test_batches_and_dialogs() -> None:
    """Guards bodies that hold several requests, and those that hold a conversation, from being taken for each other."""
    call = ask("pippy", ["a", {"prompt": "b", "seed": 1}, {"data": "c"}])
    assert call.many
    assert [asked.prompt for asked in call.asked] == ["a", "b", "c"]
    for wrapped in ({"data": ["a", "b"]}, {"body": [{"prompt": "a"}, "b"]}, {"data": '["a", "b"]'}):
        call = ask("pippy", wrapped)
        assert call.many
        assert [asked.prompt for asked in call.asked] == ["a", "b"]
    dialog = [{"role": "user", "content": "hi"}]
    for body in (dialog, {"messages": dialog}, {"body": dialog}):
        call = ask("tp_llama", body, keys={"mode": "chat"})
        assert (call.many, call.asked[0].prompt, call.asked[0].messages) == (False, None, dialog)
    call = ask("tp_llama", [dialog, dialog], keys={"mode": "chat", "temperature": 0.6, "top_p": 0.9})
    assert call.many
    assert [asked.messages for asked in call.asked] == [dialog, dialog]
    assert call.asked[0].params.top_p == 0.9
    assert ask("tp_llama", b"hi", keys={"mode": "chat"}).asked[0].messages == dialog


def test_text_and_json() -> None:
    """Guards texts that look like JSON, and JSON that isn't any, against being taken for the other."""
    assert ask("pippy", b'{"not": JSON', "text/plain; charset=utf-8").asked[0].prompt == '{"not": JSON'
    assert ask("pippy", "é {".encode()).asked[0].prompt == "é {"
    assert ask("pippy", b'"quoted"', "application/json").asked[0].prompt == "quoted"
    for body, kind in ((b'{"prompt": "a"', ""), (b"a", "application/json"), (b'{"prompt": 1, "prompt": 2}', "")):
        with pytest.raises(ValueError, match="send it as text/plain"):
            ask("pippy", body, kind)
    with pytest.raises(ValueError, match="neither JSON nor text"):
        ask("pippy", b"\xff\xfe")


WRONG = {
    '{"prompt": "a", "max_token": 3}': "unknown field 'max_token'",
    '{"prompt": "a", "n": 2}': "unknown field 'n'",
    '{"prompt": 3}': "prompt must be a text",
    "{}": "either prompt or messages",
    '{"prompt": "a", "messages": []}': "either prompt or messages",
    '{"messages": [{"role": "user"}]}': "messages must be a list",
    '{"prompt": "a", "max_new_tokens": 3, "max_tokens": 3}': "say the same thing",
    '{"prompt": "a", "max_new_tokens": -1}': "max_tokens must be a whole number",
    '{"prompt": "a", "temperature": "hot"}': "temperature must be a number",
    '{"prompt": "a", "top_p": 0.5}': "top_p needs do_sample",
    '{"prompt": "a", "do_sample": false, "temperature": 1}': "do_sample false is greedy",
    '{"prompt": "a", "stream": 1}': "stream must be true or false",
    '[{"prompt": "a", "stream": true}]': "stream can't be true for a list",
    '["a", 3]': "must be a JSON object",
    "[]": "1 to 64 prompts, not 0",
    json.dumps(["a"] * 65): "1 to 64 prompts, not 65",
    '["a", {"prompt": "b", "seed": -1}]': "prompt 1: seed must be",
}


@pytest.mark.parametrize("body", WRONG)
def test_no_field_is_ignored(body: str) -> None:
    """Guards against a field that does nothing, which is how max_new_tokens was lost (b8)."""
    with pytest.raises(ValueError, match=WRONG[body]):
        ask("pippy", body.encode())


def test_choice() -> None:
    """Guards which shipped handler a folder gets: by its word first, then by its keys."""
    assert choose("pippy", None, [], {}) == "pippy"
    assert choose("pippy", "gpt_fast", [], {}) == "gpt_fast"
    assert choose(None, None, ["handler"], {"converted_ckpt_dir": 1}) == "gpt_fast"
    assert choose(None, None, ["handler"], {"converted_ckpt_dir": 1, "mode": 1}) == "tp_llama"
    assert choose(None, None, ["pippy", "handler"], {"model_path": 1}) == "pippy"
    assert choose(None, None, ["deepspeed"], {}) == "deepspeed"
    assert choose(None, None, ["handler"], {"model_path": 1}) == "accelerate"
