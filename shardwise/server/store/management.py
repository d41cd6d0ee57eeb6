"""TorchServe's management routes: register, scale, describe, list, unregister, set the default version.

Knows their parameters, of which each is honoured or refused by name; what they change is the registry's business. The
operator stands at this port, so causes are told in full.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from shardwise.server.document import check_document
from shardwise.server.store.errors import StoreError
from shardwise.server.store.registry import Registry
from shardwise.server.store.served import Served

MAX_LISTED = 100
"""Models of a page, unless a limit is said."""
MAX_TOLD = 2000
"""Characters of a cause."""
SETTINGS = {
    "initial_workers": ("min_workers", 0),
    "batch_size": ("batch_size", 1),
    "max_batch_delay": ("max_batch_delay", 0),
    "response_timeout": ("response_timeout", 1),
    "startup_timeout": ("startup_timeout", 1),
}
"""Parameters that win over settings of the model's own, what these are called there, and the least that they can be."""
REFUSED = {
    "handler": "the handler is the model's own or a shipped one: say it in its MANIFEST.json or as handler.style",
    "runtime": "python is the only runtime",
    "s3_sse_kms": "nothing is fetched: put the model into the model store",
    "timeout": "workers finish what they have accepted: leave it out, or say -1",
    "customized": "handlers are not asked to describe themselves: leave it out",
}


def router(registry: Registry) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/models")
    async def register(request: Request) -> JSONResponse:
        """Register a model of the store: ``url`` is its folder's or archive's name there."""
        given = await _given(request, "url", "model_name", "synchronous", *SETTINGS)
        url = given.get("url")
        if not url:
            raise StoreError(400, "Parameter url is required.")
        synchronous = _flag(given, "synchronous")
        settings = {ours: _number(given, name, least) for name, (ours, least) in SETTINGS.items() if name in given}
        try:
            served = await registry.register_url(url, given.get("model_name"), settings)
        except ValueError as error:
            raise _bad(error) from None
        limits = served.stored.limits
        what = f'Model "{served.stored.name}" Version: {served.stored.version} registered with {limits.min_workers}'
        if limits.min_workers == 0:
            return _status(f"{what} initial workers. Use scale workers API to add workers for the model.")
        work = served.scale(limits.min_workers, limits.max_workers)
        if not synchronous:
            return _status("Processing worker updates...", 202)
        _check(served, await work)
        return _status(f"{what} initial workers")

    @routes.get("/models")
    async def models(request: Request) -> JSONResponse:
        """The names of all models, a page of them."""
        given = await _given(request, "limit", "next_page_token")
        limit = _number(given, "limit", 1) or MAX_LISTED
        first = _number(given, "next_page_token", 0) or 0
        names = sorted(registry.entries)
        listed = [{"modelName": name, "modelUrl": registry.find(name).url} for name in names[first : first + limit]]
        more = {"nextPageToken": str(first + limit)} if first + limit < len(names) else {}
        return JSONResponse({**more, "models": listed})

    @routes.get("/models/{name}")
    async def describe(name: str, request: Request) -> JSONResponse:
        """How the default version of a model is."""
        await _given(request)
        return JSONResponse([describe_one(registry.find(name))])

    @routes.get("/models/{name}/{version}")
    async def describe_version(name: str, version: str, request: Request) -> JSONResponse:
        """How a version of a model is, or all of them are."""
        await _given(request)
        if version == "all":
            registry.find(name)
            return JSONResponse([describe_one(each) for each in registry.entries[name].versions.values()])
        return JSONResponse([describe_one(registry.find(name, version))])

    @routes.put("/models/{name}")
    async def scale(name: str, request: Request) -> JSONResponse:
        """Change the number of workers of a model's default version."""
        return await _scale(registry.find(name), request, f"for model: {name}")

    @routes.put("/models/{name}/{version}")
    async def scale_version(name: str, version: str, request: Request) -> JSONResponse:
        """Change the number of workers of a version."""
        return await _scale(registry.find(name, version), request, f"for model: {name}, version: {version}")

    @routes.put("/models/{name}/{version}/set-default")
    async def set_default(name: str, version: str, request: Request) -> JSONResponse:
        """Have a version be the one that is meant where none is said."""
        await _given(request)
        registry.set_default(name, version)
        return _status(f'Default version successfully updated for model "{name}" to "{version}"')

    @routes.delete("/models/{name}")
    async def unregister(name: str, request: Request) -> JSONResponse:
        """Take a model away whose default version is its only one; its processes are gone when this answers."""
        await _given(request)
        await registry.unregister(name)
        return _status(f'Model "{name}" unregistered')

    @routes.delete("/models/{name}/{version}")
    async def unregister_version(name: str, version: str, request: Request) -> JSONResponse:
        """Take a version away."""
        await _given(request)
        await registry.unregister(name, version)
        return _status(f'Model "{name}" unregistered')

    return routes


def describe_one(served: Served) -> dict[str, Any]:
    """A version in the words of TorchServe's describe; ``layout``, ``progress`` and ``failure`` are ours."""
    stored, frontend = served.stored, served.stored.frontend
    limits, model = stored.limits, served.model
    found: dict[str, Any] = {
        "modelName": stored.name,
        "modelVersion": stored.version,
        "modelUrl": served.url,
        "engine": "Torch",
        "runtime": "python",
        "minWorkers": limits.min_workers,
        "maxWorkers": limits.min_workers if limits.max_workers is None else limits.max_workers,
        "batchSize": frontend.batch_size,
        "maxBatchDelay": frontend.max_batch_delay,
        "responseTimeout": frontend.response_timeout,
        "startupTimeout": frontend.startup_timeout,
        "maxRetryTimeoutInSec": frontend.max_retry_timeout,
        "clientTimeoutInMills": frontend.client_timeout,
        "parallelType": frontend.parallel_type,
        "parallelLevel": frontend.num_ranks,
        "deviceType": frontend.device_type,
        "deviceIds": None if frontend.device_ids is None else list(frontend.device_ids),
        "continuousBatching": not stored.custom,
        "useJobTicket": limits.job_ticket,
        "status": served.state,
        "loadedAtStartup": served.at_start,
        "workers": [] if model is None else model.workers(),
        "handler": stored.handler if stored.style is None else stored.style.name,
    }
    found = {name: value for name, value in found.items() if value is not None}
    pending = 0 if model is None else model.pending
    if limits.queue_requests is not None:
        found["jobQueueStatus"] = {
            "remainingCapacity": max(0, limits.queue_requests - pending),
            "pendingRequests": pending,
        }
    if model is not None and model.progress:
        found["progress"] = model.progress
    if served.failure:
        found["failure"] = served.failure[:MAX_TOLD]
    return found


async def _scale(served: Served, request: Request, where: str) -> JSONResponse:
    given = await _given(request, "min_worker", "max_worker", "synchronous", "timeout")
    least = _number(given, "min_worker", 0)
    least = 1 if least is None else least
    most = _number(given, "max_worker", 0)
    synchronous = _flag(given, "synchronous")
    try:
        work = served.scale(least, least if most is None else most)
    except ValueError as error:
        raise _bad(error) from None
    if not synchronous:
        return _status("Processing worker updates...", 202)
    _check(served, await work)
    return _status(f"Workers scaled to {len(served.model.workers()) if served.model else 0} {where}")


def _check(served: Served, failure: str) -> None:
    if failure:
        where = f"model {served.stored.name} version: {served.stored.version}"
        raise StoreError(500, f"Failed to start workers for {where}: {failure[:MAX_TOLD]}")


async def _given(request: Request, *known: str) -> Mapping[str, str]:
    """The parameters of a request, of its query or of its JSON body. StoreError 400 names one that is not honoured."""
    items = [(name, value) for name, value in request.query_params.multi_items()]
    body = await request.body()
    if body:
        check_document(body)
        document = json.loads(body)
        if not isinstance(document, dict):
            raise StoreError(400, "the body must be a JSON object of parameters")
        items += [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in document.items()]
    given: dict[str, str] = {}
    for name, value in items:
        if name in given:
            raise StoreError(400, f"{name[:100]} is given twice")
        if name == "timeout" and "timeout" in known and value == "-1":
            continue
        if name in REFUSED or name not in known:
            why = REFUSED.get(name, f"known: {', '.join(known)}" if known else "none is known here")
            raise StoreError(400, f"unknown parameter {name[:100]!r}: {why}")
        given[name] = value
    return given


def _number(given: Mapping[str, str], name: str, least: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise StoreError(400, f"{name} must be a whole number of at least {least}, not {text[:100]!r}")
    return int(text)


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise StoreError(400, f"{name} must be true or false, not {text[:100]!r}")
    return text == "true"


def _bad(error: ValueError) -> StoreError:
    return StoreError(400, str(error)[:MAX_TOLD])


def _status(text: str, status: int = 200) -> JSONResponse:
    return JSONResponse({"status": text}, status)
