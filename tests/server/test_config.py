"""The server's settings: what is refused when it is said."""

from __future__ import annotations

import math

import pytest

from shardwise.params import MAX_LOGPROBS, MAX_N
from shardwise.server.config import QUEUE_TOKENS, ServerConfig

TIMES = ["queue_timeout", "request_timeout", "drain_timeout", "header_timeout", "body_timeout", "write_timeout"]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_times_are_finite(name: str, value: float) -> None:
    """Guards against a time that no clock can wait for, told by a traceback once the port is taken."""
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds"):
        ServerConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "least", "most"), [("max_logprobs", 0, MAX_LOGPROBS), ("max_n", 1, MAX_N)], ids=lambda each: str(each)
)
def test_limits_within_what_a_request_may_ask(name: str, least: int, most: int) -> None:
    """Guards against a limit that lets nothing through, or promises what a request is refused for all the same."""
    for value in (least, most):
        assert getattr(ServerConfig(**{name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} must be from {least} to {most}"):
            ServerConfig(**{name: value})


def test_tokens_of_the_queue() -> None:
    """Guards the bound that holds where none is said: enough for all that can run, also beside other keys."""
    assert ServerConfig().queue_tokens(4, 1000) == QUEUE_TOKENS
    assert ServerConfig().queue_tokens(256, 131_072) == 256 * 131_072
    assert ServerConfig(api_keys=("a", "b")).queue_tokens(256, 131_072) == 2 * 256 * 131_072
    assert ServerConfig(max_queue_tokens=5).queue_tokens(256, 131_072) == 5
