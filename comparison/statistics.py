"""What is made of measured curves: oscillation, acceleration, mean and standard error, largest stable lr.

Paper: ScaleLong, arXiv:2310.13545v1, whose words these are; it defines neither oscillation nor acceleration
by a formula, so these are ours. Pure numpy, functions of lists. Reading order: as written.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WINDOW = 11  # measurements that the trend at a moment is fitted to; a trend slower than these is none
TRAINS = 1.25  # a learning rate trains when its final loss is at most this many times the sweep's lowest


def local_quadratic(window: int) -> NDArray[np.float64]:
    """(window,) weights whose sum with `window` values is the least-squares parabola at their middle."""
    offsets = np.arange(window) - window // 2
    return np.linalg.pinv(np.vander(offsets, 3))[-1]


def oscillation(curve: list[float | None], window: int = WINDOW) -> float | None:
    """Relative standard deviation of a positive curve about its trend: the root mean square of ln(curve) less
    a parabola fitted to each moment's neighbourhood. The first and last window // 2 values have no whole one.
    Values that are not positive or not there are left out; None where too few are left."""
    values = np.log([value for value in curve if value is not None and value > 0])
    if len(values) < window + 1:
        return None
    trend = sliding_window_view(values, window) @ local_quadratic(window)
    half = window // 2
    return float(np.sqrt(np.mean((values[half : len(values) - half] - trend) ** 2)))


def steps_to_reach(steps: list[int], losses: list[float], target: float) -> float | None:
    """The step at which the loss is first down at `target`, on straight lines between measurements."""
    for k, loss in enumerate(losses):
        if loss <= target:
            if k == 0:
                return float(steps[0])
            share = (losses[k - 1] - target) / (losses[k - 1] - loss)
            return float(steps[k - 1] + share * (steps[k] - steps[k - 1]))
    return None


def acceleration(steps: list[int], losses: list[float], unscaled: list[float]) -> float | None:
    """How many times sooner than `unscaled` itself `losses` are first where it ends. Where they never get
    there it is less than 1: the share of its steps in which `unscaled` was already where `losses` end. None
    where that is at once."""
    reached = steps_to_reach(steps, losses, unscaled[-1])
    if reached is not None:
        return steps_to_reach(steps, unscaled, unscaled[-1]) / reached if reached > 0 else None
    earlier = steps_to_reach(steps, unscaled, losses[-1])
    return earlier / steps[-1] if earlier else None


def mean_and_error(values: list[float | None]) -> tuple[float, float] | None:
    """(mean, standard error of the mean), of the values that are there; one alone has the error nan."""
    known = np.array([value for value in values if value is not None], np.float64)
    if len(known) == 0:
        return None
    error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else np.nan
    return float(known.mean()), float(error)


def largest_stable(lrs: list[float], losses: list[float | None]) -> float | None:
    """The largest learning rate up to which all train: `losses` are final ones, None where a run diverged."""
    best = min((loss for loss in losses if loss is not None), default=0.0)
    stable = None
    for lr, loss in sorted(zip(lrs, losses, strict=True)):
        if loss is not None and loss <= TRAINS * best:
            stable = lr
        elif loss is None or stable is not None:  # but a rate too small to get far in so few steps is stable
            break
    return stable
