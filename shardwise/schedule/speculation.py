"""How many drafts to verify at once: what is accepted, what steps cost, and what follows from the two.

Knows neither models nor steps: it is told outcomes and durations, and has no clock and no chance of its own.

α is the probability that a draft is accepted when those before it were; k drafts then yield 1 + α + … + α^k tokens.
(SmartSpec: Liu et al. 2024, arXiv 2406.14066. The expectation: Leviathan et al. 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shardwise.config import MAX_DRAFTS, Speculation
from shardwise.schedule.cost import Cost
from shardwise.schedule.ngram import Lookup, continuation

MARGIN = 1.02
"""Speculation must promise so many times the speed of plain decoding."""
FIRST_DRAFTS = 3
"""Drafts of a round before any step was timed."""
GUESSED = (0.6,)
GUESSED_NGRAM = (0.2, 0.4, 0.6, 0.8, 0.95, 0.98)
"""α before anything is known; of "ngram" for matches of at least 1, 2, 4, 8, 16 and 32 tokens (edits, code, prose)."""
TRUST = 4.0
"""So many tries is the experience of the whole engine worth to a new request, and a guess to a new engine."""
KEEP, KEEP_ALL = 0.95, 0.98
"""Of what a request and the engine know, this much is left after another try."""
FIRST_WAIT, LAST_WAIT = 32.0, 4096.0
"""A probe may cost one part in so many of the time spent without drafts since the last one; doubles each time."""
AGAIN_WAIT = 8.0
HOPE = 0.0
SETTLED = 8
AGE=.995
EVERY=64
INITIAL=4
"""Rounds with drafts in a row after which speculation is known to pay again."""


@dataclass
class Tally:
    """How drafts fared. Rounds without drafts do not count."""

    rounds: list[int] = field(default_factory=list)
    """``rounds[a]``: rounds in which exactly a drafts were accepted."""
    proposed: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        """Count a round."""
        assert 0 <= accepted <= proposed, (accepted, proposed)
        if proposed:
            self.rounds += [0] * (accepted + 1 - len(self.rounds))
            self.rounds[accepted] += 1
            self.proposed += proposed
            self.accepted += accepted

    def __add__(self, other: Tally) -> Tally:
        rounds = [a + b for a, b in zip_longest(self.rounds, other.rounds, fillvalue=0)]
        return Tally(rounds, self.proposed + other.proposed, self.accepted + other.accepted)

    @property
    def rate(self) -> float:
        """Accepted drafts per proposed one; 0 without any."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "rounds": list(self.rounds),
            "proposed": self.proposed,
            "accepted": self.accepted,
            "rate": self.rate,
        }


@dataclass
class _Odds:
    """Evidence of one α, the old forgotten bit by bit."""

    hits: float = 0.0
    tries: float = 0.0
    trust: float = TRUST
    """Weight of what is believed beforehand, in tries."""

    def add(self, hits: int, tries: int, keep: float) -> None:
        old = keep**tries
        self.hits = self.hits * old + hits
        self.tries = self.tries * old + tries
        self.trust *= old

    def rate(self, believed: float) -> float:
        return (self.hits + self.trust * believed) / (self.tries + self.trust)


class Drafting:
    """What is known of one request's drafts. Its owner keeps it; only the Speculator changes it."""

    def __init__(self, config: Speculation) -> None:
        ngram = config.kind == "ngram"
        self.tally = Tally()
        self.lookup = Lookup(config.min_match, config.max_match) if ngram else None
        self.odds = [_Odds() for _ in (GUESSED_NGRAM if ngram else GUESSED)]
        self.kind = 0
        """Index of the odds that the drafts on their way belong to: that of the length of their match."""
        self.num_sequences = 1
        """It decodes beside so many others, itself included."""
        self.num_settled = 0
        """Rounds with drafts since these last did not pay."""
        self.shadow: tuple[int, int, int] | None = None
        """A guess that was not proposed: where it would stand, the token, and the kind of its odds."""


class Speculator:
    """One engine's choice of the number of drafts, and of the drafts themselves if they come from a look-up.

    With a fixed ``k`` each round has as many drafts as there is room for. Else it is the k with the most tokens per
    second, where α is a request's own, believed to be the engine's until it is known, and a round of n sequences costs
    k draft steps of n rows and a step of n · (1 + k). "ngram" keeps an α for each length of match, and no draft steps.

    Without drafts nothing is learnt of α. So now and then a request may try one draft again ("ngram" sees for nothing
    whether its guesses would have been right). A probe has to wait until its cost is a 32nd of the time spent
    without drafts since the last one, of whichever request; then a 64th, and so on, until speculation pays again.

    Deterministic: choices depend on the calls made so far and nothing else.
    """

    def __init__(self, config: Speculation) -> None:
        self.config = config
        self.on_ranks = config.kind != "ngram"
        """Do drafts come from passes on the ranks, or from ``propose``?"""
        self.shares_kv = config.kind == "self"
        """Do these passes write to the model's own KV cache?"""
        self.tally = Tally()
        """Of all requests."""
        self._ngram = config.kind == "ngram"
        self._guessed = GUESSED_NGRAM if self._ngram else GUESSED
        self._odds = [_Odds() for _ in self._guessed]
        self._target = Cost()
        self._draft = Cost()
        if self._ngram:
            self._draft.expected = 0.0, 0.0
        self._takers = [1.0] * (MAX_DRAFTS + 1)
        """The part of the sequences that want at least so many drafts, if everybody shares the cost of draft steps."""
        self._idle = 0.0  # seconds without drafts since the last probe
        self._wait = FIRST_WAIT
        self._experiments = 0
        self._experiment = False

    def begin(self) -> Drafting:
        """The state of a new request."""
        return Drafting(self.config)

    def length(self, drafting: Drafting, num_sequences: int, most: int) -> int:
        """Drafts wanted for the next round, 0 to ``most``, of a sequence that decodes with ``num_sequences`` in all.

        For "ngram" it is the most that ``propose`` may yield: that decides when it sees the match.
        """
        assert num_sequences >= 1, num_sequences
        most = max(0, min(most, MAX_DRAFTS))
        drafting.num_sequences = num_sequences
        if self.config.k is not None:
            return min(self.config.k, most)
        return most if self._ngram else self._choose(drafting, 0, most)

    def propose(self, drafting: Drafting, tokens: list[int], count: int) -> list[int]:
        """At most ``count`` drafts of what follows ``tokens``, the request's whole text; "ngram" only.

        To be asked in each round, with ``count`` 0 too, to learn what guesses would have been worth.
        """
        lookup = drafting.lookup
        assert lookup is not None, "only ngram looks drafts up"
        if drafting.shadow is not None:
            index, guess, kind = drafting.shadow
            drafting.shadow = None
            if index < len(tokens):
                self._learn(drafting, kind, int(tokens[index] == guess), 1)
        match = lookup.find(tokens)
        if match is None:
            return []
        kind = match.length.bit_length() - 1
        if self.config.k is None:
            count = self._choose(drafting, kind, count)
        if count <= 0:
            drafting.shadow = len(tokens), tokens[-match.distance], kind
            return []
        drafting.kind = kind
        return continuation(tokens, match.distance, count)

    def record(self, drafting: Drafting, proposed: int, accepted: int) -> None:
        """The outcome of a round: of ``proposed`` drafts the first ``accepted`` were taken."""
        drafting.tally.add(proposed, accepted)
        self.tally.add(proposed, accepted)
        if proposed:
            self._learn(drafting, drafting.kind, accepted, accepted + (accepted < proposed))
            drafting.num_settled += 1
            if drafting.num_settled == SETTLED:
                self._wait = AGAIN_WAIT

    def observe(self, draft: bool, num_sequences: int, rows: int, seconds: float) -> None:
        """A step took so many ``seconds``: a draft step, or one of the model with decoding sequences only."""
        assert 1 <= num_sequences <= rows, (num_sequences, rows)
        if seconds > 0 and not (draft and self._ngram):
            (self._draft if draft else self._target).observe(rows, seconds)
            if not draft:
                self._experiments += self._experiment
                self._experiment = False

    def _learn(self, drafting: Drafting, kind: int, hits: int, tries: int) -> None:
        drafting.odds[kind].add(hits, tries, KEEP)
        self._odds[kind].add(hits, tries, KEEP_ALL)
        self._odds[kind].trust = TRUST  # a guess may always be wrong, but keeps an engine from concluding from one try

    def _choose(self, drafting: Drafting, kind: int, most: int) -> int:
        """The best number of drafts, 0 to ``most``, for odds of this kind."""
        target, draft, num_sequences = self._target, self._draft, drafting.num_sequences
        if most <= 0:
            return 0
        if not self._ngram and not (draft.num_observed and target.num_observed):
            return min(FIRST_DRAFTS, most)
        rate = drafting.odds[kind].rate(self._odds[kind].rate(self._guessed[kind]))
        sharing = [float(num_sequences)] * most
        if self._experiments * EVERY <= INITIAL * EVERY + target.num_observed and target.num_observed:
            low = self._best(rate, num_sequences, sharing, target.low)
            high = self._best(rate, num_sequences, sharing, target.high)
            if low > 2 * high:
                self._experiment = True
                low = min(low, max(FIRST_DRAFTS, 2 * high))
                return low if 2*target.last_rows < num_sequences * (2 + low+high) else high
        count = self._best(rate, num_sequences, sharing, target.expected)
        if draft.expected[0] and num_sequences > 1:
            # Those who draft more than the others pay the whole of their last draft steps.
            weight = 0.5 / num_sequences
            for place in range(most):
                self._takers[place] += weight * ((place < count) - self._takers[place])
                sharing[place] = max(1.0, self._takers[place] * num_sequences)
            count = min(count, self._best(rate, num_sequences, sharing, target.expected))
        return count or self._probe(drafting, kind, rate, sharing[0])

    def _best(self, rate: float, num_sequences: int, sharing: list[float], cost) -> int:
        """The number of drafts with the most tokens per second; 0 if none beats plain decoding clearly.

        ``sharing[j]`` sequences share the cost of draft step j.
        """
        fixed, row = cost
        dfixed, drow = self._draft.expected
        tokens = reached = 1.0
        seconds = fixed / num_sequences + row
        plain = best = 1 / seconds
        count = 0
        for place, sharers in enumerate(sharing):
            reached *= rate
            tokens += reached
            seconds += row + drow + dfixed / sharers
            if tokens / seconds <= best:
                break  # for good: each further draft yields less and costs no less
            best, count = tokens / seconds, place + 1
        return count if best > MARGIN * plain else 0

    def _probe(self, drafting: Drafting, kind: int, rate: float, sharers: float) -> int:
        """1 if it is time for a probe, else 0."""
        fixed, row = self._target.expected
        dfixed, drow = self._draft.expected
        plain = fixed / drafting.num_sequences + row
        extra = row + drow + dfixed / sharers
        drafting.num_settled = 0
        o = drafting.odds[kind]
        o.hits *= AGE
        o.tries *= AGE
        o.trust += (1 - AGE) * (TRUST - o.trust)
        self._idle += plain
        if self._idle < self._wait * extra:
            return 0
        self._idle = 0.0
        self._wait = min(2 * self._wait, LAST_WAIT)
        if not self._ngram:
            # What was known is old. Seen afresh it just pays: one failure ends it, one success calls for another try.
            fresh = min(0.95, max(rate, MARGIN * (1 + extra / plain) - 1))
            drafting.odds[kind] = _Odds(hits=2 * fresh, tries=2.0, trust=0.0)
        return 1
