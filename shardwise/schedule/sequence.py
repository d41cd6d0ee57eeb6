"""What was asked and how far it has come, in plain numbers.

Knows no policy: who runs when is the scheduler's business, and which block is whose the pool's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.params import SamplingParams
from shardwise.schedule.constraint import Constraint, Matcher
from shardwise.schedule.speculation import Drafting
from shardwise.schedule.step import GRAIN, Chunk, Logprob, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    id: int
    """Chosen by the caller; no two unfinished requests share one."""
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The seed in force: the user's, or a fresh one. ``params.seed`` is not read here."""
    salt: bytes = b""
    """Cached KV is shared only between requests of equal salt."""
    want_logits: bool = False
    """Return the raw logits of each sampled row."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """``params.bad_words`` in tokens."""
    matcher: Matcher | None = None
    """The grammar of ``params`` at its start, for this request alone."""
    pooling: str | None = None
    """"mean" or "last": what the prompt's hidden states are pooled to, with ``max_tokens`` 0; None: nothing is."""


@dataclass(eq=False)
class Sequence:
    """A request on its way. Its state is ``computed``, ``in_flight`` and ``blocks``; there are no phases."""

    request: Request
    max_len: int
    """The number of tokens, prompt included, at which it ends with "length"."""
    stops: frozenset[int]
    """Tokens that end it with "stop"."""
    constraint: Constraint | None = None
    drafting: Drafting | None = None
    """Its part in speculation, if there is any."""
    optimal: bool = False
    """Accept drafts by rejection sampling."""
    arrival: int = 0
    """Place in the order of arrival; it is kept through preemption and reset."""
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens."""
    sampling: Sampling = field(init=False)
    computed: int = 0
    """Tokens whose KV exists."""
    in_flight: int = 0
    """Tokens handed to a step whose result is due; drafts don't count."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks in order: held while running, empty while waiting."""
    committed: int = 0
    """Leading blocks that other sequences may reuse."""
    digests: list[bytes] = field(default_factory=list)
    """The pool's memory of the digest chain of ``tokens``, from its root, as far as it was needed."""
    served: int = -1
    """Number of the last step that it had a part in."""
    scored: int = 0
    """Prompt tokens after the first whose log-probabilities have come."""
    pooled: int = 0
    """Tokens whose hidden states are in ``sums``, or were not wanted."""
    sums: list[int] = field(default_factory=list)
    """Of each of the model's dimensions, in units of 1 / GRAIN: sums of whole numbers have no order."""
    drafts: list[int] = field(default_factory=list)
    """Guesses of the tokens that follow, to be verified."""
    wanted: int | None = None
    """Drafts to be collected before the next verification; None: not decided yet."""
    drafted: int = 0
    """Tokens, drafts included, whose KV of the draft model exists."""
    strikes: int = 0
    """Weight of the faults of ranks in which it was in flight, until it has come past them; see `Scheduler.reset`."""
    struck: int = 0
    """Tokens that the last of those faults kept from being computed."""
    finish_reason: str | None = None
    """None while unfinished, then "stop", "length", "abort" or "error"."""
    error: str = ""
    """A sentence to go with "error"."""
    unsatisfiable: bool = False
    """The error is the request's: nothing may follow under the constraints that it asks for."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.tokens = list(self.request.prompt)
        self.sampling = Sampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.request.seed,
            logits=self.request.want_logits,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            num_prompt=len(self.request.prompt),
            biased=[token for token, _ in params.biases],
            biases=[bias for _, bias in params.biases],
            optimal=self.optimal,
        )

    @property
    def num_left(self) -> int:
        """Tokens not yet computed nor handed to a step: 1 for one that only decodes."""
        return len(self.tokens) - self.computed - self.in_flight

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """The generated tokens, including the one that stopped it."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log-probabilities are wanted in all; those before ``scored`` have come."""
        return 0 if self.request.params.prompt_logprobs is None else len(self.request.prompt) - 1

    @property
    def reusable(self) -> int:
        """So many of its tokens need not be computed if their KV exists: what is told of them has come."""
        scored = self.scored if self.scored < self.to_score else len(self.tokens)
        return min(scored, self.pooled) if self.request.pooling == "mean" else scored

    @property
    def embedding(self) -> list[float]:
        """The pooled hidden state of its prompt, once all of it is there; else nothing."""
        if self.pooled < len(self.request.prompt):
            return []
        count = len(self.request.prompt) if self.request.pooling == "mean" else 1
        return [value / (GRAIN * count) for value in self.sums]

    def chunk(self, start: int, count: int, drafts: Items[int] = (), *, draft: bool = False) -> Chunk:
        """``count`` tokens (and drafts already made, for a ``draft`` pass) from ``start``, then ``drafts`` to verify.

        It samples if it reaches the end of the sequence and there is room for a token; then drafts that the
        constraint doesn't allow are left out.
        """
        line = self.tokens + self.drafts if draft else self.tokens
        ends = start + count == len(line) and len(self.tokens) < self.max_len
        masks: list[bytes] = []
        if ends and self.constraint is not None:
            masks = self.masks(self.drafts if draft else drafts)
            drafts = drafts[: len(masks) - 1]
            masks = masks[-1:] if draft else masks if any(masks) else []
        scored: list[int] = []
        if not draft and self.scored < self.to_score:
            scored = self.tokens[start + 1 : min(start + count, self.to_score) + 1]
        return Chunk(
            self.request.id,
            start,
            [*line[start : start + count], *drafts],
            self.blocks.copy(),
            (replace(self.sampling, logits=False, logprobs=-1) if draft else self.sampling) if ends else None,
            len(drafts),
            array("i", line[:start]).tobytes() if ends and self.sampling.penalises else b"",
            masks,
            scored,
            self.request.params.prompt_logprobs or 0,
            self._wanted(start, start + count),
        )

    def masks(self, drafts: Items[int]) -> list[bytes]:
        """Of its constraint, after its tokens and each of ``drafts``. An error ends it with its next token."""
        assert self.constraint is not None
        try:
            return self.constraint.masks(self.tokens, drafts)
        except Exception as error:  # a request's constraint may fail that request only
            self.error = f"its constraint failed: {type(error).__name__}: {error}"
            return [b""]

    def pool(self, chunk: Chunk, sums: bytes) -> None:
        """Add up a chunk's hidden states, if it pools any; none were told if they are no numbers."""
        if not chunk.pooled:
            return
        values = array("q", sums).tolist()
        if not values:
            self.error = "its hidden states are not finite numbers: the weights or the number format are broken"
            return
        self.sums = [own + new for own, new in zip(self.sums, values, strict=True)] if self.sums else values
        self.pooled = chunk.start + len(chunk.tokens)

    def extend(self, tokens: Items[int]) -> list[int]:
        """Append sampled tokens up to the one that ends the sequence; returns those appended."""
        taken: list[int] = []
        for token in tokens if not self.error else ():
            taken.append(token)
            self.tokens.append(token)
            if token in self.stops:
                self.finish_reason = "stop"
            else:
                self._advance(token)
                if self.finish_reason is None and len(self.tokens) >= self.max_len:
                    self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.error:
            self.finish_reason = "error"
        return taken

    def strike(self, weight: int) -> None:
        """Ranks failed while it was in flight."""
        self.strikes += weight
        self.struck = self.computed + self.in_flight

    def forget(self) -> None:
        """Its KV is gone: everything is to be computed again, from the tokens it has."""
        self.computed = self.in_flight = self.committed = self.drafted = 0
        self.blocks = []
        self.drafts = []
        self.wanted = None

    def _wanted(self, start: int, end: int) -> int:
        """How many of the tokens from ``start`` to ``end`` are pooled, which are always the last ones."""
        if self.request.pooling == "mean":
            return max(0, end - max(start, self.pooled))
        return int(self.request.pooling == "last" and end == len(self.request.prompt))

    def _advance(self, token: int) -> None:
        if self.constraint is None:
            return
        try:
            self.constraint.advance(token)
            ended = self.constraint.ended(self.tokens)
        except Exception as error:
            self.finish_reason, self.error = "error", f"its constraint failed: {type(error).__name__}: {error}"
            return
        if ended is not None:
            self.finish_reason, self.error = ended
            self.unsatisfiable = self.finish_reason == "error"


class News(NamedTuple):
    """What a step brought one sequence."""

    sequence: Sequence
    tokens: list[int]
    """New tokens, the one that ended it included."""
    logits: list[bytes]
    """Of each token, where asked for."""
    logprobs: list[Logprob]
    """Of each token, where asked for."""
    prompt_logprobs: list[Logprob]
    """Of the next tokens of the prompt, where asked for; the prompt's first token has none."""
