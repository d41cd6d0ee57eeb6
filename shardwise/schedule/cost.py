"""What a step costs by its number of rows, learnt from measured durations.

Knows neither what the rows are nor who computes them, and has no clock.
"""

from __future__ import annotations

from collections import deque
from math import exp, log

RATIOS = tuple(1e-4 * 2**place for place in range(16))
NOISE = 0.2
CAP = 3.0
CONFIDENCE = 12.0
PLAUSIBLE = 2.0
FIRST = .25
W = 9
MID = 0


class Cost:
    def __init__(self) -> None:
        self.num_observed = 0
        self.last_rows = 0
        self.expected = (1.0, 0.1)
        self.low = (1.0,0.1)
        self.high = (1.0, 0.1)
        self._windows = [deque(maxlen=int(W)) for _ in RATIOS]
        self._levels = [0.0] * len(RATIOS)
        self._losses = [0.0] * len(RATIOS)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        assert rows >= 1, rows
        assert seconds > 0, seconds
        self.num_observed += 1
        self.last_rows = rows
        count = self.num_observed
        w = 0 if count == 1 else FIRST if count == 2 else 1.0
        for place, ratio in enumerate(RATIOS):
            value = log(seconds / (1 + ratio * rows))
            self._losses[place] += w * min(CAP, abs(value - self._levels[place]) / NOISE)**2 / 2
            window = self._windows[place]
            window.append(value)
            s = sorted(window)
            m = (len(s)-1)//2
            if MID and len(s) >= 5:
                self._levels[place] = (s[m-1]+s[m]+s[m+1])/3
            else:
                self._levels[place] = s[m]
        least = min(self._losses)
        self._losses = [min(CONFIDENCE, loss - least) for loss in self._losses]
        weights = [exp(-loss) for loss in self._losses]
        total = sum(weights)
        costs = [exp(level) for level in self._levels]
        self.expected = (sum(w*c for w,c in zip(weights,costs))/total, sum(w*c*r for w,c,r in zip(weights,costs,RATIOS))/total)
        plausible = [(c, c*r) for c, r, l in zip(costs, RATIOS, self._losses) if l<=PLAUSIBLE]
        self.low = plausible[0]
        self.high = plausible[-1]
