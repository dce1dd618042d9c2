"""What share of a training step is spent waiting for its data?

    python benchmarks/data.py
    python benchmarks/data.py --kinds npz --workers 0

The same random 64x64 images, which compress as badly as photographs, are written as a folder of PNGs, as a
zip of these and as an npz. A small U-ViT trains on each with the default number of workers, which read while
the network computes; waiting is the time between asking for a batch and having it. The first steps, before
which nothing has been read ahead, do not count. `reading` is what a batch takes when nothing else runs.
"""

import io
import json
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from minimal_uvit.model import UViT, UViTConfig
from posthoc_ema.ema import PowerFunctionEMA
from shared.check import require
from shared.data import DataConfig, batches, load_data
from shared.diffusion import EDMPrecond, edm_loss, log_normal_sigma
from shared.run import RunConfig, cli, find_device

Kind = Literal["folder", "zip", "npz"]


@dataclass(frozen=True)
class Options:
    kinds: tuple[Kind, ...] = ("folder", "zip", "npz")  # of data sets
    images: int = 2000  # number of images in each
    batch_size: int = 64  # images of a step
    steps: int = 30  # steps that are timed
    workers: int = RunConfig.workers  # batches read ahead, each by a thread
    width: int = 256  # of the U-ViT, with patches of 8x8 and 8 blocks
    device: str = "auto"  # torch device; auto: CUDA where there is one, else the CPU

    def __post_init__(self) -> None:
        least = min(self.images, self.batch_size, self.steps)
        require(least > 0 and self.workers >= 0, "images, batch_size and steps must be at least 1, workers 0")


def write(kind: Kind, folder: Path, count: int) -> Path:
    """A data set of `count` images of noise over a gradient, with labels."""
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 191, 64)[:, None, None]
    images = (ramp + rng.integers(0, 64, (count, 64, 64, 3))).astype(np.uint8)
    labels = (np.arange(count) % 10).tolist()
    if kind == "npz":
        np.savez(folder / "images.npz", images=images, labels=labels)
        return folder / "images.npz"
    files = {}
    for k, image in enumerate(images):
        Image.fromarray(image).save(png := io.BytesIO(), "png")
        files[f"{k:06d}.png"] = png.getvalue()
    index = {"labels": list(zip(files, labels, strict=True))}
    files["dataset.json"] = json.dumps(index).encode()
    path = folder / ("images" if kind == "folder" else "images.zip")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def make_step(options: Options, device: torch.device) -> Callable[[Tensor, Tensor], float]:
    """A train step of `images, labels`: loss, backward pass, optimizer, averages."""
    net = UViT(UViTConfig(64, 8, 3, options.width, 8, 4, num_classes=10)).to(device)
    D, ema = EDMPrecond(net), PowerFunctionEMA(net)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step(images: Tensor, labels: Tensor) -> float:
        sigma = log_normal_sigma(torch.randn(len(images), device=device))
        loss = edm_loss(D, images, sigma, torch.randn_like(images), labels).mean()
        loss.backward()
        optimizer.step()
        ema.update(ema.t + len(images))
        optimizer.zero_grad()
        return loss.item()  # as a run does, so that a GPU's work is part of the step

    return step


def measure(options: Options, path: Path) -> tuple[float, float, float]:
    """Mean seconds of a step, of its waiting, and of reading a batch when nobody reads ahead."""
    dataset, device = load_data(DataConfig(str(path)))[0], find_device(options.device)
    unaided = batches(dataset, options.batch_size, 0, 0, workers=0)
    start = time.perf_counter()
    for _ in range(3):
        next(unaided)
    reading = (time.perf_counter() - start) / 3
    stream = batches(dataset, options.batch_size, 0, 0, workers=options.workers)
    step, waited, total = make_step(options, device), [], []
    first = 2 + options.workers  # steps that warm up
    for _ in range(first + options.steps):
        start = time.perf_counter()
        images, labels = next(stream)
        waited.append(time.perf_counter() - start)
        step(torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device))
        total.append(time.perf_counter() - start)
    return np.mean(total[first:]), np.mean(waited[first:]), reading


def main(options: Options) -> None:
    print(f"{options.images} images of 64x64, batch {options.batch_size}, {options.workers} workers, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| data | step, ms | waiting, ms | share | reading, ms |\n| --- | --- | --- | --- | --- |")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            step, waiting, reading = measure(options, write(kind, Path(folder), options.images))
        print(f"| {kind} | {step * 1e3:.0f} | {waiting * 1e3:.2f} | {waiting / step:.1%} | "
              f"{reading * 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    cli(main, Options, "Measure the time that training waits for data.")
