"""Which EMA length is best? Quality against sigma_rel for a run of one's own, as EDM2's Figure 5 shows it.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3.3; Frechet distance of Heusel et al., arXiv:1706.08500v6, Eq. 6, here between pixels.

Each length is reconstructed in memory and measured: validation loss at each noise level and, where samples
are asked for, their distance to the training images. All lengths see the same noise, so that neighbours
differ by their weights alone.

    python posthoc_ema/sweep.py runs/minimal_uvit --samples 2000

Reading order: `frechet_distance`, `sweep`, then what writes the results. They lie in `sweep/` in the run's
folder: table.md, sweep.json, sweep.png. An interrupted sweep goes on where it stopped.
"""

import json
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from tqdm import tqdm

from posthoc_ema.plan import make_plan
from posthoc_ema.reconstruct import parse_lengths, weighted_sums
from posthoc_ema.snapshots import config_from_dict
from shared.check import require
from shared.data import DataConfig, Dataset, load_data
from shared.diffusion import Denoiser
from shared.files import write_whole
from shared.run import cli, find_device, validate
from shared.samplers import heun, seed_noise, sigma_steps


@dataclass(frozen=True)
class Options:
    run: tyro.conf.Positional[Path] = Path("runs/minimal_uvit")  # folder of the run
    sigma_rel: tuple[str, ...] = ("0.01:0.25:0.01",)  # lengths: numbers, and ranges first:last:step
    nimg: int | None = None  # the training time to reconstruct at, a snapshot's; the last by default
    samples: int = 0  # images to draw for the Frechet distance; 0: none
    steps: int = 18  # steps of the sampler
    seed: int = 0  # seed of the first image; image k has seed + k
    batch_size: int = 250  # images drawn at a time
    at_once: int = 8  # lengths held in memory at once; the snapshots are read once for each so many
    out: Path | None = None  # folder to write to; `sweep` in the run's by default
    device: str = "auto"  # torch device; auto: CUDA where there is one, else the CPU

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "at_once"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be at least 1")
        require(self.samples >= 0, f"samples is {self.samples}: it must not be negative")
        require(self.seed >= 0, f"seed is {self.seed}: it must not be negative")


# Measures ---------------------------------------------------------------------------------------------------


# |mu_a - mu_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), arXiv:1706.08500, Eq. 6.
def frechet_distance(a: NDArray, b: NDArray) -> float:
    """Distance of the Gaussians fitted to the rows of a (N, D) and b (M, D)."""
    (mean_a, C_a), (mean_b, C_b) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (a, b))
    values, vectors = np.linalg.eigh(C_a)
    root = vectors * values.clip(0) ** 0.5 @ vectors.T
    cross = np.linalg.eigvalsh(root @ C_b @ root).clip(0) ** 0.5  # C_a^(1/2) C_b C_a^(1/2) is like C_a C_b
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(C_a) + np.trace(C_b) - 2 * cross.sum())


def draw(D: Denoiser, train: Dataset, options: Options, device: torch.device) -> NDArray[np.float32]:
    """(samples, C H W) values of images of the training images' classes in turn."""
    images = []
    for start in range(0, options.samples, options.batch_size):
        k = np.arange(start, min(start + options.batch_size, options.samples))
        noise = torch.from_numpy(seed_noise((options.seed + k).tolist(), train.shape)).to(device)
        labels = None if train.labels is None else torch.from_numpy(train.labels[k % len(train)]).to(device)
        with torch.no_grad():
            drawn = heun(D, noise, labels, sigma_steps(options.steps))
        images.append(drawn.cpu().numpy().reshape(len(k), -1))
    return np.concatenate(images)


# The sweep --------------------------------------------------------------------------------------------------


def load_run(folder: Path) -> tuple[Dataset, Dataset]:
    """The run's training and validation images. ValueError where the folder holds no run."""
    try:
        data = config_from_dict(DataConfig, json.loads((folder / "config.json").read_text())["data"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no run: its config.json is missing or tells of no data") from error
    return load_data(replace(data, cache=Path(data.cache)))


def read_rows(path: Path, settings: dict) -> dict[float, dict]:
    """What an earlier sweep of the same settings has measured, by length."""
    try:
        earlier = json.loads(path.read_text())
        return {row["sigma_rel"]: row for row in earlier["rows"]} if earlier["settings"] == settings else {}
    except (OSError, ValueError, KeyError):  # none, or not of a sweep
        return {}


def sweep(options: Options) -> None:
    lengths, device = parse_lengths(options.sigma_rel), find_device(options.device)
    train, validation = load_run(options.run)
    require(len(validation) > 0 or options.samples > 0, "no images are held out: give --samples to measure")
    size = int(np.prod(train.shape))
    require(not options.samples or size <= 4096, f"samples: images of {size} values are too large to compare")
    plan = make_plan(options.run, lengths, options.nimg)
    for sentence in plan.warnings():
        print(f"warning: {sentence}", file=sys.stderr)
    header = plan.header(0)
    build = import_module(f"{header['network']}.sample").build
    if not header["config"]["num_classes"]:  # an unconditional network, whatever the images have
        train.labels = validation.labels = None
    real = train.images(np.arange(min(len(train), 10_000))).reshape(-1, size) if options.samples else None

    out = options.out or options.run / "sweep"
    require(not out.exists() or out.is_dir(), f"out {out} is not a folder")
    settings = {"snapshots": header["reconstructed"]}
    settings |= {name: getattr(options, name) for name in ("samples", "steps", "seed")}
    rows = read_rows(out / "sweep.json", settings)
    todo = [m for m, sigma_rel in enumerate(lengths) if sigma_rel not in rows]
    with tqdm(total=len(todo), unit="length") as progress:
        for start in range(0, len(todo), options.at_once):
            part = todo[start : start + options.at_once]
            for m, weights in zip(part, weighted_sums(plan.snapshots, plan.x[:, part]), strict=True):
                D = build(weights, plan.header(m), device)
                row = {"sigma_rel": lengths[m], "profile_error": plan.L2[m]}
                row["validation"] = validate(D, validation, device)
                if options.samples:
                    row["frechet"] = frechet_distance(draw(D, train, options, device), real)
                rows[lengths[m]] = row
                text = json.dumps({"settings": settings, "rows": [rows[s] for s in sorted(rows)]}, indent=1)
                write_whole(out / "sweep.json", lambda file, text=text: file.write(text.encode()))
                progress.update()
    rows = [rows[length] for length in lengths]
    write_whole(out / "table.md", lambda file: file.write(table(rows).encode()))
    plot(out / "sweep.png", rows, sorted({s.sigma_rel for s in plan.snapshots}))
    print(table(rows), end="")


# Results ----------------------------------------------------------------------------------------------------


def measures(rows: list[dict]) -> dict[str, NDArray[np.float64]]:
    """Columns of numbers, one a row, that are best where smallest."""
    columns = {}
    if rows[0]["validation"]:
        columns["validation loss"] = [np.mean(list(row["validation"].values())) for row in rows]
    if "frechet" in rows[0]:
        columns["Frechet distance"] = [row["frechet"] for row in rows]
    for sigma in rows[0]["validation"]:
        columns[f"sigma {sigma}"] = [row["validation"][sigma] for row in rows]
    return {name: np.array(values) for name, values in columns.items()}


def table(rows: list[dict]) -> str:
    """Markdown: a line a length, the best of each column in bold."""
    columns = measures(rows)
    lines = [" | ".join(["| sigma_rel | profile error", *columns]) + " |"]
    lines.append("| ---: " * (len(columns) + 2) + "|")
    for k, row in enumerate(rows):
        cells = [f"| {row['sigma_rel']:.3f} | {row['profile_error']:.2%}"]
        cells += [f"**{v[k]:.4g}**" if k == v.argmin() else f"{v[k]:.4g}" for v in columns.values()]
        lines.append(" | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(path: Path, rows: list[dict], tracked: list[float]) -> None:
    """Each measure against sigma_rel, its best marked by a dot; crosses are lengths whose profile is more
    than 5 % off, dotted lines the tracked ones."""
    from matplotlib import colormaps  # slow to import
    from matplotlib.figure import Figure

    x, columns = np.array([row["sigma_rel"] for row in rows]), measures(rows)
    far = np.array([row["profile_error"] > 0.05 for row in rows])
    levels = {name: values / values.min() for name, values in columns.items() if name.startswith("sigma ")}
    panels = {name: {name: values} for name, values in columns.items() if name not in levels}
    panels |= {"loss at each noise level, over its best": levels} if levels else {}
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for k, (name, values) in enumerate(curves.items()):
            best, color = values.argmin(), colormaps["viridis"](k / len(curves))
            axes.plot(x, values, color=color, label=name)
            axes.plot(x[best], values[best], "o", color=color)
            axes.plot(x[far], values[far], "x", color=color, markersize=4)
            if len(curves) == 1:
                title += f": best {values[best]:.4g}, at {x[best]:.3f}"
        for sigma_rel in tracked:
            axes.axvline(sigma_rel, color="gray", linewidth=0.8, linestyle=":")
        axes.set(xlabel="sigma_rel", title=title)
        if len(curves) > 1:
            axes.legend(fontsize="small")
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))


if __name__ == "__main__":
    cli(sweep, Options, "Measure a run's averages of many lengths.")
