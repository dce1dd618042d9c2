"""Step times of PyTorch and tinygrad: loss, gradients and AdamW of each project's digits network.

    python benchmarks/frameworks.py                 # one thread: tinygrad's CPU backend uses no more
    python benchmarks/frameworks.py --projects minimal_uvit --batch-size 64

tinygrad's first step compiles its kernels and the second records them; later ones only run. Times are CPU
seconds of the process, which other work on the machine changes little.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn.optim import AdamW
from tinygrad.nn.state import get_state_dict

from posthoc_ema.tinygrad_bridge import find_clang, load_torch
from shared.diffusion import EDMPrecond, edm_loss
from shared.run import cli

NETWORKS = {"minimal_uvit": "UViT", "adm_unet": "ADMUNet", "edm2_mp_unet": "Denoiser"}


@dataclass(frozen=True)
class Options:
    projects: tuple[str, ...] = tuple(NETWORKS)  # whose networks to time
    batch_size: int = 32  # images of one step
    steps: int = 5  # steps to time, after those that compile


def torch_step(net: torch.nn.Module, D: Callable, batch: list[np.ndarray]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    images, sigma, noise, labels = map(torch.from_numpy, batch)

    def step() -> float:
        optimizer.zero_grad()
        loss = edm_loss(D, images, sigma, noise, labels).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def tinygrad_step(net: object, D: Callable, batch: list[np.ndarray]) -> Callable[[], float]:
    params = [value for value in get_state_dict(net).values() if value.is_param]
    optimizer = AdamW(params, 1e-4)

    @TinyJit
    def step(images: Tensor, sigma: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        loss = edm_loss(D, images, sigma, noise, labels).mean()
        for p, grad in zip(params, loss.gradient(*params), strict=True):
            p.grad = grad
        return loss.realize(*optimizer.schedule_step())

    return lambda: step(*map(Tensor, batch)).item()


def main(options: Options) -> None:
    find_clang()
    torch.set_num_threads(1)
    print("| network | PyTorch, s a step | tinygrad, s a step | tinygrad compiles, s | losses differ by |")
    print("| --- | --- | --- | --- | --- |")
    rng, B = np.random.default_rng(0), options.batch_size
    for project in options.projects:
        torch_file, twin = (import_module(f"{project}.model{suffix}") for suffix in ("", "_tinygrad"))
        config = torch_file.PRESETS["digits"]
        net, other = (getattr(file, NETWORKS[project])(config) for file in (torch_file, twin))
        load_torch(other, net.state_dict())
        shape = (B, config.in_channels, config.img_size, config.img_size)
        images, noise = rng.standard_normal((2, *shape)).astype(np.float32)
        batch = [images, np.exp(rng.standard_normal(B)).astype(np.float32), noise, rng.integers(0, 10, B)]
        seconds, losses = [], []
        for make, network in ((torch_step, net), (tinygrad_step, other)):
            step = make(network, network if project == "edm2_mp_unet" else EDMPrecond(network), batch)
            with Context(TRAINING=1):
                times = []
                for _ in range(options.steps + 2):
                    start = time.process_time()
                    loss = step()
                    times.append(time.process_time() - start)
            seconds += [sum(times[:2]), min(times[2:])]
            losses.append(loss)
        gap = abs(losses[1] / losses[0] - 1)
        row = f"| {project} | {seconds[1]:.3f} | {seconds[3]:.3f} | {seconds[2]:.0f} | {gap:.0e} |"
        print(row, flush=True)


if __name__ == "__main__":
    cli(main, Options, "Step times of both frameworks.")
