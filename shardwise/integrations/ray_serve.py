"""Ray Serve: a fleet of replicas, each a layout with the OpenAI app in front, on resources of its own.

Knows Serve's deployments; routes, queues and engines are the server's. Needs `pip install 'shardwise[ray]'`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Layout
from shardwise.integrations.ray_actor import engine_config, resources
from shardwise.open import open_model
from shardwise.server.app import create_app
from shardwise.server.config import ServerConfig
from shardwise.server.life import make_deps
from shardwise.server.logs import set_up_logs
from shardwise.server.serve import Job, check_server, extra

if TYPE_CHECKING:
    from ray import serve

GRACE = 5.0
"""Seconds for a replica to end its ranks, after its last request."""

log = logging.getLogger("shardwise")


def build_app(
    model: str | Path,
    layout: str | Layout = "1",
    *,
    device: str = "cpu",
    threads: int = 1,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_requests: int = 32,
    scaling: Mapping[str, Any] | None = None,
    name: str = "shardwise",
    server: ServerConfig | None = None,
    allow_no_key: bool = False,
    generation_config: bool = True,
    **settings: Any,
) -> serve.Application:
    """A Serve application for ``serve.run``: from ``min_replicas`` to ``max_replicas`` copies of a model on a layout.

    A replica is placed on one host, with ``threads`` CPUs for each rank and, where ``device`` is cuda, a GPU; ``model``
    is opened there, so a path must be one of that host's. Serve starts more when there are more than
    ``target_requests`` unfinished requests for each; ``scaling`` are other fields of its AutoscalingConfig, such as
    upscale_delay_s. ``server`` are the server's settings, of which ``host`` is where Serve's proxy listens, and
    ``settings`` the other fields of EngineConfig, as LLM takes them. Raises ValueError, with the remedy, for what
    can't be.
    """
    if not 0 <= min_replicas <= max_replicas or max_replicas < 1:
        raise ValueError(
            f"min_replicas and max_replicas must be 0 <= {min_replicas} <= {max_replicas} with at least one at most"
        )
    if target_requests < 1:
        raise ValueError(f"target_requests must be at least 1, not {target_requests}")
    engine = engine_config(layout, device, threads, settings)
    job = Job(str(model), engine, server or ServerConfig(), generation_config, allow_no_key)
    check_server(job.server, allow_no_key)
    with extra("ray"):
        from ray import serve
    needed = resources(engine)
    actor = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0)}
    deployment = serve.deployment(
        name=name,
        ray_actor_options=actor,
        placement_group_bundles=[{kind: float(count) for kind, count in needed.items()}],
        placement_group_strategy="STRICT_PACK",
        autoscaling_config={
            **(scaling or {}),
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": target_requests,
        },
        max_ongoing_requests=job.server.max_queue_requests,
        graceful_shutdown_timeout_s=job.server.drain_timeout + GRACE,
    )
    return deployment(serve.ingress()(Replica)).bind(job)


class Replica:
    """One replica: a model's ranks, and the app over them, which Serve hands requests to."""

    def __init__(self, job: Job) -> None:
        set_up_logs(job.log_format, job.log_level, job.server.api_keys)
        opened = open_model(job.model, job.engine, generation_config=job.generation_config, on_progress=log.info)
        self._deps = make_deps(job, opened)

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application that Serve hands requests to; its lifespan starts and ends the engines."""
        return Unprefixed(create_app(self._deps))

    async def check_health(self) -> None:
        """Serve asks now and then. Raises when ranks are gone for good, and gets another replica; not while some are
        being replaced, which this one does by itself."""
        failure = self._deps.service.failure
        if failure is not None:
            raise RuntimeError(f"no ranks are left, and none can be started: {failure}")


class Unprefixed:
    """The app, which knows its routes from the root, under whatever route prefix Serve has given it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """See ASGI."""
        prefix = scope.get("root_path", "")
        if prefix:
            scope = {**scope, "path": scope["path"].removeprefix(prefix), "root_path": ""}
        await self._app(scope, receive, send)
