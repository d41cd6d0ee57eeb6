"""OpenAI's routes over a store's models keep to what these say of themselves."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.dictation import Script
from tests.server.store.conftest import save_folder, until, world
from tests.server.store.test_predictions import ASKED, scripted

CAPS = "max_new_tokens: 4\nmax_length: 8\ntemperature: 0.9\nmanual_seed: 7"


def test_the_handlers_caps_and_defaults(tmp_path: Path, tiny_text: Path) -> None:
    """Guards max_new_tokens, max_length, temperature and manual_seed of a model against a client that takes the other
    door."""
    save_folder(tmp_path, "m", tiny_text, CAPS)
    save_folder(tmp_path, "free", tiny_text)

    async def scene() -> None:
        async with world(tmp_path) as found:

            async def ask(**fields: Any) -> tuple[int, Any]:
                asked = {"model": "m", "prompt": "ab", "ignore_eos": True, **fields}
                answer = await found.http.post("/v1/completions", json=asked)
                return answer.status_code, answer.json()

            status, drawn = await ask()
            assert (status, drawn["usage"]["completion_tokens"]) == (200, 4)
            said = {"model": "free", "max_tokens": 4, "temperature": 0.9, "seed": 7}
            assert (await ask(**said))[1]["choices"] == drawn["choices"]
            assert (await ask(max_tokens=3))[1]["usage"]["completion_tokens"] == 3
            status, refused = await ask(max_tokens=5)
            assert (status, refused["error"]["param"]) == (400, "max_tokens")
            assert "handler.max_new_tokens" in refused["error"]["message"]
            status, refused = await ask(prompt="a" * 9)
            assert (status, refused["error"]["param"]) == (400, "prompt")
            assert "handler.max_length" in refused["error"]["message"]
            assert (await ask(model="free", prompt="a" * 9, max_tokens=5))[0] == 200

    asyncio.run(scene())


@pytest.mark.parametrize("ticket", [True, False])
def test_a_full_queue_and_a_model_that_does_not_respond(
    tmp_path: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, ticket: bool
) -> None:
    """Guards useJobTicket, jobQueueSize and responseTimeout against a client that takes the other door."""
    queue: dict[str, Any] = {"useJobTicket": True} if ticket else {"jobQueueSize": 1}
    save_folder(tmp_path, "m", tiny_text, batchSize=1, responseTimeout=300, **queue)
    script = Script()
    script.hold_at = 2
    asked = {"model": "m", "prompt": "a", "max_tokens": 12, "temperature": 0}

    async def scene() -> None:
        async with world(tmp_path, begin=scripted(script), given={"step_timeout": 600.0}) as found:
            model = found.registry.find("m").model
            assert model is not None

            def ask() -> Any:
                return found.http.post("/v1/completions", json=asked)

            burst, room = [asyncio.ensure_future(ask()) for _ in range(5)], 1 if ticket else 2
            await until(lambda: sum(each.done() for each in burst) == 5 - room and script.spoken == 3)
            assert {each.result().status_code for each in burst if each.done()} == {503}
            running = [each for each in burst if not each.done()]
            assert model.pending == room
            refused = await ask()
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await found.http.post("/predictions/m", json=ASKED)).status_code == 503
            for each in running[1:]:
                each.cancel()  # its client goes
            looks = count(1)
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + 301 * next(looks))
            monkeypatch.setattr("shardwise.server.store.answers.time", later)
            late = await running[0]
            assert late.status_code == 500
            assert "responseTimeout" in late.json()["error"]["message"]
            await until(lambda: not model.answers)
            assert model.pending == 0

    try:
        asyncio.run(scene())
    finally:
        script.go.set()
