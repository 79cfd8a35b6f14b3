"""Compare predictions with their outcomes, for metrics only."""

from __future__ import annotations

from collections import deque
from statistics import median

from servekit.latency.calibration import Band

MIN_S = 1e-4  # errors of shorter durations are meaningless


class PredictionQuality:
    """Errors of recent predictions of one replica, and how many outcomes were in their band."""

    NUM_REMEMBERED = 256

    def __init__(self) -> None:
        self.num_first_tokens = 0  # first tokens that came after a prediction
        self.num_in_band = 0  # those of them in the band that should contain 80 %
        self._first_token_errors: deque[float] = deque(maxlen=self.NUM_REMEMBERED)
        self._end_errors: deque[float] = deque(maxlen=self.NUM_REMEMBERED)

    @property
    def first_token_error(self) -> float:
        """The median of recent relative errors of the time to the first token; 0 before there is one."""
        return median(self._first_token_errors) if self._first_token_errors else 0.0

    @property
    def end_error(self) -> float:
        """The median of recent relative errors of the time to the last token; 0 before there is one."""
        return median(self._end_errors) if self._end_errors else 0.0

    def first_token(self, band: Band, measured_s: float) -> None:
        """Note when a first token came."""
        self.num_first_tokens += 1
        self.num_in_band += band.low_s <= measured_s <= band.high_s
        self._first_token_errors.append(_relative_error(band.median_s, measured_s))

    def end(self, predicted_s: float, measured_s: float) -> None:
        """Note when a last token came."""
        self._end_errors.append(_relative_error(predicted_s, measured_s))


def _relative_error(predicted_s: float, measured_s: float) -> float:
    return abs(predicted_s / max(measured_s, MIN_S) - 1.0)
