"""Train an EDM2 in tinygrad: the twin of `train.py`, whose configs, first weights, data and noise it shares.

Paper: as in `train.py`. Of one config and seed both frameworks start from the same weights and see the same
batches, noise levels and noise: their losses agree for as long as rounding allows. Folders and snapshots have
one format, and `sample.py` draws from either's.

    python edm2_mp_unet/train_tinygrad.py                            # digits, 19 minutes on two busy cores
    python edm2_mp_unet/train_tinygrad.py --net.long-skip.kind constant
    DEV=CUDA python edm2_mp_unet/train_tinygrad.py edm2_img64_s      # tinygrad finds its device by itself

Reading order: `PRESETS`, `compiled`, `train`. Ctrl-C saves and stops; the same command goes on.

Deviations: one process, float32, in which a `loss_scale` would change nothing; TinyJit compiles in any case.
Validation and pictures are PyTorch's, of the same averaged weights. Dropout draws from tinygrad's own random
numbers, and others after resuming. The digits preset takes fewer images than PyTorch's, in smaller steps: on
a CPU convolutions take ten times as long.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn.optim import Adam, Optimizer
from tinygrad.nn.state import get_parameters

from edm2_mp_unet.model import Denoiser as TorchDenoiser
from edm2_mp_unet.model_tinygrad import Denoiser
from edm2_mp_unet.train import PRESETS as TORCH_PRESETS
from edm2_mp_unet.train import TrainConfig, check, draw, learning_rate, picture, uncertainty_loss
from posthoc_ema.ema_tinygrad import PowerFunctionEMA
from posthoc_ema.snapshots import save_snapshots
from posthoc_ema.tinygrad_bridge import TorchState, convert, find_clang, load_torch, to_tinygrad, to_torch
from shared.check import require
from shared.data import load_data
from shared.diffusion import edm_loss
from shared.run import Run, cli, validate

PRESETS: dict[str, TrainConfig] = {
    name: replace(
        config, precision="float32", run=replace(config.run, out=Path(f"{config.run.out}_tinygrad"))
    )
    for name, config in TORCH_PRESETS.items()
}
DIGITS = PRESETS["digits"]
PRESETS["digits"] = replace(
    DIGITS, batch_size=64, warmup=6_400, run=replace(DIGITS.run, duration=32_000, sample_every=16_000)
)


def scalar(optimizer: Optimizer) -> Optimizer:
    """tinygrad's Adam keeps its numbers in vectors of one, and a step by these fits no gain, which has no
    dimension: make them numbers."""
    for name in ("lr", "b1_t", "b2_t"):
        setattr(optimizer, name, getattr(optimizer, name).contiguous().realize().reshape(()))
    return optimizer


def compiled(
    config: TrainConfig, objective: Callable, D: Denoiser, params: list[Tensor], optimizer: Optimizer
) -> tuple[Callable, Callable]:
    """What PyTorch does as it goes along: the backward pass, and the optimizer's step. TinyJit records the
    kernels of each once and then replays them, so what changes from step to step is an argument."""

    @TinyJit
    def backward(images: Tensor, sigma: Tensor, noise: Tensor, labels: Tensor | None) -> list[Tensor]:
        """Loss, gradient norm and gradients, each in a buffer of its own."""
        total, grads = Tensor.zeros(()), [Tensor.zeros(p.shape) for p in params]
        for k in range(config.accumulate):
            part = slice(k, None, config.accumulate)
            y = None if labels is None else labels[part]
            loss = objective(D, images[part], sigma[part], noise[part], y).sum() / config.batch_size
            grads = [grad + g for grad, g in zip(grads, loss.gradient(*params), strict=True)]
            total = total + loss
        Tensor.realize(total, *grads)
        power = Tensor.zeros(())
        for grad in grads:  # one at a time: a kernel takes at most 63 arguments
            power = (power + grad.square().sum()).contiguous()
        return [total, power.sqrt(), *grads]

    @TinyJit
    def step(lr: Tensor, *grads: Tensor) -> None:
        optimizer.lr.assign(lr)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()

    return backward, step


def train(config: TrainConfig) -> None:
    """Train, or go on training, what `config` says. ValueError for what cannot work; DivergedError."""
    find_clang()
    require(config.precision == "float32", f"precision is {config.precision}: tinygrad trains in float32")
    require(config.run.device in ("auto", "cpu"), "device is PyTorch's: set DEV to choose tinygrad's")
    require(not config.run.compile, "compile is PyTorch's: tinygrad compiles in any case")
    train_set, validation_set = load_data(config.data)
    check(config, train_set)
    if not config.net.num_classes:  # it is shown no labels
        train_set.labels = validation_set.labels = None
    recipe = asdict(config) | {"framework": "tinygrad"}
    del recipe["run"]
    with Run(replace(config.run, device="cpu"), recipe) as run, Context(TRAINING=1):
        require(run.world == 1, "tinygrad trains in one process: leave torchrun out")
        torch.manual_seed(config.seed)
        averaged = TorchDenoiser(config.net).eval().requires_grad_(False)  # PyTorch's first weights
        net = load_torch(Denoiser(config.net), averaged.state_dict())
        params = [p for p in get_parameters(net) if p.is_param]
        optimizer = scalar(Adam(params, config.lr, *config.betas))
        ema = PowerFunctionEMA(net, config.sigma_rels)
        parts = dict(optimizer=TorchState(optimizer), ema=TorchState(ema))  # the weights are the optimizer's
        run.resume(**parts)

        objective = edm_loss if config.objective == "edm" else uncertainty_loss
        header = {
            "network": "edm2_mp_unet", "config": recipe["net"], "label_dropout": config.label_dropout,
            "latent_mean": train_set.latent_mean, "latent_std": train_set.latent_std,
        }

        backward, step = compiled(config, objective, net, params, optimizer)
        for images, labels in run.batches(train_set, config.batch_size, config.seed, config.data.flip):
            sigma, noise, keep = draw(config, run, images.shape[1:])
            if labels is not None and config.label_dropout:
                labels = F.one_hot(labels, config.net.num_classes) * keep[:, None]  # left out: zeros

            total, norm, *grads = backward(*convert([images, sigma, noise, labels], to_tinygrad))
            if run.record(total.item(), norm.item()):
                step(Tensor([learning_rate(config, run.nimg)]).reshape(()), *grads)
                ema.update(run.nimg)

            if run.due(config.run.sample_every):
                averaged.load_state_dict(convert(ema.weights(config.sigma_rels[0]), to_torch))
                run.log(validation=validate(averaged, validation_set, run.device))
                picture(run, averaged)
            elif run.due(config.run.log_every):
                run.log()
            if run.due(config.run.snapshot_every):
                save_snapshots(run.folder / "snapshots", ema, header, config.run.snapshot_precision)
            if run.due(config.run.checkpoint_every) or run.signal:
                run.save(**parts)


if __name__ == "__main__":
    cli(train, PRESETS, "Train an EDM2 in tinygrad: digits without an argument, or a preset and options.")
