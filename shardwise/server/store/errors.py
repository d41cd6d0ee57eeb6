"""What TorchServe's clients are told when something goes wrong: its shape, its names, its status codes.

Knows no routes but that those of OpenAI's world keep their own shape.
"""

from __future__ import annotations

from typing import Any

from shardwise.runtime.executor import RankFailure
from shardwise.server.errors import ApiError

TYPES = {
    400: "BadRequestException",
    401: "InvalidKeyException",
    403: "ForbiddenException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    408: "RequestTimeoutException",
    409: "ConflictStatusException",
    413: "BadRequestException",
    415: "BadRequestException",
    429: "ServiceUnavailableException",
    431: "BadRequestException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
    507: "OutOfMemoryException",
}
"""What an error is called where nothing more exact is said."""
NO_WORKER = (
    'Model "{}" Version {} has no worker to serve inference request. Please use scale workers API to add workers.'
)
"""TorchServe's own sentence, for a full queue as well."""
OPENAI = ("/v1/", "/tokenize", "/detokenize")
"""Where paths begin whose errors have OpenAI's shape."""


class StoreError(ApiError):
    """An error with TorchServe's name for it, or the usual one for its status."""

    def __init__(self, status: int, message: str, kind: str = "", *, retry_after: int | None = None) -> None:
        super().__init__(status, message, retry_after=retry_after)
        self.kind = kind


def document(path: str, error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an answer to a request for ``path``."""
    if path.startswith(OPENAI):
        return error.document(request_id)
    usual = TYPES.get(error.status, TYPES[400 if error.status < 500 else 500])  # a handler may raise any status
    kind = (error.kind if isinstance(error, StoreError) else "") or usual
    return {"code": error.status, "type": kind, "message": error.message}


def no_model(name: str) -> StoreError:
    """There is no model of this name."""
    return StoreError(404, f"Model not found: {_cut(name)}", "ModelNotFoundException")


def no_version(name: str, version: str) -> StoreError:
    """The model has no such version."""
    return StoreError(
        404, f"Model version: {_cut(version)} does not exist for model: {_cut(name)}", "ModelVersionNotFoundException"
    )


def _cut(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + " …"


def told(failure: RankFailure) -> str:
    """A failure as clients may know it: the rank, and what became of it, without what it printed."""
    return f"rank {failure.rank}: {failure.kind or failure.cause.split(';')[0]}"
