"""How large activations, weights and gradients are over training: EDM2 beside ADM, at the same width.

Paper: Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2, of whose figures
3 and 15 this is a small model: the same digits, the same noise, the same channels for both networks.

    python benchmarks/magnitudes.py                     # minutes on two CPU cores
    python benchmarks/magnitudes.py --networks edm2 --steps 200

A level's blocks are those of the encoder or decoder at one image size. Of a level: the root mean square of
its blocks' outputs, of their convolutions' and linear layers' weights, and of these weights' gradients.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import trange

from adm_unet.model import ADMConfig, ADMUNet
from edm2_mp_unet.model import Denoiser, EDM2Config
from shared.check import require
from shared.data import DataConfig, load_data
from shared.diffusion import EDMPrecond, edm_loss, log_normal_sigma
from shared.files import write_whole
from shared.run import cli

KINDS = ("activations", "weights", "gradients")


@dataclass(frozen=True)
class Options:
    networks: tuple[Literal["adm", "edm2"], ...] = ("adm", "edm2")  # what to train
    steps: int = 1000  # training steps of each
    batch_size: int = 64  # images of a step
    every: int = 20  # steps between measurements
    channels: int = 32  # width of both networks at the full resolution; twice that at the lower one
    seed: int = 0  # seed of weights, images and noise
    out: Path = Path("docs/magnitudes.png")  # the figure; its numbers go beside it, as .json

    def __post_init__(self) -> None:
        require(min(self.steps, self.every) > 0, "steps and every must be at least 1")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}: it must be at least 1")


def build(name: str, channels: int) -> tuple[nn.Module, list, list, float]:
    """A network, its encoder's and its decoder's blocks, and the learning rate that its digits preset has."""
    if name == "edm2":
        net = Denoiser(EDM2Config(channels=channels))
        return net, list(net.unet.enc), list(net.unet.dec), 1e-2
    net = ADMUNet(ADMConfig(8, 1, channels, (1, 2), 2, (4,), 10))
    return net, list(net.in_blocks), [net.mid_block1, net.mid_block2, *net.out_blocks], 2e-3


def rms(tensors: list[Tensor]) -> float:
    """Root mean square of all elements together."""
    squares = torch.stack([tensor.detach().square().sum() for tensor in tensors])
    return (squares.sum() / sum(tensor.numel() for tensor in tensors)).sqrt().item()


def measure(options: Options, name: str) -> dict[str, dict[str, list[float]]]:
    """{kind: {level: its magnitudes, one every `every` steps}} of a network over training."""
    torch.manual_seed(options.seed)
    net, enc, dec, lr = build(name, options.channels)
    D = net if name == "edm2" else EDMPrecond(net)
    data, rng = load_data(DataConfig())[0], np.random.default_rng(options.seed)
    optimizer = torch.optim.Adam(net.parameters(), lr, (0.9, 0.99), fused=True)
    outputs: dict[str, list[Tensor]] = {}
    members: dict[str, list[nn.Module]] = {}

    def keep(side: str):
        def hook(block: nn.Module, args: tuple, out: Tensor) -> None:
            level = f"{side} {out.shape[2]}x{out.shape[3]}"
            outputs.setdefault(level, []).append(out)
            members.setdefault(level, []).append(block)

        return hook

    for side, blocks in (("encoder", enc), ("decoder", dec)):
        for block in blocks:
            block.register_forward_hook(keep(side))
    history: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for step in trange(options.steps, desc=name, disable=None):
        outputs.clear()
        members.clear()
        index = rng.integers(len(data), size=options.batch_size)
        images, labels = torch.from_numpy(data.images(index)), torch.from_numpy(data.labels[index])
        sigma = log_normal_sigma(torch.randn(options.batch_size), -0.8, 1.0)
        loss = edm_loss(D, images, sigma, torch.randn_like(images), labels).mean()
        optimizer.zero_grad()
        loss.backward()
        if step % options.every == 0:
            for level, blocks in members.items():
                params = [p for block in blocks for p in block.parameters() if p.ndim > 1]
                values = rms(outputs[level]), rms(params), rms([p.grad for p in params])
                for kind, value in zip(KINDS, values, strict=True):
                    history[kind].setdefault(level, []).append(value)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 100)
        optimizer.step()
    return history


def plot(options: Options, histories: dict[str, dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * len(histories)), layout="constrained")
    axes = figure.subplots(len(histories), 3, squeeze=False, sharex=True)
    for row, (name, history) in zip(axes, histories.items(), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for level, values in history[kind].items():
                axis.plot(np.arange(len(values)) * options.every, values, label=level)
            axis.set(title=f"{name}: {kind}", yscale="log", xlabel="steps")
        row[0].legend(fontsize="x-small")
    for column in axes.T:  # so that the networks compare
        low = min(axis.get_ylim()[0] for axis in column)
        high = max(axis.get_ylim()[1] for axis in column)
        for axis in column:
            axis.set_ylim(low, high)
    write_whole(options.out, lambda file: figure.savefig(file, format="png", dpi=120))


def main(options: Options) -> None:
    histories = {name: measure(options, name) for name in options.networks}
    text = json.dumps(histories)
    write_whole(options.out.with_suffix(".json"), lambda file: file.write(text.encode()))
    print(f"{'':5} {'':12} {'level':12} {'at 10 %':>9} {'at end':>9} {'ratio':>7}")
    for name, history in histories.items():
        for kind in KINDS:
            for level, values in history[kind].items():
                early, late = values[len(values) // 10], values[-1]
                print(f"{name:5} {kind:12} {level:12} {early:9.3g} {late:9.3g} {late / (early or 1):7.2f}")
    plot(options, histories)
    print(options.out)


if __name__ == "__main__":
    cli(main, Options, "Measure magnitudes over training.")
