"""What a request meets before a route sees it: an id, the Host, the Origin, the key, the size and shape of its body.

Knows headers and bytes; nothing of models, nor of which routes there are beyond those of health.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.server.config import ServerConfig
from shardwise.server.document import check_document
from shardwise.server.errors import ApiError
from shardwise.server.logs import log_access
from shardwise.server.port import address_of, is_loopback

OPEN = ("/health", "/health/live", "/health/ready")
"""Routes that ask for no key, and go on while the server drains."""
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
ENDING = "the server is shutting down"
RETRY_AFTER = 5
"""Seconds after which a client may ask again when this process ends: another may have taken its place."""

log = logging.getLogger("shardwise")


class Guard:
    """ASGI middleware. ``is_draining`` tells when no new requests are to be let in.

    ``turn_away`` is called with the API key's number for what is sent to one of the paths in ``busy``: before the body
    is understood, which would cost most of what a refusal costs. It raises ApiError where there is no room.
    ``is_raw`` tells of which paths bodies may be anything and are not looked at; all others must be JSON. ``document``
    is the body of an error on a path, with a request's id.
    Puts ``request_id`` and ``key`` (the number of the API key, as text, or "") into the state of a request, and logs
    what a route has put into its ``log`` there.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        is_draining: Callable[[], bool],
        busy: Container[str] = (),
        turn_away: Callable[[str], None] = lambda key: None,
        is_raw: Callable[[str], bool] = lambda path: False,
        document: Callable[[str, ApiError, str], dict[str, Any]] = lambda path, error, number: error.document(number),
    ) -> None:
        self._app = app
        self._config = config
        self._is_draining = is_draining
        self._busy = busy
        self._turn_away = turn_away
        self._is_raw = is_raw
        self._document = document
        self._keys = [_digest(key.encode()) for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        given = headers.get(b"x-request-id", b"")
        state["request_id"] = given.decode() if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state["key"] = ""
        document = partial(self._document, scope["path"])
        answer = Answer(send, [(b"x-request-id", state["request_id"].encode()), *SAFE], document)
        try:
            await self._pass(scope, headers, receive, answer)
        except ApiError as error:
            await answer.refuse(error, state["request_id"])
        except Exception as error:
            log.error("request %s failed", state["request_id"], exc_info=error)
            await answer.refuse(ApiError(500, "internal error"), state["request_id"])
        finally:
            if scope["path"] not in OPEN:  # probes come every few seconds
                self._log(scope, answer)
        return None

    def _log(self, scope: Scope, answer: Answer) -> None:
        state = scope["state"]
        log_access(
            {
                "request_id": state["request_id"],
                "method": scope["method"],
                "route": scope["path"],
                "status": answer.status or None,
                "seconds": time.monotonic() - answer.began,
                "key": state["key"] or None,
                **state.get("log", {}),
            }
        )

    async def _pass(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: Answer) -> None:
        config, is_open = self._config, scope["path"] in OPEN
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        origin = headers.get(b"origin")
        if origin is not None:
            self._check_origin(origin.decode("latin-1"))
            answer.headers += self._cors(origin)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                return await answer.empty(204, _preflight(headers))
        if self._keys and not is_open:
            scope["state"]["key"] = self._key(headers.get(b"authorization", b""))
        length = int(headers.get(b"content-length", b"0"))
        if is_open and (length or b"transfer-encoding" in headers):  # else anyone could make us read and parse
            raise ApiError(413, "this route takes no body")
        if length > config.max_body:
            raise ApiError(413, f"the body has {length} bytes; at most {config.max_body} are taken")
        is_raw = self._is_raw(scope["path"])
        if length or b"transfer-encoding" in headers:
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json" and not is_raw:
                raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ApiError(415, "the body must not be compressed")
        body = await _read(receive, config.max_body)
        if body is None:  # the client has left
            return None
        if self._is_draining() and not is_open and scope["path"] != "/metrics":
            answer.headers.append((b"connection", b"close"))  # only now: unread bytes would reset the connection
            raise ApiError(503, ENDING, retry_after=RETRY_AFTER)
        if scope["path"] in self._busy and scope["method"] == "POST":
            self._turn_away(scope["state"]["key"])
        if body:
            if not is_raw:
                check_document(body)
            if config.log_prompts:
                scope["state"]["log"] = {"body": body.decode(errors="replace")}
        return await self._app(scope, replay(body, receive), answer)

    def _check_host(self, host: str) -> None:
        """A page whose name was made to point here (DNS rebinding) is told by the name that it sends."""
        match = HOST.fullmatch(host)
        name = match[1].strip("[]").lower() if match else ""
        allowed = {part.lower() for part in self._config.allowed_hosts}
        own = self._config.host.strip("[]").lower()
        if "*" in allowed or name in allowed or (name and name == own):
            return
        if is_loopback(own):
            fine = name == "localhost" or is_loopback(name)
        else:
            fine = name == "localhost" or address_of(name) is not None  # an address can't be made to point elsewhere
        if not fine:
            raise ApiError(403, "this Host is not served here; the operator may allow it with --allowed-host")

    def _check_origin(self, origin: str) -> None:
        if origin not in self._config.allowed_origins and "*" not in self._config.allowed_origins:
            raise ApiError(403, "requests from this browser origin are refused; see --allowed-origin")

    def _cors(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        allowed = b"*" if "*" in self._config.allowed_origins else origin
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    def _key(self, authorization: bytes) -> str:
        """Which of the keys it is, in a time that tells nothing of them."""
        scheme, _, given = authorization.partition(b" ")
        digest = _digest(given.strip())
        same = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or True not in same:
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        return str(1 + same.index(True))


class Answer:
    """``send`` with headers that go with every answer, and errors as ``document`` tells them."""

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        document: Callable[[ApiError, str], dict[str, Any]] = ApiError.document,
    ) -> None:
        self.headers = headers
        self._document = document
        self.status = 0
        """0 until the answer has begun."""
        self.began = time.monotonic()
        self._send = send

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = list(message.get("headers", ()))
            names = {name for name, _ in own}
            message = {**message, "headers": own + [each for each in self.headers if each[0] not in names]}
        await self._send(message)

    async def empty(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """An answer without a body."""
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body"})

    async def refuse(self, error: ApiError, request_id: str) -> None:
        """Answer with an error. Where an answer has begun, it ends unfinished instead, which the client can tell."""
        if self.status:
            return
        body = json.dumps(self._document(error, request_id)).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


async def _read(receive: Receive, most: int) -> bytes | None:
    """The whole body, or None if the client has left; ApiError once it is longer than ``most``."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise ApiError(413, f"the body is longer than the {most} bytes that are taken")
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` that begins with a body which was read before."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _preflight(headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    wanted = headers.get(b"access-control-request-headers", b"")
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", wanted if HEADER_NAMES.fullmatch(wanted) else b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
