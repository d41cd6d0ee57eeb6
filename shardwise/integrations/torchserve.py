"""The handler for a real TorchServe: the worker that loads it hosts a model, whose ranks are processes of its own.

Knows TorchServe's calls and what requests look like there; nothing of how a model is run. TorchServe wants a handler's
module to define one class and no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from shardwise.integrations.hosted import Hosted
from shardwise.integrations.torchserve_config import UNTOLD, HandlerConfig, read_handler_config
from shardwise.runtime.executor import RankFailure
from shardwise.server.admission import Refused
from shardwise.server.service import Cut

log = logging.getLogger("shardwise")


class ShardwiseHandler:
    """One TorchServe worker: a model on a layout, given batches of requests.

    A rank that dies is replaced here, and costs neither a request nor the worker. Where torchrun has started a group of
    workers the first hosts the model, and the others answer nothing. ``leave`` ends the process.
    """

    def __init__(self, leave: Callable[[int], NoReturn] = os._exit) -> None:
        self._hosted: Hosted | None = None
        self._config: HandlerConfig
        self._leave = leave

    def initialize(self, context: Any) -> None:
        """Load the model that model-config.yaml names.

        Raises RuntimeError, which TorchServe passes on to whoever registers the model, and MemoryError.
        """
        folder = Path(context.system_properties["model_dir"])
        name = (context.manifest or {}).get("model", {}).get("configFile")
        if name is None:
            raise RuntimeError("the manifest names no configFile: the handler section of one says which model to load")
        try:
            self._config = read_handler_config(folder / name, os.environ)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._load(context.system_properties.get("gpu_id"))
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        except RankFailure as failure:
            if failure.kind in ("MemoryError", "OutOfMemoryError"):
                raise MemoryError(str(failure)) from failure
            raise

    def handle(self, data: Sequence[Mapping[str, Any]], context: Any) -> list[Any] | Awaitable[list[Any]]:
        """Continue the prompts of a batch together: a text each, or a document that says what was wrong with one.

        With ``stream`` the text goes out in pieces as it comes, and the last piece is empty. TorchServe's asynchronous
        workers, which don't wait for one batch before they bring the next, get the same to await.
        """
        if self._hosted is None:
            return [""] * len(data)
        work = self._hosted.begin(self._answer(self._hosted, data, context))
        return asyncio.wrap_future(work) if self._config.asynchronous else work.result()

    async def _answer(self, hosted: Hosted, data: Sequence[Mapping[str, Any]], context: Any) -> list[Any]:
        began = time.monotonic()
        told: list[tuple[float, int]] = []  # of each piece, when it came and how many tokens it has
        answers = await asyncio.gather(
            *(self._continue(hosted, request, at, context, told) for at, request in enumerate(data))
        )
        if hosted.dead:
            log.critical("no ranks are left, and none can be started: the worker ends, for TorchServe to start another")
            self._leave(1)
        context.metrics.add_time("HandlerTime", round((time.monotonic() - began) * 1000, 2))
        if told:
            context.metrics.add_time("TimeToFirstToken", round((told[0][0] - began) * 1000, 2))
        context.metrics.add_counter("GeneratedTokens", sum(count for _, count in told))
        return answers

    async def _continue(
        self, hosted: Hosted, request: Mapping[str, Any], at: int, context: Any, told: list[tuple[float, int]]
    ) -> Any:
        text = ""
        context.set_response_content_type(at, "text/plain; charset=utf-8")
        try:
            async with aclosing(hosted.pieces(self._row(request), self._config.sampling)) as pieces:
                async for piece in pieces:
                    told.append((time.monotonic(), len(piece.token_ids)))
                    if piece.finish_reason == "error":
                        status = HTTPStatus.BAD_REQUEST if piece.unsatisfiable else HTTPStatus.INTERNAL_SERVER_ERROR
                        return _refuse(context, at, status, piece.error)
                    if not self._config.stream:
                        text += piece.text
                    elif piece.text:
                        _send(piece.text, at, context)
        except (ValueError, RecursionError) as error:
            return _refuse(context, at, HTTPStatus.BAD_REQUEST, str(error))
        except (Cut, Refused) as error:
            return _refuse(context, at, HTTPStatus(error.status), str(error))
        return text

    def _load(self, gpu: int | None) -> None:
        engine = self._config.engine
        if gpu is not None and gpu >= 0 and engine.device != "cpu" and self._config.one_gpu:
            if engine.layout.world_size > 1:
                raise ValueError(
                    f"layout {engine.layout} needs {engine.layout.world_size} GPUs, and TorchServe gives this worker "
                    f"one: set parallelType to custom, parallelLevel to {engine.layout.world_size} and "
                    "asyncCommunication to true"
                )
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # each worker has another one
        self._hosted = Hosted(self._config.model, engine, generation_config=self._config.generation_config)

    def _row(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a request asks for: a JSON object (prompt or messages, max_new_tokens, sampling fields), or a prompt."""
        body = request.get("data", request.get("body"))
        if body is None:
            raise ValueError(
                "the request has no body, as forms have none: send application/json, or a prompt as text/plain"
            )
        if isinstance(body, bytes | bytearray):
            try:
                body = body.decode()
                body = json.loads(body) if body.lstrip().startswith("{") else body
            except (ValueError, RecursionError) as error:  # of UTF-8 or of JSON
                raise ValueError(f"the body is neither text nor a JSON object: {error}") from None
        if not isinstance(body, str | dict):
            raise ValueError("the body must be a JSON object, or a prompt")
        row: dict[str, Any] = {"prompt": body} if isinstance(body, str) else dict(body)
        for name in UNTOLD:
            if name in row:
                raise ValueError(f"{name} can't be set: the answer is a plain text")
        names = ("max_new_tokens", "max_tokens")
        wanted = [limit for name in names if (limit := row.pop(name, None)) is not None]
        if len(wanted) > 1:
            raise ValueError("max_new_tokens and max_tokens are one thing: give one of them")
        most = self._config.max_new_tokens
        asked = wanted[0] if wanted else most
        if most is not None and isinstance(asked, int) and asked > most:
            raise ValueError(f"max_new_tokens {asked} is more than the {most} that this model's configuration allows")
        return row if asked is None else {**row, "max_tokens": asked}


def _send(text: str, at: int, context: Any) -> None:
    """A piece of one request's answer."""
    from ts.handler_utils.utils import send_intermediate_predict_response

    send_intermediate_predict_response({at: text}, {at: context.request_ids[at]}, "piece", HTTPStatus.OK, context)


def _refuse(context: Any, at: int, status: HTTPStatus, message: str) -> dict[str, Any]:
    """The answer to one request of a batch that can't be answered, in the shape of TorchServe's own errors."""
    context.set_response_status(int(status), status.phrase, at)
    context.set_response_content_type(at, "application/json")
    return {"code": int(status), "type": status.phrase.replace(" ", "") + "Exception", "message": message}
