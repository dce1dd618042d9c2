"""What the three networks learn, and how they look from outside: losses, denoisers, validation, pictures.

Papers: arXiv:2105.05233v4 (classifier, section 4; super-resolution, section 5.2); EDM, arXiv:2206.00364v2.

The UNet denoises; the super-resolution UNet does so beside a small copy of the image; the classifier names
the class of noisy images of the process. An `objective` is edm, whose levels of noise are sigmas, or a loss
of Improved DDPM, or classifier, whose levels are steps of the process.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from adm_unet.iddpm import IDDPM, SCHEDULES, Gradient, Net, like, losses, space_timesteps
from adm_unet.model import ADMConfig
from shared.check import require
from shared.data import Dataset
from shared.diffusion import Array, Denoiser, EDMPrecond, edm_loss, per_image
from shared.figures import plot_losses, save_grid
from shared.run import VALIDATION_SIGMAS, Run, validate
from shared.samplers import heun, seed_noise, sigma_steps

Schedule = Literal["linear", "cosine"]


def make_process(schedule: Schedule, num_steps: int, variance: str, spacing: str = "") -> IDDPM:
    """Networks are told times of 0..1000, however many steps there are."""
    steps = space_timesteps(num_steps, spacing)
    return IDDPM(SCHEDULES[schedule](num_steps), steps, variance, rescale=True)


def shrink(images: Array, net: ADMConfig) -> Array | None:
    """The small images that super-resolution enlarges, means of squares; None for other networks."""
    h = net.low_res
    require(not h or net.img_size % h == 0, f"low_res is {h}: it must divide img_size {net.img_size}")
    return reduce(images, "B C (h a) (w b) -> B C h w", "mean", h=h, w=h) if h else None


def beside(net: Callable, low_res: Array | None) -> Net:
    """A network as `(x, timesteps, labels)`, its small images, if any, given."""
    if low_res is None:
        return net
    return lambda x, timesteps, labels=None: net(x, timesteps, low_res, labels)


# Learning ---------------------------------------------------------------------------------------------------


def training_loss(
    net: Callable, config: ADMConfig, objective: str, process: IDDPM,
    images: Array, labels: Array | None, level: Array, noise: Array,
) -> Array:
    """One value an image: (B,). Arithmetic, of torch's or tinygrad's arrays."""
    if config.pool:
        x_t = process.noisy(images, level, noise)
        log_p = net(x_t, process.timesteps(x_t, level)).log_softmax(1)         # B K
        return -(log_p * (labels[:, None] == like(log_p, np.arange(config.num_classes)))).sum(1)
    net = beside(net, shrink(images, config))
    if objective == "edm":
        return edm_loss(EDMPrecond(net), images, level, noise, labels)
    return losses(process, net, images, level, noise, labels, objective)["loss"]


def gathered(*arrays: np.ndarray) -> list[np.ndarray]:
    """Each array, of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return list(arrays)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, arrays)
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


# Looking ----------------------------------------------------------------------------------------------------


def denoiser(net: Callable, objective: str, process: IDDPM, low_res: Tensor | None = None) -> Denoiser:
    """D(x; sigma, labels) of a network that was trained for `objective`."""
    net = beside(net, low_res)
    return EDMPrecond(net) if objective == "edm" else process.denoiser(net)


def noise_predictor(D: Denoiser, process: IDDPM) -> Net:
    """A denoiser as a network of the process, without a variance: undoes `IDDPM.denoiser`."""

    def net(x_t: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        sigma = np.interp(timesteps.cpu().numpy(), process.times, process.sigma)
        sigma = x_t.new_tensor(sigma)
        x = x_t * per_image((1 + sigma**2) ** 0.5)
        return (x - D(x, sigma, labels)) / per_image(sigma)

    return net


def classifier_gradient(classifier: Callable, labels: Tensor, scale: float) -> Gradient:
    """Gradient of scale * log p(labels | x) with respect to x, section 4."""

    @torch.enable_grad()
    def gradient(x: Tensor, timesteps: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        log_p = classifier(x, timesteps).log_softmax(1).gather(1, labels[:, None])
        return torch.autograd.grad(scale * log_p.sum(), x)[0]

    return gradient


@torch.no_grad()
def validation(
    net: Callable, config: ADMConfig, objective: str, process: IDDPM, dataset: Dataset, device: torch.device
) -> dict[str, float]:
    """{sigma: loss} of held-out images: EDM's, whatever the objective, or a classifier's cross-entropy."""
    if len(dataset) == 0:
        return {}
    images = torch.from_numpy(dataset.images(np.arange(min(len(dataset), 512)))).to(device)
    if not config.pool:
        return validate(denoiser(net, objective, process, shrink(images, config)), dataset, device)
    labels = torch.from_numpy(dataset.labels[: len(images)]).to(device)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(device)
    logits = {
        sigma: net(*process.scaled(images + sigma * noise, torch.full((len(images),), sigma, device=device)))
        for sigma in VALIDATION_SIGMAS
    }
    return {str(sigma): F.cross_entropy(y, labels).item() for sigma, y in logits.items()}


@torch.no_grad()
def picture(
    run: Run, net: Callable, config: ADMConfig, objective: str, process: IDDPM, dataset: Dataset
) -> None:
    """Draw loss.png and samples/<nimg>.png, a column a class (ten, where there are none or more). For
    super-resolution, rows of three: the small images, what is made of them, the real ones."""
    if run.rank > 0:
        return
    plot_losses(run.folder)
    if config.pool or (config.low_res and len(dataset) == 0):
        return
    classes = config.num_classes - config.null_class
    columns = min(classes, 10) or 10
    rows = 3 if config.low_res else 8
    shape = (config.in_channels, config.img_size, config.img_size)
    noise = torch.from_numpy(seed_noise(range(rows * columns), shape)).to(run.device)
    labels = torch.arange(columns, device=run.device).repeat(rows) if classes else None
    real, low_res = None, None
    if config.low_res:
        chosen = np.arange(rows * columns) % len(dataset)
        real = torch.from_numpy(dataset.images(chosen)).to(run.device)
        labels = torch.from_numpy(dataset.labels[chosen]).to(run.device) if classes else None
        low_res = shrink(real, config)
    images = heun(denoiser(net, objective, process, low_res), noise, labels, sigma_steps(18))
    if config.low_res:
        images = torch.stack([F.interpolate(low_res, size=shape[1:]), images, real])
        images = images.unflatten(1, (rows, columns)).transpose(0, 1).flatten(0, 2)  # rows of three
    save_grid(run.folder / "samples" / f"{run.nimg:09d}.png", images.cpu().numpy(), columns)
