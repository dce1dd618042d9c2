"""How fast are the EMA tracker and the reconstruction, and how much memory does the latter take?

Each is set beside what the released code of EDM2 (arXiv:2312.02696v2) does, in the same run and in turn, on
the CPU: per-tensor `lerp_`; and unpickling each float16 snapshot, widening it and adding it to each output
tensor by tensor. Ratios above 1 are in favour of this repository; medians, with quartiles.

Beside an update stands how many times as fast it would be if all weights were one tensor, and in a single
pass over memory for both averages, which reads the weights once and so moves 5 arrays in place of 6.
Parameters are apart in memory, though, and take a call each: the last number is what `add_` in the place of
our `lerp_`, reading and writing as much, would give.

    python benchmarks/ema.py
"""

import pickle
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edm2_mp_unet.model import Denoiser, EDM2Config
from minimal_uvit.model import PRESETS, UViT
from posthoc_ema.ema import PowerFunctionEMA, power_function_beta
from posthoc_ema.plan import make_plan
from posthoc_ema.reconstruct import weighted_sums
from posthoc_ema.snapshots import save_snapshot, snapshot_path
from shared.run import cli

TRACKED, LENGTHS = (0.05, 0.10), ([0.15], np.linspace(0.03, 0.24, 8).tolist())
TENSORS = 160  # in a snapshot
SMALL = EDM2Config(32, 3, 0, 64, (1, 2, 2), num_blocks=3, attn_resolutions=(16, 8), channels_per_head=64)


@dataclass(frozen=True)
class Options:
    weights: int = 20_000_000  # weights in a snapshot
    snapshots: int = 64  # number of snapshots, two at each time
    rounds: int = 9  # times that the two ways to reconstruct take turns; the update takes ten times as many


def quartiles(ratios: np.ndarray) -> str:
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f}..{high:.2f}) times as fast"


# The tracker ------------------------------------------------------------------------------------------------


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


def time_in_turns(times: range, *updates: Callable[[float], None]) -> np.ndarray:
    """Seconds (len(updates), len(times) - 1) of updates at these times, but for the first, which warms up."""
    seconds = np.empty((len(updates), len(times)))
    for k, t in enumerate(times):
        for i, update in enumerate(updates):
            start = time.perf_counter()
            update(t)
            seconds[i, k] = time.perf_counter() - start
    return seconds[:, 1:]


def compare_updates(name: str, net: nn.Module, rounds: int) -> None:
    count = sum(p.numel() for p in net.parameters())
    released, ema = LoopEMA(net), PowerFunctionEMA(net, TRACKED)
    loop, ours = time_in_turns(range(1, rounds + 2), released.update, ema.update)
    in_loop, here = (f"{np.median(seconds) * 1e3:.1f} ms" for seconds in (loop, ours))
    print(f"  {name}, {len(ema.params)} tensors, {count / 1e6:.1f} M: {in_loop} in a loop, {here}, "
          f"{quartiles(loop / ours)}", end="; ", flush=True)
    whole, averages = torch.zeros(count), [torch.zeros(count) for _ in TRACKED]
    params = [p.detach().unsqueeze(1) if i in ema.large else p.detach() for i, p in enumerate(ema.params)]

    def update_one_tensor(t: float) -> None:  # of as many weights
        for average in averages:
            average.lerp_(whole, 1 / t)

    def add(t: float) -> None:
        torch._foreach_add_(ema.stacks, params, alpha=1 / t)

    later = range(rounds + 2, 2 * rounds + 3)  # apart from ours, to leave the cache as it was
    loop, added, one = time_in_turns(later, released.update, add, update_one_tensor)
    as_one, of_additions = (np.median(loop / seconds) for seconds in (one, added))
    print(f"as one tensor {as_one:.2f} times as fast, in one pass {as_one * 6 / 5:.2f}, by an addition each "
          f"{of_additions:.2f}", flush=True)


# Reconstruction ---------------------------------------------------------------------------------------------


def unpickle_and_add(folder: Path, lengths: list[float]) -> None:
    plan, totals = make_plan(folder, lengths), None
    for snapshot, x in zip(plan.snapshots, plan.x, strict=True):
        weights = [value.float() for value in pickle.loads(snapshot.path.with_suffix(".pickle").read_bytes())]
        totals = totals or [[torch.zeros_like(value) for value in weights] for _ in lengths]
        for total, coefficient in zip(totals, x.tolist(), strict=True):
            for sums, value in zip(total, weights, strict=True):
                sums += value * coefficient
    for total in totals:
        total[:] = [sums.half() for sums in total]


def stream(folder: Path, lengths: list[float]) -> None:
    plan = make_plan(folder, lengths)
    weighted_sums(plan.snapshots, plan.x)


def additions(options: Options, lengths: list[float]) -> float:
    """Seconds that the additions of `stream` would take if all that they touch were in the cache."""
    total, value = torch.zeros(2, options.weights // TENSORS)
    start = time.perf_counter()
    for _ in range(TENSORS * options.snapshots * len(lengths)):
        total.add_(value, alpha=0.5)
    return time.perf_counter() - start


def resident(key: str) -> float:
    """This process's resident memory in MB: `VmRSS` now, `VmHWM` at its peak. Mapped files count (Linux)."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1.024e-3


def measure(way: Callable[[Path, list[float]], None], *args: object) -> tuple[float, float]:
    """(seconds, peak memory over the start in MB), in a process of its own."""
    before, start = resident("VmRSS"), time.perf_counter()
    way(*args)
    return time.perf_counter() - start, resident("VmHWM") - before


def write_snapshots(options: Options, folder: Path) -> None:
    """The same weights as ours are saved and, beside, as a pickle."""
    size = options.weights // TENSORS
    for nimg in range(1, options.snapshots // 2 + 1):
        for sigma_rel in TRACKED:
            weights = {f"w{k}": torch.randn(size) for k in range(TENSORS)}
            header = {"network": "benchmark", "config": {}, "nimg": nimg, "sigma_rel": sigma_rel}
            path = snapshot_path(folder, nimg, sigma_rel)
            save_snapshot(path, weights, header, "float16")
            low = [value.half() for value in weights.values()]
            path.with_suffix(".pickle").write_bytes(pickle.dumps(low))


def compare_reconstructions(options: Options, folder: Path, lengths: list[float]) -> None:
    figures, least, ways = [], [], (unpickle_and_add, stream)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(options.rounds + 1):
            figures.append([pool.apply(measure, (way, folder, lengths)) for way in ways])
            least.append(pool.apply(additions, (options, lengths)))
    (released, more), (ours, less) = np.median(figures[1:], axis=0)  # the first fills the page cache
    ratios = np.array([pair[0][0] / pair[1][0] for pair in figures[1:]])
    print(f"  lengths: {len(lengths)}; {released:.1f} s, {more:.0f} MB to unpickle and add; {ours:.1f} s, "
          f"{less:.0f} MB: {quartiles(ratios)}, {more / less:.1f} times less memory; the additions alone, "
          f"in the cache, {np.median(least[1:]):.1f} s", flush=True)


def main(options: Options) -> None:
    print(f"update of {len(TRACKED)} averages, {torch.get_num_threads()} threads, torch {torch.__version__}")
    small = nn.Module()
    small.weights = nn.ParameterList([torch.randn(16, 16) for _ in range(2000)])
    compare_updates("small tensors", small, 10 * options.rounds)
    compare_updates("U-ViT S/2", UViT(PRESETS["s2_cifar10"]), 10 * options.rounds)
    compare_updates("EDM2 32x32", Denoiser(SMALL), 10 * options.rounds)
    millions = options.weights / 1e6
    print(f"reconstruction from {options.snapshots} float16 snapshots of {millions:.1f} M weights")
    with tempfile.TemporaryDirectory() as folder:
        write_snapshots(options, Path(folder))
        for lengths in LENGTHS:
            compare_reconstructions(options, Path(folder), lengths)


if __name__ == "__main__":
    cli(main, Options, "Time the EMA tracker and the reconstruction against the released ways.")
