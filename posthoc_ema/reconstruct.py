"""Any EMA length, after training: a weighted sum of the snapshots that a run has saved.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3.2 and appendix C.3. How good a sum can be is known before a weight is read (`plan.py`); the weights
then stream through once, so memory is that of the outputs and a few files, however many snapshots there are.

Reading order: `unchanged`, `add`, `weighted_sums`, `reconstruct` and `read_average` (for other programs), the
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
    blocks,
    find_snapshot,
    layout,
    layout_of,
    list_snapshots,
    mapped,
    mapped_blocks,
    numel,
    read_header,
    read_snapshot,
    save_snapshot,
    snapshot_path,
    unpacked,
)
from shared.check import require
from shared.run import cli

Tensors = Sequence[Tensor]
FILES = 4  # that are read at a time
CHUNK = 1 << 20  # sums, of up to eight lengths, made at a time: they stay in the cache from file to file


def unchanged(files: Sequence[dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """What is no average in the target's own files: all but floating-point numbers, and what is the same in
    all of them, as a buffer is, while averages of different lengths differ."""
    copies = {}
    for name, value in files[0].items():
        same = len(files) > 1 and all(torch.equal(tensors[name], value) for tensors in files[1:])
        if same or not value.is_floating_point():
            copies[name] = value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
    return copies


def add(sums: Sequence[Tensors], files: Sequence[Tensors], x: np.ndarray, dtype: torch.dtype) -> None:
    """To M `sums` (L,) of each tensor add that of n files, of any precision, with coefficients x (n, M)."""
    size = CHUNK // max(1, min(x.shape[1], 8))
    for totals, *tensors in zip(sums, *files, strict=True):
        values, L = [tensor.flatten() for tensor in tensors], tensors[0].numel()
        room = torch.empty(min(size, L), dtype=dtype)  # for all chunks: new memory costs more than sums
        for k in range(0, L, size):
            parts = [total[k : k + size] for total in totals]
            for value, coefficients in zip(values, x.tolist(), strict=True):
                chunk = room[: L - k].copy_(value[k : k + size])
                for part, coefficient in zip(parts, coefficients, strict=True):  # whose bits no other changes
                    part.add_(chunk, alpha=coefficient)


@torch.no_grad()
def weighted_sums(
    snapshots: Sequence[Snapshot], x: NDArray[np.float64], dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    """M state dicts: sums of N snapshots, which end with the target's own, with coefficients x (N, M). The
    tensors of one may share memory."""
    own = {s.path: mapped(s.path) for s in snapshots if s.nimg == snapshots[-1].nimg}
    copies, kinds = unchanged(list(own.values()), dtype), layout_of(own[snapshots[-1].path])
    order, files = list(kinds.items()), [s.path for s in snapshots]
    alike = all(path.suffix == ".safetensors" and list(layout(path).items()) == order for path in files)
    parts = blocks(kinds) if alike else [{name: kind} for name, kind in order]  # what is read as one tensor
    sums = [[torch.zeros(numel(part), dtype=dtype) for _ in x.T] for part in parts]

    def read(path: Path) -> list[Tensor]:  # of each part
        tensors = own.pop(path, None)
        if alike:
            return mapped_blocks(path, parts)
        tensors = tensors or mapped(path)
        return [tensors[name] for name in kinds]

    with tqdm(total=len(snapshots), unit="snapshot", disable=None) as bar:
        for end in range(len(snapshots), 0, -FILES):
            some = slice(max(0, end - FILES), end)
            add(sums, [read(path) for path in files[some]], x[some], dtype)
            bar.update(end - some.start)  # and unmapped before the next are read

    outputs = []
    for m in range(x.shape[1]):
        tensors = {}
        for part, totals in zip(parts, sums, strict=True):
            tensors |= unpacked(part, totals[m])
        outputs.append(tensors | {name: value.clone() for name, value in copies.items()})
    return outputs


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
