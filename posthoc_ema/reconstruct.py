"""Any EMA length, after training: a weighted sum of the snapshots that a run has saved.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3.2 and appendix C.3. How good a sum can be is known before a weight is read (`plan.py`); the weights
then stream through once, so memory is that of the outputs and a tensor, however many snapshots there are.

Reading order: `weighted_sums`, `reconstruct` (what other programs call), the command.

Shapes: N snapshots, M outputs.

Deviations: what no average has changed (buffers, counters) is copied from the target's own snapshots, which
agree on it; the released code asks the network, which a state dict does not carry. Outputs are float32.

    python posthoc_ema/reconstruct.py runs/minimal_uvit --sigma-rel 0.02 0.05:0.25:0.05
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
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
from posthoc_ema.snapshots import Snapshot, mapped, read_header, save_snapshot, snapshot_path
from shared.check import require
from shared.run import cli

CHUNK = 1 << 16  # weights summed at once: few enough to stay in cache


def is_average(values: Sequence[Tensor]) -> bool:
    """Whether an entry is one that the tracker averages, from its values in averages of different lengths."""
    same = len(values) > 1 and all(torch.equal(value, values[0]) for value in values)
    return values[0].is_floating_point() and not same


def add(totals: Tensor, values: Sequence[Tensor], x: NDArray[np.float64]) -> None:
    """totals (M, ...) += n tensors of any precision with coefficients x (n, M)."""
    M, size = len(totals), values[0].numel()
    chunks = (value.reshape(size).split(CHUNK) for value in values)
    for total, *chunk in zip(totals.view(M, size).split(CHUNK, dim=1), *chunks, strict=True):
        chunk = [part.to(total.dtype) for part in chunk]
        for m in range(M):  # each by itself: a product of matrices rounds by how many there are
            for part, coefficient in zip(chunk, x[:, m].tolist(), strict=True):
                total[m].add_(part, alpha=coefficient)


@torch.no_grad()
def weighted_sums(
    snapshots: Sequence[Snapshot], x: NDArray[np.float64], dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    """M state dicts: sums of N snapshots, which end with the target's own, with coefficients x (N, M)."""
    sums, averages, M = {}, set(), x.shape[1]
    latest_first = sorted(zip(snapshots, x, strict=True), key=lambda pair: -pair[0].nimg)
    progress = tqdm(total=len(snapshots), unit="snapshot", disable=None)
    for _, pairs in groupby(latest_first, key=lambda pair: pair[0].nimg):
        files, rows = zip(*((mapped(snapshot.path), row) for snapshot, row in pairs), strict=True)
        if not sums:  # these are the target's own
            averages = {name for name in files[0] if is_average([tensors[name] for tensors in files])}
            for name, value in files[0].items():
                zeros = torch.zeros(M, *value.shape, dtype=dtype)
                sums[name] = zeros if name in averages else torch.stack([value] * M)
        for name in averages:
            add(sums[name], [tensors[name] for tensors in files], np.array(rows))
        progress.update(len(files))
    progress.close()
    return [{name: total[m] for name, total in sums.items()} for m in range(M)]


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
    lengths = parse_lengths(options.sigma_rel)
    plan = make_plan(options.folder, lengths, options.nimg)
    print(plan.table(), flush=True)
    for sentence in plan.warnings():
        print(f"warning: {sentence}", file=sys.stderr)
    out = options.out or options.folder / "reconstructed"
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
