"""The server's settings, checked when they are said. Knows neither HTTP nor engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.params import MAX_LOGPROBS, MAX_N

QUEUE_TOKENS = 2**20
"""What a queue holds at least, where nothing else is said."""


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, whom it answers and what it bears. Times are in seconds, sizes in bytes or tokens."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Every route but health asks for one of them; none means: no key is asked for."""
    served_model_names: tuple[str, ...] = ()
    """Names under which the model is asked for: empty means the one it was loaded by, "*" any."""
    allowed_origins: tuple[str, ...] = ()
    """Browser origins that may call; others are refused."""
    allowed_hosts: tuple[str, ...] = ()
    """Host headers besides the host that is listened on and, on a loopback address, localhost; "*" allows any."""
    max_queue_requests: int = 1024
    """Continuations that may be queued or running; more are refused with 429."""
    max_queue_tokens: int | None = None
    """Tokens that all of those may need, prompts included; None: see `queue_tokens`."""
    queue_timeout: float = 120.0
    """How long a request may wait for its turn."""
    request_timeout: float = 3600.0
    """How long a request may take in all."""
    drain_timeout: float = 30.0
    """How long requests may go on after SIGTERM."""
    header_timeout: float = 30.0
    body_timeout: float = 60.0
    write_timeout: float = 30.0
    """How long a client may take none of what is sent to it."""
    max_body: int = 8 * 2**20
    max_header: int = 16 * 2**10
    max_headers: int = 64
    """Header lines."""
    max_connections: int = 10_000
    max_n: int = MAX_N
    max_prompts: int = 64
    max_logprobs: int = MAX_LOGPROBS
    tool_parser: str | None = None
    """One of parsers.TOOL_FORMATS; None leaves tool calls in the text, and requests with tools are refused."""
    reasoning_parser: str | None = None
    """One of parsers.REASONING_FORMATS; None leaves reasoning in the text."""
    chat_template_kwargs: tuple[str, ...] = ("enable_thinking", "thinking", "reasoning_effort", "documents")
    """Variables of the chat template that a request may set."""
    trust_request_chat_template: bool = False
    """Let a request bring a chat template of its own."""
    allow_special_tokens: bool = False
    """Let texts of prompts and inputs spell special tokens; those in messages are text in any case."""
    share_prefix_cache: bool = False
    """Let requests of different keys share cached KV; then timing tells one what another has asked."""
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("max_queue_requests", "max_queue_tokens", "max_body", "max_header", "max_headers"),
            *("max_prompts", "max_connections"),
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, least, most in (("max_n", 1, MAX_N), ("max_logprobs", 0, MAX_LOGPROBS)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from {least} to {most}, not {getattr(self, name)}")
        for name in (
            *("queue_timeout", "request_timeout", "drain_timeout"),
            *("header_timeout", "body_timeout", "write_timeout"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of seconds above 0, not {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be from 0 (any free one) to 65535, not {self.port}")

    def queue_tokens(self, num_seqs: int, max_model_len: int) -> int:
        """``max_queue_tokens``; left open, room for ``num_seqs`` whole contexts, whatever other keys hold."""
        if self.max_queue_tokens is not None:
            return self.max_queue_tokens
        return max(QUEUE_TOKENS, num_seqs * max_model_len * (2 if len(self.api_keys) > 1 else 1))
