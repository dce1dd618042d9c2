"""Train a U-ViT.

Papers: All are Worth Words, arXiv:2209.12152v4; objective of EDM, arXiv:2206.00364v2; power-function EMA of
EDM2, arXiv:2312.02696v2.

    python minimal_uvit/train.py                                     # digits, a few minutes on a laptop's CPU
    python minimal_uvit/train.py s2_cifar10 --objective vp           # the paper's CIFAR-10 network and loss
    python minimal_uvit/train.py --data.source my_images --net.img-size 32 --net.in-channels 3 ...
    torchrun --nproc_per_node 8 minimal_uvit/train.py m4_imagenet64 --data.source imagenet64.zip

Reading order: `TrainConfig`, `PRESETS`, `draw`, `train`. Ctrl-C saves and stops; the same command goes on.

Deviations: the objective is EDM's by default, so that the networks of this repository compare; `vp` is the
paper's, without the times below 1e-3. Weights are averaged by power functions, not by an exponential.
"""

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from minimal_uvit.model import PRESETS as NETWORKS
from minimal_uvit.model import UViT, UViTConfig
from posthoc_ema.ema import PowerFunctionEMA
from posthoc_ema.snapshots import require_lengths, save_snapshots
from shared.check import require
from shared.data import DataConfig, Dataset, load_data
from shared.diffusion import EDMPrecond, VPPrecond, edm_loss, log_normal_sigma, mse, vp_uniform_sigma
from shared.figures import plot_losses, save_grid
from shared.run import Run, RunConfig, cli, validate
from shared.samplers import heun, seed_noise, sigma_steps


@dataclass(frozen=True)
class TrainConfig:
    net: UViTConfig  # the network
    run: Annotated[RunConfig, tyro.conf.arg(name="")]  # what may change when a run is resumed
    data: DataConfig = field(default_factory=DataConfig)  # the images
    objective: Literal["edm", "vp"] = "edm"  # loss and noise levels: EDM's, or the paper's noise prediction
    P_mean: float = -1.2  # mean of ln(sigma) in the edm objective
    P_std: float = 1.2  # standard deviation of ln(sigma) in the edm objective
    batch_size: int = 128  # images of one step, over all ranks
    accumulate: int = 1  # parts that a rank's batch is computed in, one after the other, to save memory
    lr: float = 2e-4  # learning rate
    betas: tuple[float, float] = (0.99, 0.999)  # AdamW's decays of the gradient and of its square
    weight_decay: float = 0.03  # AdamW's weight decay
    warmup: int = 320_000  # images over which the learning rate rises from 0
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


def released(
    net: str,
    data: DataConfig,
    steps: int,
    batch_size: int = 1024,
    betas: tuple[float, float] = (0.99, 0.99),
    warmup_steps: int = 5000,
    **others: float,
) -> TrainConfig:
    """A released configuration; a log line every 100 steps, 64 samples and 32 snapshots over its length."""
    nimg = steps * batch_size
    run = RunConfig(Path(f"runs/{net}"), nimg, 100 * batch_size, nimg // 64, nimg // 32, nimg // 64)
    warmup = warmup_steps * batch_size
    return TrainConfig(NETWORKS[net], run, data, batch_size=batch_size, betas=betas, warmup=warmup, **others)


CIFAR10, CELEBA64 = DataConfig("cifar10", flip=True), DataConfig("celeba64.zip", flip=True)
IMAGENET64, LATENT256, LATENT512 = map(DataConfig, ("imagenet64.zip", "latents256.zip", "latents512.zip"))
PRESETS: dict[str, TrainConfig] = {
    "digits": TrainConfig(
        NETWORKS["digits"],
        RunConfig(Path("runs/minimal_uvit"), 192_000, 6_400, 32_000, 12_000, 32_000),
        P_mean=-0.8, P_std=1.0, lr=3e-3, betas=(0.9, 0.99), warmup=12_800, label_dropout=0.1,
    ),
    "s2_cifar10":     released("s2_cifar10", CIFAR10, 500_000, 128, (0.99, 0.999), 2500),
    "s4_celeba64":    released("s4_celeba64", CELEBA64, 500_000, 128),
    "m4_imagenet64":  released("m4_imagenet64", IMAGENET64, 300_000, lr=3e-4),
    "l4_imagenet64":  released("l4_imagenet64", IMAGENET64, 300_000, lr=3e-4),
    "s2_deep_256":    released("s2_deep_256", LATENT256, 300_000, label_dropout=0.1),
    "l2_imagenet256": released("l2_imagenet256", LATENT256, 300_000, label_dropout=0.15),
    "h2_imagenet256": released("h2_imagenet256", LATENT256, 500_000, label_dropout=0.1),
    "l4_imagenet512": released("l4_imagenet512", LATENT512, 500_000, label_dropout=0.15),
    "h4_imagenet512": released("h4_imagenet512", LATENT512, 500_000, label_dropout=0.1),
}


def learning_rate(config: TrainConfig, nimg: int) -> float:
    """Linear warm-up, then constant."""
    return config.lr * min(1.0, nimg / max(config.warmup, 1))


# Noise prediction |n - F|^2, section 2: what is left of D's error over sigma^2.
def vp_loss(D: VPPrecond, images: Tensor, sigma: Tensor, noise: Tensor, labels: Tensor | None) -> Tensor:
    return mse(D, images, sigma, noise, labels) / (sigma * sigma)


def check(config: TrainConfig, dataset: Dataset) -> None:
    """Raise ValueError where the network cannot take the data."""
    net, size = config.net, (config.net.in_channels, config.net.img_size, config.net.img_size)
    require(dataset.shape == size, f"{config.data.source} has images {dataset.shape}, but net takes {size}")
    classes, had = net.num_classes - net.null_class, dataset.num_classes
    require(classes in (0, had), f"net has {classes} classes, but {config.data.source} has {had}")
    require(not net.context_tokens, "training on text needs text tokens, which no data set here has")


def draw(config: TrainConfig, run: Run, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a step's randomness, which is drawn for the global batch: noise levels (B,), noise
    (B, *shape) and the labels to keep (B,)."""
    B, options = config.batch_size, dict(generator=run.generator(config.seed), device=run.device)
    if config.objective == "edm":
        sigma = log_normal_sigma(torch.randn(B, **options), config.P_mean, config.P_std)
    else:
        sigma = vp_uniform_sigma(torch.rand(B, **options))
    noise = torch.randn(B, *shape, **options)
    keep = torch.rand(B, **options) >= config.label_dropout
    return sigma[run.part], noise[run.part], keep[run.part]


def train(config: TrainConfig) -> None:
    """Train, or go on training, what `config` says. ValueError for what cannot work; DivergedError."""
    train_set, validation_set = load_data(config.data)
    check(config, train_set)
    if not config.net.num_classes:  # it is shown no labels
        train_set.labels = validation_set.labels = None
    recipe = asdict(config)
    del recipe["run"]
    with Run(config.run, recipe) as run:
        torch.manual_seed(config.seed)
        net = UViT(config.net).to(run.device)
        averaged = copy.deepcopy(net).eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(
            net.parameters(), config.lr, config.betas, weight_decay=config.weight_decay, fused=True
        )
        ema = PowerFunctionEMA(net, config.sigma_rels)
        parts = dict(net=net, optimizer=optimizer, ema=ema)
        run.resume(**parts)

        precond, objective = (EDMPrecond, edm_loss) if config.objective == "edm" else (VPPrecond, vp_loss)
        D = precond(run.compile(net))
        header = {
            "network": "minimal_uvit", "config": recipe["net"], "objective": config.objective,
            "latent_mean": train_set.latent_mean, "latent_std": train_set.latent_std,
        }
        autocast = torch.autocast(run.device.type, torch.bfloat16, enabled=config.precision == "bfloat16")

        for images, labels in run.batches(train_set, config.batch_size, config.seed, config.data.flip):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, run.nimg)
            sigma, noise, keep = draw(config, run, images.shape[1:])
            if labels is not None and config.label_dropout:
                labels = labels.where(keep, config.net.num_classes - 1)

            total = torch.zeros((), device=run.device)
            for k in range(min(config.accumulate, len(images))):
                part = slice(k, None, config.accumulate)
                y = None if labels is None else labels[part]
                with autocast:
                    loss = objective(D, images[part], sigma[part], noise[part], y).sum() / config.batch_size
                loss.backward()
                total += loss.detach()
            if run.reduce(net, total):
                optimizer.step()
                ema.update(run.nimg)
            optimizer.zero_grad()

            if run.due(config.run.sample_every):
                averaged.load_state_dict(ema.weights(config.sigma_rels[0]))
                run.log(validation=validate(precond(averaged), validation_set, run.device))
                picture(run, precond(averaged), config.net)
            elif run.due(config.run.log_every):
                run.log()
            if run.due(config.run.snapshot_every) and run.rank == 0:
                save_snapshots(run.folder / "snapshots", ema, header, config.run.snapshot_precision)
            if run.due(config.run.checkpoint_every) or run.signal:
                run.save(**parts)


@torch.no_grad()
def picture(run: Run, D: EDMPrecond | VPPrecond, net: UViTConfig, rows: int = 8) -> None:
    """Draw samples/<nimg>.png, a column a class (ten, where there are none or more), and loss.png."""
    if run.rank > 0:
        return
    classes = net.num_classes - net.null_class
    columns = min(classes, 10) or 10
    shape = (net.in_channels, net.img_size, net.img_size)
    noise = torch.from_numpy(seed_noise(range(rows * columns), shape)).to(run.device)
    labels = torch.arange(columns, device=run.device).repeat(rows) if classes else None
    images = heun(D, noise, labels, sigma_steps(18))
    save_grid(run.folder / "samples" / f"{run.nimg:09d}.png", images.cpu().numpy(), columns)
    plot_losses(run.folder)


if __name__ == "__main__":
    cli(train, PRESETS, "Train a U-ViT: digits without an argument, or a preset and options.")
