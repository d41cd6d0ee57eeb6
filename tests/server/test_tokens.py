"""What a text or a conversation is in tokens, and back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import pytest

from shardwise.server import tokens
from tests.server.conftest import client_of, deps_on, serving
from tests.tiny import ALPHABET

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]


TEMPLATE = """{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}
<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"""


@pytest.fixture(scope="module")
def http(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("chat")
    for file in text_model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("\n", ""))
    with (
        deps_on(path, served_model_names=("tiny",)) as deps,
        serving(deps, tokens.router) as url,
        client_of(url) as client,
    ):
        yield client


def test_a_text_and_back(http: httpx.Client) -> None:
    """Guards against tokens that are not the model's, and a text that doesn't come back."""
    found = http.post("/tokenize", json={"model": "tiny", "prompt": "héy", "return_token_strs": True}).json()
    ids = [ALPHABET.index(char) for char in ("h", "Ã", "©", "y")]
    assert found == {"count": 4, "max_model_len": 256, "tokens": ids, "token_strs": ["h", "\ufffd", "\ufffd", "y"]}
    assert http.post("/detokenize", json={"model": "tiny", "tokens": ids}).json() == {"prompt": "héy"}
    special = http.post("/detokenize", json={"tokens": [257, *ids, 258]}).json()
    assert special == {"prompt": "<s>héy</s>"}
    assert "token_strs" not in http.post("/tokenize", json={"prompt": "a"}).json()


def test_a_conversation(http: httpx.Client) -> None:
    """C43: a conversation's tokens are those of the rendered template, and its special tokens stand once."""
    for add, end in ((True, "<s>assistant:"), (False, "")):
        body = {"messages": TALK, "add_generation_prompt": add}
        found = http.post("/tokenize", json=body).json()
        text = "<s>user: hi</s><s>assistant: yes</s><s>user: so</s>" + end
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        assert found["count"] == len(found["tokens"])
        assert found["tokens"][0] == 257
    default = http.post("/tokenize", json={"messages": TALK}).json()
    assert default == http.post("/tokenize", json={"messages": TALK, "add_generation_prompt": True}).json()


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, 400, "nonsense"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "system", "content": "x"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [259]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [], "model": "other"}, 404, "model"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, body: dict[str, object], status: int, param: str) -> None:
    """C42: ids that no token has, and bodies that say too little, too much or nonsense, are refused by name."""
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (status, param)


def test_many_threads_at_once(http: httpx.Client) -> None:
    """C41: 64 clients at once failed with "Already borrowed"."""
    texts = [f"text {number} " * 50 for number in range(64)]
    expected = [http.post("/tokenize", json={"prompt": text}).json() for text in texts]
    barrier = Barrier(64)

    def ask(text: str) -> object:
        barrier.wait(60)
        found = http.post("/tokenize", json={"prompt": text}).json()
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
        return found

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, texts)) == expected
