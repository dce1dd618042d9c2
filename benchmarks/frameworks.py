"""Step times of PyTorch and tinygrad: loss, gradients and AdamW of each project's digits network.

    python benchmarks/frameworks.py
    python benchmarks/frameworks.py --projects minimal_uvit --batch-size 64

Both start from the same weights, and their losses must agree to 1e-3 in every step; steps alternate, on one
thread. Times are CPU seconds of the process, which other work on the machine changes little; medians. The
first step of tinygrad compiles its kernels and the second records them: `first two steps` is what they take
by the clock, where no kernel is cached from an earlier run.
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

from edm2_mp_unet.train_tinygrad import scalar
from posthoc_ema.tinygrad_bridge import find_clang, load_torch
from shared.diffusion import EDMPrecond, edm_loss
from shared.run import cli

NETWORKS = {"minimal_uvit": "UViT", "adm_unet": "ADMUNet", "edm2_mp_unet": "Denoiser"}


@dataclass(frozen=True)
class Options:
    projects: tuple[str, ...] = tuple(NETWORKS)  # whose networks to time
    batch_size: int = 32  # images of one step
    steps: int = 9  # steps to time, after those that compile


def torch_step(net: torch.nn.Module, D: Callable, batch: list[np.ndarray]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
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
    optimizer = scalar(AdamW(params, 1e-4, weight_decay=1e-2))

    @TinyJit
    @Context(TRAINING=1)
    def step(images: Tensor, sigma: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        loss = edm_loss(D, images, sigma, noise, labels).mean()
        grads = loss.gradient(*params)
        Tensor.realize(loss, *grads)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        return loss

    return lambda: step(*map(Tensor, batch)).item()


def main(options: Options) -> None:
    find_clang()
    torch.set_num_threads(1)
    print("| network | PyTorch, s a step | tinygrad, s a step | tinygrad / PyTorch | first two steps, s |")
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
        steps = [
            make(network, network if project == "edm2_mp_unet" else EDMPrecond(network), batch)
            for make, network in ((torch_step, net), (tinygrad_step, other))
        ]
        seconds, losses, clock = np.empty((2, options.steps + 2)), [0.0, 0.0], 0.0
        for k in range(options.steps + 2):
            for i, step in enumerate(steps):
                start, of_clock = time.process_time(), time.perf_counter()
                with Context(CCACHE=0):
                    losses[i] = step()
                seconds[i, k] = time.process_time() - start
                clock += (time.perf_counter() - of_clock) * (i == 1 and k < 2)
            np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
        (ours, theirs), ratio = np.median(seconds[:, 2:], 1), np.median(seconds[1, 2:] / seconds[0, 2:])
        print(f"| {project} | {ours:.3f} | {theirs:.3f} | {ratio:.1f} | {clock:.0f} |", flush=True)


if __name__ == "__main__":
    cli(main, Options, "Step times of both frameworks.")
