"""What a step costs by its number of rows, learnt from measured durations.

Knows neither what the rows are nor who computes them, and has no clock.
"""

from __future__ import annotations

from math import exp, log

RATIOS = tuple(1e-4 * 2**place for place in range(16))
NOISE = 0.15
GAIN = 0.1
CAP = 3.0
CONFIDENCE = 12.0
PLAUSIBLE = 2.0


class Cost:
    def __init__(self) -> None:
        self.num_observed = 0
        self.last_rows = 0
        self.expected = (1.0, 0.1)
        self.low = (1.0,0.1)
        self.high = (1.0, 0.1)
        self._levels = [0.0] * len(RATIOS)
        self._losses = [0.0] * len(RATIOS)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        assert rows >= 1, rows
        assert seconds > 0, seconds
        self.num_observed += 1
        self.last_rows = rows
        count = self.num_observed
        gain = max(GAIN, 1 / max(1, count - 1))
        clip = CAP * NOISE if count > 4 else 10.
        w = 0 if count == 1 else FIRST if count == 2 else 1.0
        for place, ratio in enumerate(RATIOS):
            error = log(seconds / (1 + ratio * rows)) - self._levels[place]
            self._losses[place] += w * min(CAP, abs(error) / NOISE)**2 / 2
            self._levels[place] += gain * max(-clip, min(clip, error))
        least = min(self._losses)
        self._losses = [min(CONFIDENCE, loss - least) for loss in self._losses]
        weights = [exp(-loss) for loss in self._losses]
        total = sum(weights)
        costs = [exp(level) for level in self._levels]
        self.expected = (sum(w*c for w,c in zip(weights,costs))/total, sum(w*c*r for w,c,r in zip(weights,costs,RATIOS))/total)
        plausible = [(c, c*r) for c, r, l in zip(costs, RATIOS, self._losses) if l<=PLAUSIBLE]
        self.low = plausible[0]
        self.high = plausible[-1]
FIRST = .25
