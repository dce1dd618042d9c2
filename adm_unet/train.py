"""Train an ADM: the UNet, its super-resolution sibling or its classifier.

Papers: Diffusion Models Beat GANs, arXiv:2105.05233v4; Improved DDPM, arXiv:2102.09672v1; objective of EDM,
arXiv:2206.00364v2; power-function EMA of EDM2, arXiv:2312.02696v2.

    python adm_unet/train.py                      # digits, a few minutes on a laptop's CPU
    python adm_unet/train.py classifier           # of noisy digits, to guide with
    python adm_unet/train.py superres             # enlarges digits of 4x4 pixels
    python adm_unet/train.py --objective iddpm    # the papers' loss and learned variance
    torchrun --nproc_per_node 8 adm_unet/train.py imagenet64 --data.source imagenet64.zip

Reading order: `TrainConfig`, `PRESETS`, `draw`, `train`; losses are in `tasks.py`. Ctrl-C saves and stops;
the same command goes on.

Deviations: the objective is EDM's by default, so that the networks of this repository compare; `iddpm` is the
papers'. Weights are averaged by power functions, not by an exponential, a classifier's too.
"""

import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from adm_unet.iddpm import LossSecondMoment, Objective
from adm_unet.model import PRESETS as NETWORKS
from adm_unet.model import ADMConfig, build
from adm_unet.tasks import Schedule, gathered, make_process, picture, training_loss, validation
from posthoc_ema.ema import PowerFunctionEMA
from posthoc_ema.snapshots import require_lengths, save_snapshots
from shared.check import require
from shared.data import DataConfig, Dataset, load_data
from shared.diffusion import log_normal_sigma
from shared.run import Run, RunConfig, cli


@dataclass(frozen=True)
class TrainConfig:
    net: ADMConfig  # the network
    run: Annotated[RunConfig, tyro.conf.arg(name="")]  # what may change when a run is resumed
    data: DataConfig = field(default_factory=DataConfig)  # the images
    objective: Literal["edm", "iddpm"] = "edm"  # loss and noise levels: EDM's, or the papers' process
    loss: Objective = "hybrid"  # the iddpm objective's loss; all but simple learn a variance
    P_mean: float = -1.2  # mean of ln(sigma) in the edm objective
    P_std: float = 1.2  # standard deviation of ln(sigma) in the edm objective
    schedule: Schedule = "linear"  # noise of the process's steps, which a classifier is trained on too
    num_steps: int = 1000  # steps of the process
    importance: bool = False  # draw steps of the iddpm objective by their losses, for loss vlb
    batch_size: int = 128  # images of one step, over all ranks
    accumulate: int = 1  # parts that a rank's batch is computed in, one after the other, to save memory
    lr: float = 1e-4  # learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's decays of the gradient and of its square
    weight_decay: float = 0.0  # AdamW's weight decay
    warmup: int = 0  # images over which the learning rate rises from 0
    anneal: bool = False  # let the learning rate fall to 0 over the whole duration
    label_dropout: float = 0.0  # share of labels replaced by the null class, for classifier-free guidance
    sigma_rels: tuple[float, ...] = (0.05, 0.10)  # relative lengths of the averages of the weights
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: the network under autocast
    seed: int = 0  # seed of initial weights, data order and noise

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), f"lr is {self.lr}: it must be positive and finite")
        require_lengths(self.sigma_rels)
        require(all(0 <= beta < 1 for beta in self.betas), f"betas are {self.betas}: they must be in [0, 1)")
        require(0 <= self.weight_decay < 1, f"weight_decay is {self.weight_decay}: it must be in [0, 1)")
        require(self.warmup >= 0, f"warmup is {self.warmup}: it must not be negative")
        require(abs(self.P_mean) < 20, f"P_mean is {self.P_mean}: it must be in -20..20")
        require(0 < self.P_std < 20, f"P_std is {self.P_std}: it must be in 0..20")
        require(0 <= self.seed < 1 << 63, f"seed is {self.seed}: it must be in 0..2^63 - 1")
        require(0 <= self.label_dropout < 1, f"label_dropout is {self.label_dropout}: it must be in [0, 1)")
        require(self.label_dropout == 0 or self.net.null_class, "label_dropout needs a net with null_class")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}: it must be at least 1")
        fits = 0 < self.accumulate <= self.batch_size
        require(fits, f"accumulate is {self.accumulate}: it must be in 1..{self.batch_size}, the batch_size")
        require(self.num_steps > 0, f"num_steps is {self.num_steps}: it must be positive")

    @property
    def kind(self) -> str:
        """What the network learns: classifier, edm, or a loss of iddpm."""
        return "classifier" if self.net.pool else self.loss if self.objective == "iddpm" else "edm"


def released(
    net: str, data: str, steps: int, batch_size: int = 256, schedule: Schedule = "linear", **others
) -> TrainConfig:
    """A released configuration; a log line every 100 steps, 64 samples and 32 snapshots over its length."""
    nimg, data = steps * batch_size, DataConfig(data, flip=True)
    run = RunConfig(Path(f"runs/{net}"), nimg, 100 * batch_size, nimg // 64, nimg // 32, nimg // 64)
    return TrainConfig(NETWORKS[net], run, data, schedule=schedule, batch_size=batch_size, **others)


def digits(net: str, out: str, duration: int, **others) -> TrainConfig:
    run = RunConfig(Path(out), duration, 6_400, 32_000, 12_000, 32_000)
    return TrainConfig(NETWORKS[net], run, P_mean=-0.8, P_std=1.0, betas=(0.9, 0.99), warmup=12_800, **others)


DECAY = dict(lr=3e-4, weight_decay=0.05, anneal=True)  # of the released classifiers
PRESETS: dict[str, TrainConfig] = {
    "digits":          digits("digits", "runs/adm_unet", 96_000, lr=2e-3, label_dropout=0.1),
    "superres":        digits("superres", "runs/adm_superres", 48_000, lr=2e-3, label_dropout=0.1),
    "classifier":      digits("classifier", "runs/adm_classifier", 96_000, **DECAY | dict(lr=1e-3)),
    "imagenet64":      released("imagenet64", "imagenet64.zip", 540_000, 2048, "cosine", lr=3e-4),
    "imagenet128":     released("imagenet128", "imagenet128.zip", 4_360_000),
    "imagenet256":     released("imagenet256", "imagenet256.zip", 1_980_000),
    "imagenet512":     released("imagenet512", "imagenet512.zip", 1_940_000),
    "uncond256":       released("uncond256", "imagenet256.zip", 1_980_000),
    "lsun256":         released("lsun256", "lsun256.zip", 500_000),
    "superres64_256":  released("superres64_256", "imagenet256.zip", 500_000),
    "superres128_512": released("superres128_512", "imagenet512.zip", 500_000),
    "classifier64":    released("classifier64", "imagenet64.zip", 300_000, schedule="cosine", **DECAY),
    "classifier128":   released("classifier128", "imagenet128.zip", 300_000, **DECAY),
    "classifier256":   released("classifier256", "imagenet256.zip", 300_000, **DECAY),
    "classifier512":   released("classifier512", "imagenet512.zip", 300_000, **DECAY),
}


def learning_rate(config: TrainConfig, nimg: int) -> float:
    """Linear warm-up, then constant or, annealed, a line to 0 at the end."""
    fall = 1 - nimg / config.run.duration if config.anneal else 1.0
    return config.lr * min(1.0, nimg / max(config.warmup, 1)) * max(fall, 0.0)


def check(config: TrainConfig, dataset: Dataset) -> None:
    """Raise ValueError where the network cannot take the data."""
    net, size = config.net, (config.net.in_channels, config.net.img_size, config.net.img_size)
    require(dataset.shape == size, f"{config.data.source} has images {dataset.shape}, but net takes {size}")
    classes, had = net.num_classes - net.null_class, dataset.num_classes
    require(classes in (0, had), f"net has {classes} classes, but {config.data.source} has {had}")


def draw(
    config: TrainConfig, run: Run, sampler: LossSecondMoment, images: Tensor, labels: Tensor | None
) -> tuple:
    """This rank's part of a step's randomness, which is drawn for the global batch: noise levels, weights of
    losses, noise like the images, and labels, some of them dropped."""
    B, options = config.batch_size, dict(generator=run.generator(config.seed), device=run.device)
    weight = torch.ones(B, device=run.device)
    if config.kind == "edm":
        level = log_normal_sigma(torch.randn(B, **options), config.P_mean, config.P_std)
    else:  # steps, on the host, where the tables of the process are
        level, weights = sampler.draw(torch.rand(B, **options).cpu().numpy())
        weight = torch.from_numpy(weights).to(weight)
    noise = torch.randn(B, *images.shape[1:], **options)
    keep = torch.rand(B, **options) >= config.label_dropout
    if labels is not None and config.label_dropout:
        labels = labels.where(keep[run.part], config.net.num_classes - 1)
    return level[run.part], weight[run.part], noise[run.part], labels


def describe(config: TrainConfig, dataset: Dataset) -> dict:
    """What a snapshot's header says besides its time and length."""
    process = {"objective": config.kind, "schedule": config.schedule, "num_steps": config.num_steps}
    statistics = {"latent_mean": dataset.latent_mean, "latent_std": dataset.latent_std}
    return {"network": "adm_unet", "config": asdict(config.net), **process, **statistics}


def train(config: TrainConfig) -> None:
    """Train, or go on training, what `config` says. ValueError for what cannot work; DivergedError."""
    train_set, validation_set = load_data(config.data)
    check(config, train_set)
    if not config.net.num_classes:  # it is shown no labels
        train_set.labels = validation_set.labels = None
    learned = config.kind not in ("edm", "simple", "classifier")  # the losses that teach a variance
    process = make_process(config.schedule, config.num_steps, "learned" if learned else "large")
    config = replace(config, net=replace(config.net, learn_sigma=learned))
    recipe = asdict(config)
    del recipe["run"]
    with Run(config.run, recipe) as run:
        torch.manual_seed(config.seed)
        net = build(config.net).to(run.device)
        averaged = copy.deepcopy(net).to(memory_format=torch.channels_last).eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(
            net.parameters(), config.lr, config.betas, weight_decay=config.weight_decay, fused=True
        )
        ema = PowerFunctionEMA(net, config.sigma_rels)
        sampler = LossSecondMoment(config.num_steps)
        parts = dict(net=net, optimizer=optimizer, ema=ema, sampler=sampler)
        run.resume(**parts)

        compiled = run.compile(net)
        header = describe(config, train_set)
        autocast = torch.autocast(run.device.type, torch.bfloat16, enabled=config.precision == "bfloat16")
        task = (config.net, config.kind, process)

        for images, labels in run.batches(train_set, config.batch_size, config.seed, config.data.flip):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, run.nimg)
            level, weight, noise, labels = draw(config, run, sampler, images, labels)
            losses = torch.zeros(len(images), device=run.device)
            for k in range(min(config.accumulate, len(images))):
                part = slice(k, None, config.accumulate)
                y = None if labels is None else labels[part]
                with autocast:
                    loss = training_loss(compiled, *task, images[part], y, level[part], noise[part])
                ((loss * weight[part]).sum() / config.batch_size).backward()
                losses[part] = loss.detach().float()
            if run.reduce(net, (losses * weight).sum() / config.batch_size):
                optimizer.step()
                ema.update(run.nimg)
                if config.importance:
                    sampler.update(*gathered(level, losses.cpu().numpy()))
            optimizer.zero_grad()

            if run.due(config.run.sample_every):
                averaged.load_state_dict(ema.weights(config.sigma_rels[0]))
                run.log(validation=validation(averaged, *task, validation_set, run.device))
                picture(run, averaged, *task, validation_set)
            elif run.due(config.run.log_every):
                run.log()
            if run.due(config.run.snapshot_every) and run.rank == 0:
                save_snapshots(run.folder / "snapshots", ema, header, config.run.snapshot_precision)
            if run.due(config.run.checkpoint_every) or run.signal:
                run.save(**parts)


if __name__ == "__main__":
    cli(train, PRESETS, "Train an ADM: digits without an argument, or a preset and options.")
