"""Train an EDM2.

Paper: Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2, config G.

    python edm2_mp_unet/train.py                                     # digits, a few minutes on a laptop's CPU
    python edm2_mp_unet/train.py --net.long-skip.kind constant       # with ScaleLong's scaling of long skips
    python edm2_mp_unet/train.py --data.source my_images --net.img-size 32 --net.in-channels 3 ...
    torchrun --nproc_per_node 8 edm2_mp_unet/train.py edm2_img64_s --data.source imagenet64.zip

Reading order: `TrainConfig`, `PRESETS`, `learning_rate`, `uncertainty_loss`, `train`. Ctrl-C saves and
stops; the same command goes on.

Deviations: a step whose gradients are not all finite is skipped, where the released code zeroes those; the
learning rate is that of the time after a step, so that the first is not 0. The objective is the paper's by
default: `edm`, that of the other networks of this repository, over the uncertainty that the network learns.
"""

import copy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from edm2_mp_unet.model import PRESETS as NETWORKS
from edm2_mp_unet.model import Denoiser, EDM2Config
from posthoc_ema.ema import PowerFunctionEMA
from posthoc_ema.snapshots import require_lengths, save_snapshots
from shared.check import require
from shared.data import DataConfig, Dataset, load_data
from shared.diffusion import SIGMA_DATA, edm_loss, log_normal_sigma, per_image
from shared.figures import plot_losses, save_grid
from shared.run import Run, RunConfig, cli, validate
from shared.samplers import heun, seed_noise, sigma_steps


@dataclass(frozen=True)
class TrainConfig:
    net: EDM2Config  # the network
    run: Annotated[RunConfig, tyro.conf.arg(name="")]  # what may change when a run is resumed
    data: DataConfig = field(default_factory=DataConfig)  # the images
    objective: Literal["uncertainty", "edm"] = "uncertainty"  # EDM's loss, weighted by uncertainty or not
    P_mean: float = -0.4  # mean of ln(sigma)
    P_std: float = 1.0  # standard deviation of ln(sigma)
    batch_size: int = 128  # images of one step, over all ranks
    accumulate: int = 1  # parts that a rank's batch is computed in, one after the other, to save memory
    lr: float = 1e-2  # learning rate before its decay, the paper's alpha_ref
    decay: float = 70_000  # steps at which the learning rate starts to fall, the paper's t_ref; 0: never
    warmup: int = 10_000_000  # images over which the learning rate rises from 0
    betas: tuple[float, float] = (0.9, 0.99)  # Adam's decays of the gradient and of its square
    label_dropout: float = 0.0  # share of labels left out, for classifier-free guidance; the paper's is 0
    sigma_rels: tuple[float, ...] = (0.05, 0.10)  # relative lengths of the averages of the weights
    precision: Literal["float32", "bfloat16", "float16"] = "float32"  # of the features
    loss_scale: float = 1.0  # factor of the loss in the backward pass, for float16's small gradients
    seed: int = 0  # seed of initial weights, data order and noise

    def __post_init__(self) -> None:
        require(0 < self.lr < float("inf"), f"lr is {self.lr}: it must be positive and finite")
        require_lengths(self.sigma_rels)
        require(all(0 <= beta < 1 for beta in self.betas), f"betas are {self.betas}: they must be in [0, 1)")
        require(min(self.decay, self.warmup) >= 0, "decay and warmup must not be negative")
        require(min(self.P_std, self.loss_scale) > 0, "P_std and loss_scale must be positive")
        require(0 <= self.seed < 1 << 63, f"seed is {self.seed}: it must be in 0..2^63 - 1")
        require(0 <= self.label_dropout < 1, f"label_dropout is {self.label_dropout}: it must be in [0, 1)")
        require(not self.label_dropout or self.net.num_classes, "label_dropout needs a net with classes")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}: it must be at least 1")
        fits = 0 < self.accumulate <= self.batch_size
        require(fits, f"accumulate is {self.accumulate}: it must be in 1..{self.batch_size}, the batch_size")


def released(net: str, duration_Mi: int, lr: float, source: str, **levels: float) -> TrainConfig:
    """A released configuration, logged and saved as often as released, on images or latents of `source`."""
    run = RunConfig(Path(f"runs/{net}"), duration_Mi << 20, 1 << 17, 1 << 23, 1 << 23, 1 << 27)
    options = dict(batch_size=2048, lr=lr, precision="float16", **levels)
    return TrainConfig(NETWORKS[net], run, DataConfig(source), **options)


img512 = partial(released, source="imagenet512_latents.zip")
img64 = partial(released, source="imagenet64.zip", P_mean=-0.8, P_std=1.6, decay=35_000)
PRESETS: dict[str, TrainConfig] = {
    "digits": TrainConfig(
        NETWORKS["digits"],
        RunConfig(Path("runs/edm2_mp_unet"), 115_200, 6_400, 57_600, 9_600, 57_600),
        P_std=1.2, decay=250, warmup=12_800, label_dropout=0.1,
    ),
    "edm2_img512_xxs": img512("edm2_img512_xxs", 2048, 0.0170),
    "edm2_img512_xs":  img512("edm2_img512_xs",  2048, 0.0120),
    "edm2_img512_s":   img512("edm2_img512_s",   2048, 0.0100),
    "edm2_img512_m":   img512("edm2_img512_m",   2048, 0.0090),
    "edm2_img512_l":   img512("edm2_img512_l",   1792, 0.0080),
    "edm2_img512_xl":  img512("edm2_img512_xl",  1280, 0.0070),
    "edm2_img512_xxl": img512("edm2_img512_xxl", 896,  0.0065),
    "edm2_img64_xs":   img64("edm2_img64_xs",    1024, 0.0120),
    "edm2_img64_s":    img64("edm2_img64_s",     1024, 0.0100),
    "edm2_img64_m":    img64("edm2_img64_m",     2048, 0.0090),
    "edm2_img64_l":    img64("edm2_img64_l",     1024, 0.0080),
    "edm2_img64_xl":   img64("edm2_img64_xl",    640,  0.0070),
}


# Inverse-square-root decay, Eq. 67, after a linear ramp-up: normalized weights do not anneal by growing.
def learning_rate(config: TrainConfig, nimg: int) -> float:
    late = nimg / (config.decay * config.batch_size) if config.decay else 1
    return config.lr / max(late, 1) ** 0.5 * min(1, nimg / max(config.warmup, 1))


# The loss as the likelihood of a multi-task problem, one task a noise level, Eqs. 14-16 and 21.
def uncertainty_loss(D: nn.Module, images: Tensor, sigma: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
    """EDM's loss over its learned expectation exp(u), plus u: all noise levels weigh alike. (B,)."""
    D_x, u = D(images + per_image(sigma) * noise, sigma, labels, return_logvar=True)
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return weight / u.exp() * (D_x - images).square().mean((1, 2, 3)) + u


def check(config: TrainConfig, dataset: Dataset) -> None:
    """Raise ValueError where the network cannot take the data."""
    net, size = config.net, (config.net.in_channels, config.net.img_size, config.net.img_size)
    require(dataset.shape == size, f"{config.data.source} has images {dataset.shape}, but net takes {size}")
    fits, had = net.num_classes in (0, dataset.num_classes), dataset.num_classes
    require(fits, f"net has {net.num_classes} classes, but {config.data.source} has {had}")


def draw(config: TrainConfig, run: Run, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a step's randomness, which is drawn for the global batch: noise levels (B,), noise
    (B, *shape) and the labels to keep (B,)."""
    B, options = config.batch_size, dict(generator=run.generator(config.seed), device=run.device)
    sigma = log_normal_sigma(torch.randn(B, **options), config.P_mean, config.P_std)
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
        net = Denoiser(config.net).to(run.device, memory_format=torch.channels_last)  # faster
        averaged = copy.deepcopy(net).eval().requires_grad_(False)
        optimizer = torch.optim.Adam(net.parameters(), config.lr, config.betas, fused=True)
        ema = PowerFunctionEMA(net, config.sigma_rels)
        parts = dict(net=net, optimizer=optimizer, ema=ema)
        run.resume(**parts)
        for p, state in optimizer.state.items():  # fused Adam takes memory as it lies: as p's, it must be
            state |= {key: torch.empty_like(p).copy_(v) for key, v in state.items() if v.ndim == p.ndim == 4}

        D, objective = run.compile(net), edm_loss if config.objective == "edm" else uncertainty_loss
        header = {
            "network": "edm2_mp_unet", "config": recipe["net"], "label_dropout": config.label_dropout,
            "latent_mean": train_set.latent_mean, "latent_std": train_set.latent_std,
        }
        low = torch.float16 if config.precision == "float16" else torch.bfloat16
        autocast = torch.autocast(run.device.type, low, enabled=config.precision != "float32")

        for images, labels in run.batches(train_set, config.batch_size, config.seed, config.data.flip):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, run.nimg)

            sigma, noise, keep = draw(config, run, images.shape[1:])
            if labels is not None and config.label_dropout:
                labels = F.one_hot(labels, config.net.num_classes) * keep[:, None]  # left out: zeros

            total = torch.zeros((), device=run.device)
            for k in range(min(config.accumulate, len(images))):
                part = slice(k, None, config.accumulate)
                y = None if labels is None else labels[part]
                with autocast:
                    loss = objective(D, images[part], sigma[part], noise[part], y).sum() / config.batch_size
                (config.loss_scale * loss).backward()
                total += loss.detach()
            torch._foreach_div_([p.grad for p in net.parameters() if p.grad is not None], config.loss_scale)
            if run.reduce(net, total):
                optimizer.step()
                ema.update(run.nimg)
            optimizer.zero_grad()

            if run.due(config.run.sample_every):
                averaged.load_state_dict(ema.weights(config.sigma_rels[0]))
                run.log(validation=validate(averaged, validation_set, run.device))
                picture(run, averaged)
            elif run.due(config.run.log_every):
                run.log()
            if run.due(config.run.snapshot_every) and run.rank == 0:
                save_snapshots(run.folder / "snapshots", ema, header, config.run.snapshot_precision)
            if run.due(config.run.checkpoint_every) or run.signal:
                run.save(**parts)


@torch.no_grad()
def picture(run: Run, D: Denoiser, rows: int = 8) -> None:
    """Draw samples/<nimg>.png, a column a class (ten, where there are none or more), and loss.png."""
    if run.rank > 0:
        return
    net = D.config
    columns = min(net.num_classes, 10) or 10
    shape = (net.in_channels, net.img_size, net.img_size)
    noise = torch.from_numpy(seed_noise(range(rows * columns), shape)).to(run.device)
    labels = torch.arange(columns, device=run.device).repeat(rows) if net.num_classes else None
    images = heun(D, noise, labels, sigma_steps(18))
    save_grid(run.folder / "samples" / f"{run.nimg:09d}.png", images.cpu().numpy(), columns)
    plot_losses(run.folder)


if __name__ == "__main__":
    cli(train, PRESETS, "Train an EDM2: digits without an argument, or a preset and options.")
