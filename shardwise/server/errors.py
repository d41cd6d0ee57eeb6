"""What clients are told when something goes wrong: OpenAI's shape, and only sentences of our own.

Texts of exceptions that are not made for users never get here: they may hold paths, addresses and other people's data.
"""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
SHAPE = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": sorted(set(KINDS.values()))},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "request_id": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""The JSON schema of an answer that is an error."""


class ApiError(Exception):
    """An answer that is an error. ``param`` names the field at fault, ``retry_after`` is in whole seconds.

    An ``is_final`` one is not to be asked for again, though its status is one that clients try again by themselves.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after
        self.is_final = is_final

    def document(self, request_id: str | None = None) -> dict[str, Any]:
        """The body of the answer."""
        error = {"message": self.message, "type": KINDS[self.status], "param": self.param, "code": self.code}
        return {"error": error if request_id is None else {**error, "request_id": request_id}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**found, "x-should-retry": "false"} if self.is_final else found  # which OpenAI's clients heed
