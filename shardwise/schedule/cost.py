"""What a step costs by its number of rows, learnt from measured durations.

Knows neither what the rows are nor who computes them, and has no clock.
"""

from __future__ import annotations

from collections import deque
from math import exp, log, log1p
from typing import NamedTuple

RATIOS = tuple(0.0004 * 2**place for place in range(15))
"""What ``row`` ÷ ``fixed`` may be: least on large GPUs, some 0.2 on two cores, 1 and more where arithmetic is all."""
RECENT = 9
"""Steps of which the median tells the present level of costs."""
NOISE = 0.2
"""Standard deviation of a duration's logarithm."""
SURPRISE = 3.0
"""A step counts for at most so many standard deviations: a neighbour that takes the machine proves nothing."""
CONFIDENCE = 12.0
"""The most that can speak against a ratio, as the logarithm of odds, so that a few new steps can refute the rest."""
PLAUSIBLE = 2.0
"""Ratios that no more than this speaks against are kept in mind."""


class Line(NamedTuple):
    """The seconds of a step are ``fixed + row * rows``."""

    fixed: float
    row: float


class Cost:
    """The line that is ``expected``, and the ``plausible`` ones of lowest and of highest ``row`` ÷ ``fixed``.

    Each ratio in RATIOS is a hypothesis. It has a level, the median of what the last steps say of ``fixed`` if it is
    true, and the evidence against it: how far each new step was from what it foretold. So a change of all costs (longer
    contexts, a busy machine) is followed within a few steps; the ratio is learnt from steps of different sizes only,
    and not forgotten meanwhile; single slow steps move neither. ``expected`` is the mean by the odds.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self.last_rows = 0
        self._recent: deque[tuple[int, list[float]]] = deque(maxlen=RECENT)  # rows, log ``fixed`` by each ratio
        self._against = [0.0] * len(RATIOS)
        self._expected = Line(1.0, 0.1)
        self._plausible = self._expected, self._expected
        self._stale = False

    @property
    def expected(self) -> Line:
        """Of unit ``fixed`` before a step was seen."""
        self._refresh()
        return self._expected

    @property
    def plausible(self) -> tuple[Line, Line]:
        """That of lowest and that of highest ``row`` ÷ ``fixed``."""
        self._refresh()
        return self._plausible

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        assert rows >= 1, rows
        assert seconds > 0, seconds
        news = [log(seconds) - log1p(ratio * rows) for ratio in RATIOS]
        if any(other != rows for other, _ in self._recent):  # else all ratios are surprised alike
            # The first step warms caches up, so that it proves little.
            weight = 0.125 if self.num_observed == 1 else 0.5
            for place, (new, level) in enumerate(zip(news, self._levels(), strict=True)):
                self._against[place] += weight * min(SURPRISE, abs(new - level) / NOISE) ** 2
            least = min(self._against)
            self._against = [min(CONFIDENCE, against - least) for against in self._against]
        self._recent.append((rows, news))
        self.num_observed += 1
        self.last_rows = rows
        self._stale = True

    def _levels(self) -> list[float]:
        middle = (len(self._recent) - 1) // 2
        return [sorted(column)[middle] for column in zip(*(news for _, news in self._recent), strict=True)]

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        lines = [Line(exp(level), exp(level) * ratio) for level, ratio in zip(self._levels(), RATIOS, strict=True)]
        odds = [exp(-against) for against in self._against]
        whole = sum(odds)
        fixed = sum(share * line.fixed for share, line in zip(odds, lines, strict=True)) / whole
        row = sum(share * line.row for share, line in zip(odds, lines, strict=True)) / whole
        self._expected = Line(fixed, row)
        likely = [line for line, against in zip(lines, self._against, strict=True) if against <= PLAUSIBLE]
        self._plausible = likely[0], likely[-1]
