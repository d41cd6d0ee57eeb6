"""The names that a model is served by."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from shardwise.server import completions, embeddings, models
from tests.server.conftest import deps_on, serving


@pytest.mark.parametrize("names", [("tiny", "org/tiny"), ("tiny", "*"), ("*",)])
def test_served_names(text_model: Path, names: tuple[str, ...]) -> None:
    """R21: served names, and "*" if that is one of them, are answered to; any other is 404 and never a path."""
    routers = models.router, completions.router, embeddings.router
    named = [name for name in names if name != "*"]
    with (
        deps_on(text_model, served_model_names=names) as deps,
        serving(deps, *routers) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        listed = http.get("/v1/models").json()
        assert [card["id"] for card in listed["data"]] == named
        assert (listed["object"], all(card["object"] == "model" for card in listed["data"])) == ("list", True)
        for name in named:
            assert http.get(f"/v1/models/{name}").json()["id"] == name
            told = http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1}).json()
            assert told["model"] == named[0]
        for path, body in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            answer = http.post(path, json={"model": "gpt-4", **body})
            assert answer.status_code == (200 if "*" in names else 404)
            if "*" in names:
                assert answer.json()["model"] == (named or ["gpt-4"])[0]
            else:
                assert answer.json()["error"]["code"] == "model_not_found"
            assert http.post(path, json=body).json()["error"]["param"] == "model"
        for name in ("gpt-4", "..%2f..%2fetc", "a/b/c"):
            assert http.get(f"/v1/models/{name}").status_code == (200 if "*" in names else 404)


def test_a_model_by_its_own_name(text_model: Path) -> None:
    """Guards against a server without a name for its model."""
    with deps_on(text_model) as deps, serving(deps, models.router) as url:
        (card,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert card == {
        "id": text_model.name,
        "object": "model",
        "created": deps.created,
        "owned_by": "shardwise",
        "max_model_len": 256,
    }
