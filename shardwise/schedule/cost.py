"""What a step costs by its number of rows, learnt from measured durations.

Knows neither what the rows are nor who computes them, and has no clock.
"""

from __future__ import annotations

NOISE = 0.1
"""Standard deviation of a duration, as a part of it."""
DRIFT = 0.02
"""How far costs as a whole wander from step to step, as a part of them."""
RATIO_DRIFT = 0.003
"""How far ``fixed`` and ``row`` wander apart meanwhile."""
RATIO = 0.1
"""row ÷ fixed before it is known, and the standard deviation of that; CPUs come near it, GPUs are below."""
HOPE = 1.0
LEVEL = 1.0

class Cost:
    """Seconds of a step as ``fixed + row * rows``, in units of the first before anything is ``known``.

    Least squares with forgetting, in the form of a Kalman filter: the two numbers drift together (contexts grow, the
    machine gets busy) and their ratio hardly does. So many steps of one size don't wear out what is known of other
    sizes, and while there is only one size the ratio is the assumed one. A surprise counts for at most 2.5 standard
    deviations, and slow steps for less, as they tend to be someone else's fault.
    """

    def __init__(self) -> None:
        self.known = False
        self.fixed = 1.0
        self.row = RATIO
        self._covariance = (0.0, 0.0, 0.0)

    def hopeful(self, rows: int) -> float:
        """What it costs at best: less by a standard deviation of what is known, so that it pays to find out."""
        ff, fr, rr = self._covariance
        expected = self.fixed + self.row * rows
        return max(0.25 * expected, expected - HOPE * (max(0.0, ff + rows * (2 * fr + rows * rr))) ** 0.5)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step that took ``seconds``, more than 0."""
        assert rows >= 1, rows
        assert seconds > 0, seconds
        if not self.known:
            self.known = True
            self.fixed = seconds / (1 + RATIO * rows)
            self.row = RATIO * self.fixed
            self._covariance = LEVEL*self.fixed**2, LEVEL*self.fixed * self.row, (LEVEL+1) * self.row**2
            return
        expected = self.fixed + self.row * rows
        apart = RATIO_DRIFT * expected / (1 + RATIO * rows)
        ff, fr, rr = self._covariance
        ff += (DRIFT * self.fixed) ** 2 + apart**2
        fr += DRIFT**2 * self.fixed * self.row
        rr += (DRIFT * self.row) ** 2 + (RATIO * apart) ** 2
        gain_fixed, gain_row = ff + rows * fr, fr + rows * rr
        variance = gain_fixed + rows * gain_row + (NOISE * max(expected, seconds)) ** 2
        most = 2.5 * variance**0.5
        surprise = max(-most, min(most, seconds - expected)) / variance
        self.fixed += gain_fixed * surprise
        self.row += gain_row * surprise
        self._covariance = (
            ff - gain_fixed**2 / variance,
            fr - gain_fixed * gain_row / variance,
            rr - gain_row**2 / variance,
        )
        # Neither is negative. What was learnt of this size of step, which is above 0, stays.
        expected = self.fixed + self.row * rows
        if self.row < 0:
            self.fixed, self.row = expected, 0.0
        elif self.fixed < 0:
            self.fixed, self.row = 0.0, expected / rows
