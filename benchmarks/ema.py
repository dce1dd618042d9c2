"""How fast are the EMA tracker and the reconstruction, and how much memory does the latter take?

Each is set beside the plain way to do it, in the same run and in turn, on the CPU: per-tensor `lerp_`, and
loading each snapshot whole and adding it to each output tensor by tensor, which is what the released code of
EDM2 (arXiv:2312.02696v2) does. Ratios above 1 are in favour of this repository.

    python benchmarks/ema.py
"""

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load
from torch import nn

from minimal_uvit.model import PRESETS, UViT
from posthoc_ema.ema import PowerFunctionEMA, power_function_beta
from posthoc_ema.plan import make_plan
from posthoc_ema.reconstruct import weighted_sums
from posthoc_ema.snapshots import save_snapshot, snapshot_path
from shared.run import cli

TRACKED, LENGTHS = (0.05, 0.10), np.linspace(0.03, 0.24, 8).tolist()


@dataclass(frozen=True)
class Options:
    weights: int = 20_000_000  # weights in a snapshot, in 160 tensors
    snapshots: int = 64  # number of snapshots, two at each time
    rounds: int = 3  # times that the two ways to reconstruct take turns; the update takes ten times as many


# The tracker ------------------------------------------------------------------------------------------------


@torch.no_grad()
def update_in_a_loop(ema: PowerFunctionEMA, t: float) -> None:
    for sigma_rel, average in zip(ema.lengths, ema.averages, strict=True):
        beta = float(power_function_beta(sigma_rel, t, t - ema.t))
        for p_ema, p in zip(average, ema.params, strict=True):
            p_ema.lerp_(p, 1 - beta)
    ema.t = t


def compare_updates(name: str, net: nn.Module, rounds: int) -> None:
    ways = {"loop": update_in_a_loop, "ours": PowerFunctionEMA.update}
    ema, seconds = PowerFunctionEMA(net, TRACKED), {way: [] for way in ways}
    for t in range(2, 2 * rounds + 4, 2):
        for k, (way, update) in enumerate(ways.items()):
            start = time.perf_counter()
            update(ema, t + k)
            seconds[way].append(time.perf_counter() - start)
    loop, ours = (np.array(seconds[way][1:]) for way in ways)  # the first warms up
    count = sum(p.numel() for p in net.parameters()) / 1e6
    print(f"  {name}, {len(ema.params)} tensors, {count:.1f} M: {np.median(loop) * 1e3:.1f} ms in a loop, "
          f"{np.median(ours) * 1e3:.1f} ms, {np.median(loop / ours):.1f} times as fast")


# Reconstruction ---------------------------------------------------------------------------------------------


def load_whole_and_add(folder: Path) -> None:
    plan, totals = make_plan(folder, LENGTHS), [{} for _ in LENGTHS]
    for snapshot, x in zip(plan.snapshots, plan.x, strict=True):
        weights = {name: value.float() for name, value in load(snapshot.path.read_bytes()).items()}
        for total, coefficient in zip(totals, x.tolist(), strict=True):
            for name, value in weights.items():
                total.setdefault(name, torch.zeros_like(value)).add_(value * coefficient)


def stream(folder: Path) -> None:
    plan = make_plan(folder, LENGTHS)
    weighted_sums(plan.snapshots, plan.x)


def resident(key: str) -> float:
    """This process's resident memory in MB: `VmRSS` now, `VmHWM` at its peak. Mapped files count (Linux)."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1.024e-3


def measure(way: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """(seconds, peak memory over the start in MB), in a process of its own."""
    before, start = resident("VmRSS"), time.perf_counter()
    way(folder)
    return time.perf_counter() - start, resident("VmHWM") - before


def compare_reconstructions(options: Options, precision: str, folder: Path) -> None:
    size = options.weights // 160
    for nimg in range(1, options.snapshots // 2 + 1):
        for sigma_rel in TRACKED:
            weights = {f"w{k}": torch.randn(size) for k in range(160)}
            header = {"network": "benchmark", "config": {}, "nimg": nimg, "sigma_rel": sigma_rel}
            save_snapshot(snapshot_path(folder, nimg, sigma_rel), weights, header, precision)
    figures = []
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(options.rounds + 1):
            figures.append([pool.apply(measure, (way, folder)) for way in (load_whole_and_add, stream)])
    (whole, more), (ours, less) = np.median(figures[1:], axis=0)  # the first fills the page cache
    ratio = np.median([pair[0][0] / pair[1][0] for pair in figures[1:]])
    print(f"  {precision}: {whole:.1f} s, {more:.0f} MB to load whole and add; {ours:.1f} s, {less:.0f} MB: "
          f"{ratio:.1f} times as fast, {more / less:.1f} times less memory")


def main(options: Options) -> None:
    print(f"update of {len(TRACKED)} averages, {torch.get_num_threads()} threads")
    small = nn.Module()
    small.weights = nn.ParameterList([torch.randn(16, 16) for _ in range(2000)])
    compare_updates("small tensors", small, 10 * options.rounds)
    compare_updates("U-ViT S/2", UViT(PRESETS["s2_cifar10"]), 10 * options.rounds)
    millions = options.weights / 1e6
    print(f"{len(LENGTHS)} lengths from {options.snapshots} snapshots of {millions:.1f} M weights, outputs "
          f"of {len(LENGTHS) * millions * 4:.0f} MB")
    for precision in ("float32", "float16"):
        with tempfile.TemporaryDirectory() as folder:
            compare_reconstructions(options, precision, Path(folder))


if __name__ == "__main__":
    cli(main, Options, "Time the EMA tracker and the reconstruction against the plain ways.")
