"""What is known of one probability, α: that a draft is accepted when those before it were.

Knows neither what drafts cost nor where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

TRUST = 8.0
"""So many tries is a belief worth: to a new request that of its engine, to a new engine a guess."""
KEEP, KEEP_ALL = 0.95, 0.98
"""Of what a request and the engine know, this much is left after another try."""
KEEP_IDLE = 0.995
"""And this much of what the request knows after a round without a try."""


@dataclass
class Odds:
    """Evidence of one request, or of all of an engine, the old forgotten bit by bit."""

    hits: float = 0.0
    tries: float = 0.0
    trust: float = TRUST
    """Weight of what is believed beforehand, in tries."""
    novelty: float = 1.0
    """How much others can learn from it: each request counts with its first tries, lest the engine's α be that of those
    who draft most."""

    def rate(self, believed: float) -> float:
        """α, where ``believed`` is what it was thought to be."""
        return (self.hits + self.trust * believed) / (self.tries + self.trust)

    def add(self, hits: int, tries: int, everyone: Odds) -> None:
        """Outcomes of a request; ``everyone`` is its engine."""
        kept = KEEP_ALL ** (tries * self.novelty)
        everyone.hits = everyone.hits * kept + hits * self.novelty
        everyone.tries = everyone.tries * kept + tries * self.novelty
        kept = KEEP**tries
        self.hits = self.hits * kept + hits
        self.tries = self.tries * kept + tries
        self.trust *= kept
        self.novelty *= kept

    def age(self) -> None:
        """Come nearer to what is believed again."""
        self.hits *= KEEP_IDLE
        self.tries *= KEEP_IDLE
        self.trust += (1 - KEEP_IDLE) * (TRUST - self.trust)
