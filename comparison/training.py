"""Train one network under one scaling and one seed, and measure it on the way.

Papers: ScaleLong, arXiv:2310.13545v1, Figure 1 (norms of hidden features over training); EDM,
arXiv:2206.00364v2 (objective); the optimizers are those of the three networks' `digits` presets.

Reading order: `Cell`, `draw`, `Measurement`, `train_cell`. Within a seed every network and every scaling
sees the same images, noise levels and noise, all functions of (seed, step), and measurements are made on
images and noise that are the same for all cells:

| measured                          | when       | on                                                        |
| --------------------------------- | ---------- | --------------------------------------------------------- |
| `loss`, `features`, `gradients`   | 96 times   | the probe: an image at each of 16 noise levels            |
| `skips`, `weights`, `kappas`,     | 20 times   | the probe                                                 |
| `robustness`                      |            |                                                           |
| `validation`, per sigma           | 20 times   | 32 images; weights averaged over the last 10 % of steps   |
| `final`, `final_raw`, per sigma   | at the end | 128 images; averaged weights, and those of the last step  |

Of stage i (what long skip i joins, i = 1 outermost): `features` is the root mean square of its decoder
block's output, that is, the norm of the paper's h_i over the square root of its length; `skips` that of its
encoder block's; `gradients` the norm of the probe loss's gradient with respect to the parameters of both
blocks together; `weights` the root mean square of these; `kappas` the mean of kappa_i. `robustness` is by how
much the raw output F moves when the unit-variance input moves by a random `DISTANCE`, relative to that.

Deviations: unconditional networks, without dropout; noise levels are spread wide enough (P_std 1.6) that the
whole validation grid is trained on.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from comparison.networks import Model, build
from posthoc_ema.ema import PowerFunctionEMA
from shared.check import require
from shared.data import DataConfig, Dataset, batches, load_data
from shared.diffusion import SIGMA_DATA, edm_loss, log_normal_sigma, per_image
from shared.long_skip import LongSkipConfig
from shared.run import VALIDATION_SIGMAS

P_MEAN, P_STD = -0.8, 1.6  # of ln(sigma)
SIGMA_REL = 0.10  # relative length of the average of the weights that is validated
PROBES, VALIDATIONS = 96, 20  # measurements of each kind in a run
PROBE, VALIDATED, LAST = 16, 32, 128  # images of the probe, of a validation, and of the one at the end
DISTANCE = 0.01  # root mean square of a perturbation of the input
WINDOW, RISE = 20, 3.0  # a run has diverged when the mean of WINDOW losses exceeds RISE times the first loss


class Stopped(Exception):
    """The command was interrupted; the cell is to be trained anew."""


@dataclass(frozen=True)
class Cell:
    """One run. Its fields are its identity: a result is of this cell where all are equal."""

    network: str
    long_skip: str
    seed: int
    lr: float
    steps: int
    depth: int
    parameters: int
    batch_size: int
    warmup: int
    data: DataConfig

    def identity(self) -> dict:
        """JSON values. Where downloads are kept makes no difference."""
        identity = asdict(self)
        del identity["data"]["cache"]
        return identity | {"data": {key: list(v) if isinstance(v, tuple) else v
                                    for key, v in identity["data"].items()}}


def parse_long_skip(text: str) -> LongSkipConfig:
    """`none`, `inv_sqrt2`, `constant:K`, `learnable` or `learnable_shared`. ValueError, in a sentence."""
    kind, colon, kappa = text.partition(":")
    require(not colon or kind == "constant", f"long-skips {text!r}: only constant takes a kappa")
    require(kind != "constant" or colon, f"long-skips {text!r}: constant needs a kappa, as constant:0.7")
    try:
        return LongSkipConfig(kind, float(kappa)) if colon else LongSkipConfig(kind)
    except ValueError as error:
        told = f"{kappa!r} is not a number" if "could not convert" in str(error) else error
        raise ValueError(f"long-skips {text!r}: {told}") from None


@lru_cache(maxsize=2)
def datasets(config: DataConfig) -> tuple[Dataset, Dataset]:
    """(training, validation), without labels. ValueError where nothing is left for validation."""
    train, validation = load_data(config)
    require(len(validation) > 0, f"{config.source} has no validation images, which compare.py needs")
    train.labels = validation.labels = None
    return train, validation


def draw(seed: int, step: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Noise levels (B,) and noise (B, C, H, W) of a step, whatever the network."""
    state = int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator().manual_seed(state)
    sigma = log_normal_sigma(torch.randn(shape[0], generator=generator), P_MEAN, P_STD)
    return sigma, torch.randn(shape, generator=generator)


def training_batches(cell: Cell) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, noise levels and noise of each step, the same for all networks and scalings of a seed."""
    stream = batches(datasets(cell.data)[0], cell.batch_size, cell.seed, 0, workers=0, flip=cell.data.flip)
    for step in range(cell.steps):
        images = torch.from_numpy(next(stream)[0])
        yield images, *draw(cell.seed, step, tuple(images.shape))


def learning_rate(cell: Cell, model: Model, step: int) -> float:
    """Linear warm-up; then constant or, EDM2's, falling as an inverse square root (Eq. 67 there)."""
    late = step / model.decay if model.decay else 1.0
    return cell.lr * min(1.0, (step + 1) / max(cell.warmup, 1)) / max(late, 1.0) ** 0.5


def rms(tensors: list[Tensor]) -> float:
    """Root mean square of all elements together."""
    squares = sum(tensor.detach().double().square().sum().item() for tensor in tensors)
    return math.sqrt(squares / sum(tensor.numel() for tensor in tensors))


def to_json(value: object) -> object:
    """Numbers to five digits; what is not finite, which JSON has no word for, is None."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


class Measurement:
    """What is measured of a model, always on the same images under the same noise."""

    def __init__(self, model: Model, averaged: Model, validation: Dataset):
        self.model, self.averaged, self.outputs = model, averaged, {}
        for name, blocks in (("skips", model.encoder), ("features", model.decoder)):
            for i, block in enumerate(blocks):
                block.register_forward_hook(self.keep(name, i))
        self.stages = [[*enc.parameters(), *dec.parameters()]
                       for enc, dec in zip(model.encoder, model.decoder, strict=True)]
        self.images = torch.from_numpy(validation.images(np.arange(len(validation))[:LAST]))
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randn(self.images.shape, generator=generator)
        self.direction = torch.randn(self.images[:PROBE].shape, generator=generator)
        middle = (torch.arange(PROBE) + 0.5) / PROBE  # of equal parts of the noise levels' distribution
        self.sigma = log_normal_sigma(2**0.5 * torch.erfinv(2 * middle - 1), P_MEAN, P_STD)
        self.curves: dict[str, list] = {"steps": [], "loss": [], "features": [], "gradients": []}
        self.levels: dict[str, list] = {"steps": [], "validation": [], "robustness": [], "skips": [],
                                        "weights": [], "kappas": []}

    def keep(self, name: str, i: int) -> Callable:
        def hook(block: object, args: tuple, output: Tensor) -> None:
            self.outputs[name, i] = output

        return hook

    def stage_outputs(self, name: str) -> list[Tensor]:
        return [self.outputs[name, i] for i in range(len(self.stages))]

    def probe(self, step: int) -> None:
        """Magnitudes of hidden features, and norms of the gradients of each stage's parameters."""
        n = min(PROBE, len(self.images))
        self.model.net.eval()  # EDM2 would normalize its stored weights, which is the training's to do
        loss = edm_loss(self.model.D, self.images[:n], self.sigma[:n], self.noise[:n]).mean()
        features = [rms([h]) for h in self.stage_outputs("features")]
        flat = [p for stage in self.stages for p in stage]
        squares = [0.0 if g is None else g.double().square().sum().item()
                   for g in torch.autograd.grad(loss, flat, allow_unused=True)]
        ends = np.cumsum([0, *map(len, self.stages)])
        gradients = [math.sqrt(sum(squares[a:b])) for a, b in pairwise(ends)]
        self.model.net.train()
        values = {"steps": step, "loss": loss.item(), "features": features, "gradients": gradients}
        for name, value in values.items():
            self.curves[name].append(value)

    @torch.no_grad()
    def validate(self, model: Model, images: int) -> list[float]:
        """EDM's loss at each of VALIDATION_SIGMAS."""
        x, noise = self.images[:images], self.noise[:images]
        model.net.eval()
        losses = [edm_loss(model.D, x, torch.full((len(x),), sigma), noise).mean().item()
                  for sigma in VALIDATION_SIGMAS]
        model.net.train()
        return losses

    @torch.no_grad()
    def robustness(self) -> float:
        """|F(c_in x + d) - F(c_in x)| / |d|, of F = (D - c_skip x) / c_out, EDM Eq. 7."""
        n = min(PROBE, len(self.images))
        sigma, d = per_image(self.sigma[:n]), DISTANCE * self.direction[:n]
        total = sigma**2 + SIGMA_DATA**2
        c_skip, c_out, c_in = SIGMA_DATA**2 / total, sigma * SIGMA_DATA / total**0.5, 1 / total**0.5
        x = self.images[:n] + sigma * self.noise[:n]
        moved = self.model.D(x + d / c_in, self.sigma[:n]) - self.model.D(x, self.sigma[:n])
        return rms([(moved - c_skip * d / c_in) / c_out]) / rms([d])

    @torch.no_grad()
    def level(self, step: int) -> None:
        """What is measured less often: it takes longer, or changes slowly."""
        self.model.net.eval()
        robustness = self.robustness()
        self.model.net.train()
        skips = self.stage_outputs("skips")
        kappas = [self.model.scaling.kappa(skip, i) for i, skip in enumerate(skips, start=1)]
        values = {
            "steps": step, "validation": self.validate(self.averaged, VALIDATED), "robustness": robustness,
            "skips": [rms([skip]) for skip in skips],
            "weights": [rms([p for p in stage if p.ndim > 1]) for stage in self.stages],
            "kappas": [k.mean().item() if isinstance(k, Tensor) else k for k in kappas],
        }
        for name, value in values.items():
            self.levels[name].append(value)

    def record(self) -> dict:
        sizes = [h.shape[-1] if h.ndim == 4 else 0 for h in self.stage_outputs("skips")]  # 0: of tokens
        return to_json({"sizes": sizes, "curves": self.curves, "levels": self.levels})


def has_diverged(losses: list[float], grads_finite: bool) -> bool:
    """Whether a loss or gradient is not finite, or the last losses are far above that of the new network."""
    if not (grads_finite and math.isfinite(losses[-1])):
        return True
    return len(losses) >= WINDOW and sum(losses[-WINDOW:]) / WINDOW > RISE * losses[0]


def due(step: int, steps: int, times: int) -> bool:
    """Whether one of `times` evenly spaced moments, of which the last is the end, comes at this step."""
    return step * times // steps != (step - 1) * times // steps


def train_cell(cell: Cell, tick: Callable[[], None] = lambda: None) -> dict:
    """Train and measure; `tick` is called once a step. Returns JSON values: the cell, `parameters`,
    `diverged` (the step at which it did, or None), `loss` (means over twentieths of training) and what was
    measured."""
    train, validation = datasets(cell.data)
    arguments = (cell.network, cell.depth, cell.parameters, train.shape, parse_long_skip(cell.long_skip))
    model, averaged = (build(*arguments, cell.seed) for _ in range(2))
    parameters = list(model.net.parameters())
    options = dict(lr=cell.lr, betas=(0.9, 0.99), weight_decay=model.weight_decay, fused=True)
    optimizer, ema = torch.optim.AdamW(parameters, **options), PowerFunctionEMA(model.net, (SIGMA_REL,))
    measured = Measurement(model, averaged, validation)
    measured.probe(0)
    measured.level(0)

    losses, diverged = [], None
    for step, (images, sigma, noise) in enumerate(training_batches(cell), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cell, model, step - 1)
        loss = edm_loss(model.D, images, sigma, noise).mean()
        loss.backward()
        losses.append(loss.item())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if has_diverged(losses, bool(norm.isfinite())):
            diverged = step
            break
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
        if due(step, cell.steps, PROBES):
            measured.probe(step)
        if due(step, cell.steps, VALIDATIONS):
            averaged.net.load_state_dict(ema.weights(SIGMA_REL))
            measured.level(step)
        tick()
    final, final_raw = None, None
    if diverged is None:
        final, final_raw = (measured.validate(m, LAST) for m in (averaged, model))
    ends = [cell.steps * k // VALIDATIONS for k in range(VALIDATIONS + 1)]
    parts = [losses[a:b] for a, b in pairwise(ends)]
    return {
        "cell": cell.identity(), "parameters": sum(p.numel() for p in parameters), "diverged": diverged,
        "final": to_json(final), "final_raw": to_json(final_raw),
        "loss": to_json([sum(part) / len(part) for part in parts if part]), **measured.record(),
    }
