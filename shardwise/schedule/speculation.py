"""How many drafts to verify at once: what is accepted, what steps cost, and what follows from the two.

Knows neither models nor steps: it is told outcomes and durations, and has no clock and no chance of its own.

α is the probability that a draft is accepted when those before it were; k drafts then yield 1 + α + … + α^k tokens.
(SmartSpec: Liu et al. 2024, arXiv 2406.14066. The expectation: Leviathan et al. 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shardwise.features import MAX_DRAFTS, Speculation
from shardwise.schedule.cost import Cost, Line
from shardwise.schedule.ngram import Lookup, continuation
from shardwise.schedule.odds import Odds

MARGIN = 1.02
"""Speculation must promise so many times the speed of plain decoding."""
FIRST_DRAFTS = 3
"""Drafts of a round before any step was timed."""
GUESSED = (0.6,)
GUESSED_NGRAM = (0.2, 0.4, 0.6, 0.8, 0.95, 0.98)
"""α before anything is known; for "ngram" with matches of at least 1, 2, 4, 8, 16 and 32 tokens (measured on text)."""
FIRST_WAIT, LAST_WAIT = 32.0, 4096.0
"""A probe may cost one part in so many of the time spent without drafts before it: at first, and at last."""
SETTLED = 16
"""Rounds with drafts in a row after which speculation is said to pay."""
PLAIN = 128
"""Steps after which a round goes without drafts to see what that costs; at first much sooner."""
EXPERIMENTS, EVERY = 4, 64
"""Rounds that may be spent on learning what rows cost: so many, and one more after so many steps."""


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

    def document(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "rounds": list(self.rounds),
            "proposed": self.proposed,
            "accepted": self.accepted,
            "rate": self.rate,
        }


class Drafting:
    """What is known of one request's drafts. Its owner keeps it; only the Speculator changes it."""

    def __init__(self, config: Speculation) -> None:
        ngram = config.kind == "ngram"
        self.tally = Tally()
        self.lookup = Lookup(config.min_match, config.max_match) if ngram else None
        self.odds = [Odds() for _ in (GUESSED_NGRAM if ngram else GUESSED)]
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

    Without drafts nothing is learnt of α. So now and then a request may try one draft again, a *probe* ("ngram" also
    sees for nothing whether its guesses would have been right). A probe has to wait until it costs a 32nd of the time
    spent without drafts since the last one, of whichever request; then a 64th, and so on, until speculation pays again.
    And while it is open what rows cost and the choice hangs on it, a few rounds are *experiments*.

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
        self._guessed = GUESSED if self.on_ranks else GUESSED_NGRAM
        self._odds = [Odds() for _ in self._guessed]
        self._target = Cost()
        self._draft = Cost() if self.on_ranks else None
        self._deepest = FIRST_DRAFTS  # drafts that were tried at once
        self._surplus = [0.0] * MAX_DRAFTS
        """Seconds that a sequence gains by a draft step if others bear its fixed cost: the mean of those asked last."""
        self._num_asked = 0
        self._idle = 0.0  # seconds without drafts since the last probe
        self._wait = FIRST_WAIT
        self._since_plain = 0  # steps with drafts since the last one without
        self._num_experiments = 0
        self._experimenting = False

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
        return self._choose(drafting, 0, most) if self.on_ranks else most

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
                drafting.odds[kind].add(int(tokens[index] == guess), 1, self._odds[kind])
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
            tries = accepted + (accepted < proposed)
            drafting.odds[drafting.kind].add(accepted, tries, self._odds[drafting.kind])
            self._deepest = max(self._deepest, proposed)
            drafting.num_settled += 1
            if drafting.num_settled == SETTLED:
                self._wait = FIRST_WAIT

    def observe(self, draft: bool, num_sequences: int, rows: int, seconds: float) -> None:
        """A step took so many ``seconds``: a draft step, or one of the model with decoding sequences only."""
        assert 1 <= num_sequences <= rows, (num_sequences, rows)
        if seconds < 1e-9:
            return  # the clock was too coarse
        if draft:
            assert self._draft is not None, "ngram takes no draft steps"
            self._draft.observe(rows, seconds)
        else:
            self._target.observe(rows, seconds)
            self._since_plain = self._since_plain + 1 if rows > num_sequences else 0
            self._num_experiments += self._experimenting
            self._experimenting = False

    def _choose(self, drafting: Drafting, kind: int, most: int) -> int:
        """The best number of drafts, 0 to ``most``, for odds of this kind."""
        target, draft, num_sequences = self._target, self._draft, drafting.num_sequences
        if most <= 0:
            return 0
        if draft and not (draft.num_observed and target.num_observed):
            return min(FIRST_DRAFTS, most)
        if 4 * self._since_plain >= min(3 * target.num_observed, 4 * PLAIN) > 0:
            return 0  # what there is to gain is measured by this
        most = min(most, 2 * self._deepest)  # no leaps into what may cost more than we think
        rate = drafting.odds[kind].rate(self._odds[kind].rate(self._guessed[kind]))
        prices = [draft.expected.fixed / num_sequences if draft else 0.0] * most
        if self._num_experiments < EXPERIMENTS + target.num_observed // EVERY:
            many, few = (self._best(rate, num_sequences, prices, line)[0] for line in target.plausible)
            if many > 2 * few:
                self._experimenting = True
                many = min(many, max(FIRST_DRAFTS, 2 * few))
                # By turns, since only the difference tells.
                return many if 2 * target.last_rows < num_sequences * (2 + many + few) else few
        if draft and num_sequences > 1:
            prices = self._prices(rate, num_sequences, most, draft.expected.fixed)
        count, _ = self._best(rate, num_sequences, prices, target.expected)
        return count or self._probe(drafting, kind, rate, prices[0])

    def _prices(self, rate: float, num_sequences: int, most: int, fixed: float) -> list[float]:
        """Of each draft step's ``fixed`` cost, the part that this sequence bears: as its gain is to everybody's.

        So the step is made if all gains together exceed it, and a sequence that drafts does not hold up the others for
        less than that.
        """
        _, gains = self._best(rate, num_sequences, [0.0] * most, self._target.expected)
        self._num_asked += 1
        weight = max(0.5 / num_sequences, 1 / self._num_asked)
        prices = [fixed] * most
        for place, gain in enumerate(gains):
            self._surplus[place] += weight * (gain - self._surplus[place])
            together = num_sequences * self._surplus[place]
            if together > gain > 0:
                prices[place] *= gain / together
        return prices

    def _best(self, rate: float, num_sequences: int, prices: list[float], target: Line) -> tuple[int, list[float]]:
        """The number of drafts with the most tokens per second, 0 if none beats plain decoding clearly; and the seconds
        that each draft gains.

        ``prices[j]`` is the sequence's part of the fixed cost of draft step j.
        """
        row = target.row + (self._draft.expected.row if self._draft else 0.0)
        tokens = reached = 1.0
        seconds = target.fixed / num_sequences + target.row  # a sequence's share of the round
        plain = best = tokens / seconds
        count = 0
        gains = [0.0] * len(prices)
        for place, price in enumerate(prices):
            reached *= rate
            gains[place] = reached * seconds / tokens - row - price
            if gains[place] <= 0:
                gains[place] = 0.0
                break  # for good: each further draft yields less and costs no less
            tokens += reached
            seconds += row + price
            best, count = tokens / seconds, place + 1
        return (count if best > MARGIN * plain else 0), gains

    def _probe(self, drafting: Drafting, kind: int, rate: float, price: float) -> int:
        """1 if it is time for a probe, else 0: the round is a plain one."""
        target, odds = self._target.expected, drafting.odds[kind]
        plain = target.fixed / drafting.num_sequences + target.row
        extra = target.row + price + (self._draft.expected.row if self._draft else 0.0)
        drafting.num_settled = 0
        self._idle += plain
        if self._idle < self._wait * extra:
            if self.on_ranks:
                odds.age()
            return 0
        self._idle = 0.0
        self._wait = min(2 * self._wait, LAST_WAIT)
        if self.on_ranks:
            # What was known is old, and counts no more than the next try.
            drafting.odds[kind] = Odds(hits=rate, tries=1.0, trust=0.0)
        return 1
