"""Train an ADM or a sibling in tinygrad: the twin of `train.py`, whose configs, first weights, data and noise
it shares.

Papers: as in `train.py`. Of one config and seed both frameworks start from the same weights and see the same
batches, noise levels and noise: their losses agree for as long as rounding allows. Folders and snapshots have
one format, and `sample.py` draws from either's.

    python adm_unet/train_tinygrad.py                      # digits, 16 minutes on two busy cores
    python adm_unet/train_tinygrad.py classifier           # of noisy digits, to guide with
    DEV=CUDA python adm_unet/train_tinygrad.py imagenet64  # tinygrad finds its device by itself

Reading order: `PRESETS`, `compiled`, `train`. Ctrl-C saves and stops; the same command goes on.

Deviations: one process, float32; TinyJit compiles in any case. Validation and pictures are PyTorch's, of the
same averaged weights. Dropout draws from tinygrad's own random numbers, and others after resuming. The digits
preset takes fewer images than PyTorch's, in smaller steps: on a CPU convolutions take ten times as long.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tinygrad import Context, Tensor, TinyJit
from tinygrad.nn.optim import AdamW, Optimizer
from tinygrad.nn.state import get_parameters

from adm_unet.iddpm import LossSecondMoment
from adm_unet.model import build as build_torch
from adm_unet.model_tinygrad import Encoder, build
from adm_unet.tasks import gathered, make_process, picture, training_loss, validation
from adm_unet.train import PRESETS as TORCH_PRESETS
from adm_unet.train import TrainConfig, check, describe, draw, learning_rate
from posthoc_ema.ema_tinygrad import PowerFunctionEMA
from posthoc_ema.snapshots import save_snapshots
from posthoc_ema.tinygrad_bridge import TorchState, convert, find_clang, load_torch, to_tinygrad, to_torch
from shared.check import require
from shared.data import load_data
from shared.run import Run, cli

PRESETS: dict[str, TrainConfig] = {
    name: replace(config, run=replace(config.run, out=Path(f"{config.run.out}_tinygrad")))
    for name, config in TORCH_PRESETS.items()
}
DIGITS = PRESETS["digits"]
PRESETS["digits"] = replace(
    DIGITS, batch_size=64, warmup=6_400, run=replace(DIGITS.run, duration=32_000, sample_every=16_000)
)


def compiled(
    config: TrainConfig, task: tuple, net: Encoder, params: list[Tensor], optimizer: Optimizer
) -> tuple[Callable, Callable]:
    """What PyTorch does as it goes along: the backward pass, and the optimizer's step. TinyJit records the
    kernels of each once and then replays them, so what changes from step to step is an argument."""

    @TinyJit
    def backward(
        images: Tensor, labels: Tensor | None, level: Tensor, weight: Tensor, noise: Tensor
    ) -> list[Tensor]:
        """Losses, gradient norm and gradients, each in a buffer of its own."""
        losses, grads = [], [Tensor.zeros(p.shape) for p in params]
        for k in range(config.accumulate):
            part = slice(k, None, config.accumulate)
            y = None if labels is None else labels[part]
            loss = training_loss(net, *task, images[part], y, level[part], noise[part])
            mean = (loss * weight[part]).sum() / config.batch_size
            grads = [grad + g for grad, g in zip(grads, mean.gradient(*params), strict=True)]
            losses.append(loss)
        Tensor.realize(*losses, *grads)
        power = Tensor.zeros(())
        for grad in grads:  # one at a time: a kernel takes at most 63 arguments
            power = (power + grad.square().sum()).contiguous()
        return [Tensor.cat(*losses), power.sqrt(), *grads]

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
    learned = config.kind not in ("edm", "simple", "classifier")  # the losses that teach a variance
    process = make_process(config.schedule, config.num_steps, "learned" if learned else "large")
    config = replace(config, net=replace(config.net, learn_sigma=learned))
    recipe = asdict(config) | {"framework": "tinygrad"}
    del recipe["run"]
    with Run(replace(config.run, device="cpu"), recipe) as run, Context(TRAINING=1):
        require(run.world == 1, "tinygrad trains in one process: leave torchrun out")
        torch.manual_seed(config.seed)
        averaged = build_torch(config.net).eval().requires_grad_(False)  # PyTorch's first weights
        net = load_torch(build(config.net), averaged.state_dict())
        params = [p for p in get_parameters(net) if p.is_param]
        optimizer = AdamW(params, config.lr, *config.betas, weight_decay=config.weight_decay)
        ema = PowerFunctionEMA(net, config.sigma_rels)
        sampler = LossSecondMoment(config.num_steps)
        parts = dict(optimizer=TorchState(optimizer), ema=TorchState(ema), sampler=sampler)
        run.resume(**parts)  # the weights are the optimizer's

        header = describe(config, train_set)
        task = (config.net, config.kind, process)

        parted = np.argsort(np.arange(config.batch_size) % config.accumulate, kind="stable")
        place = np.argsort(parted)  # of each image's loss among those of all parts, one part after the other
        backward, step = compiled(config, task, net, params, optimizer)
        for images, labels in run.batches(train_set, config.batch_size, config.seed, config.data.flip):
            level, weight, noise, labels = draw(config, run, sampler, images, labels)
            steps = level if isinstance(level, torch.Tensor) else torch.from_numpy(level)
            args = convert([images, labels, steps, weight, noise], to_tinygrad)
            losses, norm, *grads = backward(*args)
            losses = losses.numpy()[place]
            if run.record(float((losses * weight.numpy()).sum()) / config.batch_size, norm.item()):
                step(Tensor([learning_rate(config, run.nimg)]), *grads)
                ema.update(run.nimg)
                if config.importance:
                    sampler.update(*gathered(level, losses))

            if run.due(config.run.sample_every):
                averaged.load_state_dict(convert(ema.weights(config.sigma_rels[0]), to_torch))
                run.log(validation=validation(averaged, *task, validation_set, run.device))
                picture(run, averaged, *task, validation_set)
            elif run.due(config.run.log_every):
                run.log()
            if run.due(config.run.snapshot_every):
                save_snapshots(run.folder / "snapshots", ema, header, config.run.snapshot_precision)
            if run.due(config.run.checkpoint_every) or run.signal:
                run.save(**parts)


if __name__ == "__main__":
    cli(train, PRESETS, "Train an ADM in tinygrad: digits without an argument, or a preset and options.")
