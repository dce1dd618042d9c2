"""What the benchmarks share: programs that take turns, quartiles, memory, and averages the released way."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from posthoc_ema.ema import power_function_beta

TRACKED = (0.05, 0.10)  # lengths


class LoopEMA:
    """The released way to track averages: each by itself, tensor by tensor."""

    def __init__(self, net: nn.Module):
        self.params, self.t = list(net.parameters()), 0
        self.averages = {length: [p.detach().clone() for p in self.params] for length in TRACKED}

    @torch.no_grad()
    def update(self, t: float) -> None:
        for sigma_rel, average in self.averages.items():
            beta = float(power_function_beta(sigma_rel, t, t - self.t))
            for p_ema, p in zip(average, self.params, strict=True):
                p_ema.lerp_(p, 1 - beta)
        self.t = t


def measure_seconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_in_turns(steps: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> np.ndarray:
    """Seconds (steps, rounds): each round takes all steps, every other round from the last to the first."""
    seconds = np.empty((len(steps), rounds + 2))
    for k in range(rounds + 2):  # two to compile and to warm up
        for i in range(len(steps))[:: 1 - 2 * (k % 2)]:
            seconds[i, k] = measure_seconds(steps[i], device)
    return seconds[:, 2:]


def quartiles(values: np.ndarray) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def resident(key: str) -> float:
    """This process's resident memory in MB, with mapped files: `VmRSS` now, `VmHWM` at its peak (Linux)."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1.024e-3
