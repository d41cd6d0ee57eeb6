"""What a request must satisfy to be accepted, and the sequence that it then becomes.

Knows a model's limits in numbers; nothing of who else is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import BLOCK
from shardwise.schedule.constraint import Constraint
from shardwise.schedule.sequence import Request, Sequence


@dataclass(frozen=True)
class Gate:
    """Limits of one replica: context and vocabulary in tokens, KV blocks; ``eos`` ends what does not ignore it."""

    max_model_len: int
    num_blocks: int
    vocab_size: int
    eos: frozenset[int]
    optimal: bool
    """Sequences that sample accept drafts by rejection sampling; at temperature 0 it is the same as equality."""

    def admit(self, request: Request) -> Sequence:
        """The sequence of a request. ValueError with the remedy if it can never run."""
        self._check_ids(request)
        self._check_room(request)
        params = request.params
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        constraint = self._constraint(request, stops)
        return Sequence(
            request, self._max_len(request), stops, constraint, optimal=self.optimal and params.temperature > 0
        )

    def _check_ids(self, request: Request) -> None:
        params = request.params
        named = {
            "the prompt": request.prompt,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": [token for token, _ in params.biases],
        }
        for name, tokens in named.items():
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise ValueError(f"{name}: token id {wrong} is outside the vocabulary: 0 to {self.vocab_size - 1}")

    def _check_room(self, request: Request) -> None:
        prompt, params, room = request.prompt, request.params, self.max_model_len
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        least = min(1, params.max_tokens)
        if len(prompt) + least > room:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {room}: "
                f"shorten it to at most {room - least} tokens, or raise max_model_len if the model allows it"
            )
        if len(prompt) + params.min_tokens > room:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves room for {room - len(prompt)} in a context of {room}, fewer "
                f"than min_tokens {params.min_tokens}: lower min_tokens, shorten the prompt, or raise max_model_len if "
                "the model allows it"
            )
        fed = max(self._max_len(request) - 1, len(prompt))  # the last generated token is never fed back
        needed = -(-fed // BLOCK)
        if needed > self.num_blocks:
            most = self.num_blocks * BLOCK
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with max_tokens {params.max_tokens} needs {needed} KV blocks of "
                f"{BLOCK} tokens, and there are {self.num_blocks}: lower max_tokens or shorten the prompt to "
                f"{most + 1} tokens together, or raise kv_tokens to at least {needed * BLOCK}"
            )

    def _max_len(self, request: Request) -> int:
        return min(len(request.prompt) + request.params.max_tokens, self.max_model_len)

    def _constraint(self, request: Request, stops: frozenset[int]) -> Constraint | None:
        params = request.params
        if params.allowed_token_ids is None and not (request.bad_words or request.matcher or params.min_tokens):
            return None
        least = len(request.prompt) + params.min_tokens
        constraint = Constraint(
            self.vocab_size, stops, least, params.allowed_token_ids, request.bad_words, request.matcher
        )
        if params.max_tokens and constraint.ended(request.prompt):
            raise ValueError(
                "no token may follow the prompt: allowed_token_ids, bad_words, min_tokens and the grammar contradict "
                "each other; loosen one of them"
            )
        return constraint
