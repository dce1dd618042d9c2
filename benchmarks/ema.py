"""How fast are the EMA tracker and the reconstruction, and how much memory does the latter take?

Each is set beside what the released code of EDM2 (arXiv:2312.02696v2) does, in the same run and in turn, on
the CPU: per-tensor `lerp_`; and unpickling each float16 snapshot, widening it and adding it to each output
tensor by tensor. Ratios above 1 are in favour of this repository; medians, with quartiles.

    python benchmarks/ema.py
"""

import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.timing import TRACKED, LoopEMA, quartiles, resident, time_in_turns
from edm2_mp_unet.model import Denoiser, EDM2Config
from minimal_uvit.model import PRESETS, UViT
from posthoc_ema.ema import PowerFunctionEMA
from posthoc_ema.plan import make_plan
from posthoc_ema.reconstruct import weighted_sums
from posthoc_ema.snapshots import save_snapshot, snapshot_path
from shared.run import cli

LENGTHS = ([0.15], np.linspace(0.03, 0.24, 8).tolist())
TENSORS = 160  # in a snapshot
SMALL = EDM2Config(32, 3, 0, 64, (1, 2, 2), num_blocks=3, attn_resolutions=(16, 8), channels_per_head=64)


@dataclass(frozen=True)
class Options:
    weights: int = 20_000_000  # weights in a snapshot
    snapshots: int = 64  # number of snapshots, two at each time
    rounds: int = 9  # times that the two ways to reconstruct take turns; the update takes ten times as many


# The tracker ------------------------------------------------------------------------------------------------


def compare_updates(name: str, net: nn.Module, rounds: int) -> None:
    count = sum(p.numel() for p in net.parameters())
    ways = LoopEMA(net), PowerFunctionEMA(net, TRACKED)
    steps = [lambda ema=ema: ema.update(ema.t + 1) for ema in ways]
    loop, ours = time_in_turns(steps, rounds, torch.device("cpu"))
    in_loop, here = (f"{np.median(seconds) * 1e3:.1f} ms" for seconds in (loop, ours))
    print(f"  {name}, {len(ways[0].params)} tensors, {count / 1e6:.1f} M: {in_loop} in a loop, {here}, "
          f"{quartiles(loop / ours)} times as fast", flush=True)


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
          f"{less:.0f} MB: {quartiles(ratios)} times as fast, {more / less:.1f} times less memory; the "
          f"additions alone, in the cache, {np.median(least[1:]):.1f} s", flush=True)


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
