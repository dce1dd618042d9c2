"""Any EMA length, after training: a weighted sum of the snapshots that a run has saved.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3.2 and appendix C.3. How good a sum can be is known before a weight is read (`plan.py`); the weights
then stream through once, so memory is that of the outputs and a few files, however many snapshots there are.

Reading order: `start`, `add`, `weighted_sums`, `reconstruct` and `read_average` (for other programs), the
command.

Shapes: N snapshots, M outputs.

Deviations: what no average has changed (buffers, counters) is copied from the target's own snapshots, which
agree on it; the released code asks the network, which a state dict does not carry. Outputs are float32.

    python posthoc_ema/reconstruct.py runs/minimal_uvit --sigma-rel 0.02 0.05:0.25:0.05
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from posthoc_ema.ema import sigma_rel_to_gamma
from posthoc_ema.plan import make_plan
from posthoc_ema.snapshots import (
    Snapshot,
    find_snapshot,
    list_snapshots,
    mapped,
    read_header,
    read_snapshot,
    save_snapshot,
    snapshot_path,
)
from shared.check import require
from shared.run import cli

FILES = 4  # that are read at a time


def start(files: Sequence[dict[str, Tensor]], M: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Zeros to sum averages in, and copies of what is none, (M, ...) each, for the target's own files.

    Averages of different lengths differ; a buffer or a counter is the same in all.
    """
    sums, copies = {}, {}
    for name, value in files[0].items():
        same = len(files) > 1 and all(torch.equal(tensors[name], value) for tensors in files[1:])
        if value.is_floating_point() and not same:
            sums[name] = torch.zeros(M, *value.shape, dtype=dtype)
        else:
            copies[name] = torch.stack([value.to(dtype) if value.is_floating_point() else value] * M)
    return sums, copies


def add(sums: dict[str, Tensor], files: Sequence[dict[str, Tensor]], x: NDArray[np.float64]) -> None:
    """To each of `sums` (M, ...) add the tensors of n files, of any precision, with coefficients x (n, M)."""
    for name, total in sums.items():  # which stays in the cache from file to file
        for tensors, coefficients in zip(files, x.tolist(), strict=True):
            value = tensors[name].to(total.dtype)
            for part, coefficient in zip(total, coefficients, strict=True):  # whose rounding no other changes
                part.add_(value, alpha=coefficient)


@torch.no_grad()
def weighted_sums(
    snapshots: Sequence[Snapshot], x: NDArray[np.float64], dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    """M state dicts: sums of N snapshots, which end with the target's own, with coefficients x (N, M)."""
    own = {s.path: mapped(s.path) for s in snapshots if s.nimg == snapshots[-1].nimg}
    sums, copies = start(list(own.values()), x.shape[1], dtype)
    with tqdm(total=len(snapshots), unit="snapshot", disable=None) as bar:
        for end in range(len(snapshots), 0, -FILES):
            some = slice(max(0, end - FILES), end)
            add(sums, [own.pop(s.path, None) or mapped(s.path) for s in snapshots[some]], x[some])
            bar.update(end - some.start)  # and unmapped before the next are read
    return [{name: total[m] for name, total in (sums | copies).items()} for m in range(x.shape[1])]


def reconstruct(
    folder: Path, sigma_rels: Sequence[float], nimg: int | None = None, dtype: torch.dtype = torch.float32
) -> list[tuple[dict[str, Tensor], dict]]:
    """Weights and header of each length, as `read_snapshot` gives those of a tracked one.

    Args:
        folder: a run, or any folder of snapshots.
        nimg: the training time to reconstruct at, a snapshot's; the last by default.
        dtype: of the sums and the weights, float32 or float64.
    """
    plan = make_plan(folder, sigma_rels, nimg)
    sums = weighted_sums(plan.snapshots, plan.x, dtype)
    return [(weights, plan.header(m)) for m, weights in enumerate(sums)]


def read_average(path: Path, sigma_rel: float | None = None) -> tuple[dict[str, Tensor], dict]:
    """Weights and header of a snapshot file; or of a run's last average of this length, reconstructed if the
    run has not tracked it, by default the shortest tracked. ValueError where there is none."""
    if path.is_file() or sigma_rel is None or sigma_rel in {s.sigma_rel for s in list_snapshots(path)}:
        return read_snapshot(find_snapshot(path, sigma_rel))
    return reconstruct(path, [sigma_rel])[0]


# The command ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    folder: tyro.conf.Positional[Path]  # a run, or any folder of snapshots
    sigma_rel: tuple[str, ...]  # lengths to make: numbers, and ranges first:last:step
    nimg: int | None = None  # the training time to make them at, a snapshot's; the last by default
    out: Path | None = None  # folder to write to; `reconstructed` in the folder by default
    precision: Literal["float32", "float16", "bfloat16"] = "float32"  # to write weights in


def parse_lengths(words: Sequence[str]) -> list[float]:
    """Rising lengths of words such as `0.02` and `0.05:0.25:0.05`, ends included. ValueError for others."""
    lengths = set()
    for word in words:
        try:
            first, last, step = map(float, word.split(":") if ":" in word else (word, word, 1))
            steps = round((last - first) / step)
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError(f"--sigma-rel {word} is neither a number nor first:last:step") from None
        fits = step > 0 and steps >= 0 and abs(first + steps * step - last) < 1e-9
        require(fits, f"--sigma-rel {word}: no whole number of steps leads from its first to its last")
        lengths |= {round(first + k * step, 9) for k in range(steps + 1)}
    sigma_rel_to_gamma(sorted(lengths))  # refuses what has no profile
    return sorted(lengths)


def is_there(path: Path, header: dict) -> bool:
    """Whether a whole file made of the same snapshots, or a tracked one, is there already."""
    try:
        there = read_header(path)
    except ValueError:  # missing or truncated: to be made
        return False
    return "reconstructed" not in there or there | {"coefficients": header["coefficients"]} == header


def main(options: Options) -> None:
    lengths, out = parse_lengths(options.sigma_rel), options.out or options.folder / "reconstructed"
    require(not out.exists() or out.is_dir(), f"out {out} is not a folder")
    plan = make_plan(options.folder, lengths, options.nimg)
    print(plan.table(), flush=True)
    for sentence in plan.warnings():
        print(f"warning: {sentence}", file=sys.stderr)
    paths = [snapshot_path(out, plan.snapshots[-1].nimg, length) for length in lengths]
    require(len(set(paths)) == len(paths), "--sigma-rel: files tell lengths apart by three decimals only")
    headers = [plan.header(m) | {"precision": options.precision} for m in range(len(lengths))]
    todo = [m for m, path in enumerate(paths) if not is_there(path, headers[m])]
    for m, weights in zip(todo, weighted_sums(plan.snapshots, plan.x[:, todo]) if todo else [], strict=True):
        save_snapshot(paths[m], weights, headers[m], options.precision)
    for m, path in enumerate(paths):
        print(path if m in todo else f"{path} was there already")


if __name__ == "__main__":
    cli(main, Options, "Reconstruct averages of other lengths from a run's snapshots.")
