"""What does long-skip scaling do? Every network, every scaling, with error bars.

Papers: ScaleLong, arXiv:2310.13545v1, claims that scaled long skips train faster (about 1.5 times), with
hidden features and gradients that oscillate less, and an output that noise in the input moves less. Here
U-ViT (arXiv:2209.12152v4), ADM (arXiv:2105.05233v4) and EDM2 (arXiv:2312.02696v2) are asked alike: with as
many parameters, and within a seed the same images, noise levels and noise.

    python compare.py                                           # a quick look: minutes, or tens of them
    python compare.py --depth 12 --steps 1000 --seeds 0 1 2     # deeper and longer: hours
    python compare.py --lr 1e-3 3e-3 1e-2 3e-2 --out runs/lr    # the largest learning rate that still trains
    python compare.py theory                                    # the paper's theorems, on untrained networks

Into `--out` go `results.jsonl` (a line a run, written as each ends), `table.md` and figures. Interrupted,
even by `kill -9`, the same command goes on where it stopped: runs that have ended are not run again, those
under way are. `comparison/` has the parts: `networks.py`, `training.py` (what is trained and measured),
`results.py`, `statistics.py` (what is made of it), `summary.py` (the table), `figures.py`, `theory.py`.

Reading order: `Options`, `cells`, `run`, `main`.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from comparison import results
from comparison.figures import draw_all
from comparison.networks import LEARNING_RATES, describe
from comparison.summary import group, write_table
from comparison.theory import TheoryOptions, theory
from comparison.training import Cell, Stopped, datasets, parse_long_skip, train_cell
from shared.check import require
from shared.data import DataConfig
from shared.run import cli

SCALINGS = ("none", "inv_sqrt2", "constant:0.7", "learnable", "learnable_shared")


@dataclass(frozen=True)
class Options:
    networks: tuple[Literal["uvit", "adm", "edm2"], ...] = ("uvit", "adm", "edm2")  # what to train
    long_skips: tuple[str, ...] = SCALINGS  # any of none, inv_sqrt2, constant:K, learnable, learnable_shared
    seeds: tuple[int, ...] = (0, 1)  # of weights, images and noise; error bars are over seeds
    steps: int = 400  # training steps of a run
    depth: int = 4  # long skips, or the nearest number that a network comes to
    parameters: int = 300_000  # of each network; ADM takes the nearest size that it has, the others match it
    lr: tuple[float, ...] = ()  # learning rates, each tried by each network; empty: each network's own
    batch_size: int = 32  # images of a step
    warmup: int = 50  # steps over which the learning rate rises from 0
    data: DataConfig = field(default_factory=DataConfig)  # the images
    jobs: int = 0  # processes, each with one thread and one run at a time; 0: as many as there are cores
    out: Path = Path("runs/compare")  # folder of results, table and figures

    def __post_init__(self) -> None:
        for name in ("networks", "long_skips", "seeds", "lr"):
            values = getattr(self, name)
            require(values or name == "lr", f"{name} is empty: it needs one or more values")
            require(len(set(values)) == len(values), f"{name} {values}: one is there twice")
        for name in ("steps", "depth", "parameters", "batch_size"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("warmup", "jobs"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: it must not be negative")
        for seed in self.seeds:
            require(0 <= seed < 1 << 63, f"seeds has {seed}: they must be in 0..2^63 - 1")
        for lr in self.lr:
            require(0 < lr < float("inf"), f"lr has {lr}: they must be positive and finite")
        for long_skip in self.long_skips:
            parse_long_skip(long_skip)


def cells(options: Options) -> list[Cell]:
    """All runs that are asked for, seed by seed, so that an early look sees every scaling."""
    names = ("steps", "depth", "parameters", "batch_size", "warmup", "data")
    fixed = [getattr(options, name) for name in names]
    return [
        Cell(network, long_skip, seed, lr, *fixed)
        for seed in options.seeds
        for network in options.networks
        for lr in options.lr or (LEARNING_RATES[network],)
        for long_skip in options.long_skips
    ]


SHARED: dict[str, Any] = {}  # of processes: `ticks`, all their steps, and `stop`, set on an interruption


def start_worker(ticks: Any, stop: Any) -> None:
    """Make a process ready: one thread; deaf to Ctrl-C, of which its parent tells it; gone when that is."""
    SHARED.update(ticks=ticks, stop=stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work(cell: Cell) -> dict:
    """Train a cell in a process of its own. Stopped, where the command was interrupted."""

    def tick() -> None:
        if SHARED["stop"].is_set():
            raise Stopped
        with SHARED["ticks"].get_lock():
            SHARED["ticks"].value += 1

    return train_cell(cell, tick)


def run_here(todo: list[Cell], bar: tqdm) -> Iterator[dict]:
    """Train one after the other, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for cell in todo:
            yield train_cell(cell, bar.update)
    finally:
        torch.set_num_threads(threads)


def run_apart(todo: list[Cell], bar: tqdm, jobs: int) -> Iterator[dict]:
    """Train in `jobs` processes; results come as they end, in any order."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    count, interrupted = context.Value("q", 0), context.Event()
    with ProcessPoolExecutor(jobs, context, start_worker, (count, interrupted)) as pool:
        try:
            waiting = {pool.submit(work, cell) for cell in todo}
            while waiting:
                ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                bar.update(count.value - bar.n + bar.initial)
                for future in ended:
                    yield future.result()
        except BrokenProcessPool:
            raise ValueError("a process was killed, perhaps for its memory: fewer jobs take less") from None
        finally:
            interrupted.set()
            pool.shutdown(cancel_futures=True)


def run(options: Options, wanted: list[Cell]) -> None:
    """Train what has no result yet and write each result as it ends."""
    path = options.out / "results.jsonl"
    found = results.find(results.read(path), wanted)
    todo = [cell for cell in wanted if cell not in found]
    jobs = min(options.jobs or os.cpu_count() or 1, len(todo))
    wait_s = 0.5 if sys.stderr.isatty() else 20  # seconds between updates; seldom, to a file
    with tqdm(total=len(todo) * options.steps, unit="step", mininterval=wait_s, disable=not todo) as bar:
        for result in run_here(todo, bar) if jobs <= 1 else run_apart(todo, bar, jobs):
            results.append(path, result)
            cell = result["cell"]
            if result["diverged"] is not None:
                name = f"{cell['network']}, {cell['long_skip']}, seed {cell['seed']}, lr {cell['lr']:g}"
                tqdm.write(f"{name}: diverged at step {result['diverged']}", file=sys.stderr)
                bar.total -= options.steps - result["diverged"] + 1


def report(options: Options, wanted: list[Cell]) -> None:
    """Write and print the table, and draw the figures, of the runs that were asked for."""
    groups = group(results.find(results.read(options.out / "results.jsonl"), wanted))
    print(write_table(options.out / "table.md", groups, options.steps))
    for path in draw_all(options.out, groups):
        print(path)


def main(options: Options | TheoryOptions) -> None:
    """Run what is asked for, then write the table and the figures of all of it; or check the theory."""
    require(not options.out.exists() or options.out.is_dir(), f"out, {options.out}, is a file")
    if isinstance(options, TheoryOptions):
        return theory(options)
    shape = datasets(options.data)[0].shape
    for network in dict.fromkeys((*options.networks, "adm")):  # ADM's count is what the others match
        line = describe(network, options.depth, options.parameters, shape)
        if network in options.networks:
            print(line)
    wanted = cells(options)
    run(options, wanted)
    report(options, wanted)


COMMANDS = {"run": Options(), "theory": TheoryOptions()}  # the first where none is named

if __name__ == "__main__":
    cli(main, COMMANDS, "Train every network under every long-skip scaling, and compare.")
