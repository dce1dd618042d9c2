"""Draw images with a trained U-ViT, ours or a released one.

Papers: samplers as in `shared/samplers.py`; classifier-free guidance, arXiv:2207.12598v1; autoguidance,
arXiv:2406.02507v3; U-ViT, arXiv:2209.12152v4.

    python minimal_uvit/sample.py                                          # a grid, from the last digits run
    python minimal_uvit/sample.py runs/minimal_uvit --labels 3 --guidance 2 --out threes.png
    python minimal_uvit/sample.py runs/minimal_uvit --num 10000 --out digits.npz
    python minimal_uvit/sample.py --official imagenet64_uvit_mid.pth --preset m4_imagenet64 --labels 207 360

Reading order: `SampleConfig`, `build`, `load`, `draw`, `sample`. Image k depends on `seed + k` and its label
alone, whatever the batch size, to float32 rounding.

Guidance is guide + w (D - guide); the scale s that U-ViT's paper gives is w = 1 + s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from minimal_uvit.model import PRESETS, UViT, UViTConfig
from minimal_uvit.official import LATENT_STD, STABLE_DIFFUSION, StableDiffusionPrecond, read_official
from posthoc_ema.reconstruct import read_average
from posthoc_ema.samples import require_fits, save_images
from posthoc_ema.snapshots import config_from_dict
from shared.check import require
from shared.diffusion import SIGMA_MAX, SIGMA_MIN, EDMPrecond, VPPrecond, vp_sigma
from shared.files import load_strictly
from shared.run import cli, find_device
from shared.samplers import SAMPLERS, guided, seed_noise, sigma_steps, unlabelled

Precond = EDMPrecond | VPPrecond | StableDiffusionPrecond
LIMITS: dict[type, tuple[float, float]] = {  # noise levels that networks of each are trained for
    EDMPrecond: (SIGMA_MIN, SIGMA_MAX),
    VPPrecond: tuple(vp_sigma(np.array([1e-3, 1.0])).tolist()),
    StableDiffusionPrecond: tuple(StableDiffusionPrecond.sigmas[[0, -1]].tolist()),
}


@dataclass(frozen=True)
class SampleConfig:
    source: tyro.conf.Positional[Path] = Path("runs/minimal_uvit")  # a run's folder, or a snapshot
    out: Path = Path("samples.png")  # .png: a grid; .npz: arrays; else a folder of one PNG an image
    num: int = 80  # number of images
    seed: int = 0  # seed of the first image; image k has seed + k
    labels: tuple[int, ...] = ()  # class of each image, repeated as needed; empty: every class in turn
    sampler: Literal["heun", "dpmpp", "euler"] = "heun"  # ODE solver: EDM's, DPM-Solver++(2M), Euler's
    steps: int = 32  # steps of the solver
    sigma_min: float | None = None  # last noise level before 0; None: what the network was trained for
    sigma_max: float | None = None  # first noise level; None: what the network was trained for
    rho: float = 7.0  # exponent of the schedule of noise levels
    churn: float = 0.0  # EDM's S_churn, fresh noise added along the way; heun and euler only
    guidance: float = 1.0  # guidance weight w; 1: none
    guide: Path | None = None  # a second run or snapshot to guide with; None: no label, or --guide-sigma-rel
    sigma_rel: float | None = None  # relative length of the average, tracked or not; None: the shortest saved
    guide_sigma_rel: float | None = None  # the same for the guide
    official: Path | None = None  # a released .pth file, instead of a run
    preset: str = "s2_cifar10"  # the network in the released file
    batch_size: int = 64  # images drawn at a time
    backend: Literal["torch", "tinygrad"] = "torch"  # what runs the network; DEV sets tinygrad's device
    device: str = "auto"  # torch device; auto: CUDA where there is one, else the CPU

    def __post_init__(self) -> None:
        require(self.num > 0, f"num is {self.num}: it must be at least 1")
        require(self.seed >= 0, f"seed is {self.seed}: it must not be negative")
        require(self.steps > 0, f"steps is {self.steps}: it must be at least 1")
        guide = self.guide is not None or self.guide_sigma_rel is not None
        require(not guide or self.guidance != 1, "a guide needs a guidance other than 1, which is none")
        require(abs(self.guidance) < 1e6, f"guidance is {self.guidance}: it must be finite")
        require(self.batch_size > 0, f"batch_size is {self.batch_size}: it must be at least 1")
        require(self.preset in PRESETS, f"preset {self.preset!r} is unknown: one of {', '.join(PRESETS)}")
        require(0 <= self.churn < 1e6, f"churn is {self.churn}: it must be finite and not negative")
        require(self.churn == 0 or self.sampler != "dpmpp", "dpmpp is deterministic: it takes no churn")


def place(net: UViT, device: str, backend: str) -> Callable:
    """The network in evaluation mode on its device, or its tinygrad twin of the same weights."""
    if backend == "torch":
        return net.to(device).eval().requires_grad_(False)
    from minimal_uvit.model_tinygrad import UViT as Twin  # here, so that PyTorch's side needs no tinygrad
    from posthoc_ema.tinygrad_bridge import TorchFace

    return TorchFace(Twin(net.config), net.state_dict())


def build(
    weights: dict[str, torch.Tensor], header: dict, device: str = "cpu", backend: str = "torch"
) -> Precond:
    """The denoiser, in evaluation mode, of a snapshot's weights and header. ValueError where they misfit."""
    require(header["network"] == "minimal_uvit", f"the network is {header['network']}, not a U-ViT")
    net = UViT(config_from_dict(UViTConfig, header["config"]))
    load_strictly(net, weights)
    precond = VPPrecond if header["objective"] == "vp" else EDMPrecond
    return precond(place(net, device, backend))


def load(
    path: Path, sigma_rel: float | None = None, device: str = "cpu", backend: str = "torch"
) -> tuple[Precond, dict]:
    """The denoiser of a snapshot, or of a run's last one, in evaluation mode, and the snapshot's header; an
    average of a length that the run did not track is reconstructed.

    ValueError, naming the file, for what is no snapshot of a U-ViT.
    """
    weights, header = read_average(path, sigma_rel)
    try:
        return build(weights, header, device, backend), header
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged header may lack anything
        raise ValueError(f"{path}: {error}") from error


def draw(
    D: Precond,
    config: SampleConfig,
    seeds: Sequence[int],
    labels: Sequence[int] | None,
    guide: Precond | None = None,
    progress: tqdm | None = None,
) -> np.ndarray:
    """One batch: images float32 (B, C, H, W), unclipped, of the given seeds and labels."""
    net, device = D.net.config, next(D.net.parameters()).device
    shape = (net.in_channels, net.img_size, net.img_size)

    def noise(stream: int) -> torch.Tensor:
        return torch.from_numpy(seed_noise(seeds, shape, stream)).to(device)

    def counted(x: torch.Tensor, sigma: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if progress is not None:
            progress.update(len(x))
        return D(x, sigma, y)

    asked = config.sigma_min, config.sigma_max
    sigma_min, sigma_max = (b if a is None else a for a, b in zip(asked, LIMITS[type(D)], strict=True))
    sigmas = sigma_steps(config.steps, sigma_min, sigma_max, config.rho)
    churn = dict(S_churn=config.churn, churn_noise=lambda k: noise(k + 1)) if config.churn else {}
    y = None if labels is None else torch.tensor(labels, device=device)
    D_w = guided(counted, guide or unlabelled(D), config.guidance)
    with torch.no_grad():
        return SAMPLERS[config.sampler](D_w, noise(0), y, sigmas, **churn).cpu().numpy()


def load_guide(config: SampleConfig, device: torch.device) -> Precond | None:
    """The network to guide with: another one's, or another average of the same run. None: none was given."""
    if config.guide is None and config.guide_sigma_rel is None:
        return None
    return load(config.guide or config.source, config.guide_sigma_rel, device, config.backend)[0]


def choose_labels(config: SampleConfig, classes: int) -> list[int] | None:
    """The label of every image: those asked for, or all classes, in turn. ValueError for one out of range."""
    require(not config.labels or classes > 0, "labels were given, but the network is unconditional")
    wrong = [y for y in config.labels if not 0 <= y < classes]
    require(not wrong, f"labels {wrong} are out of range: this network has classes 0..{classes - 1}")
    turn = config.labels or range(classes)
    return [turn[k % len(turn)] for k in range(config.num)] if classes else None


def load_released(path: Path, preset: str, device: str, backend: str) -> Precond:
    """The denoiser of a released file."""
    precond = StableDiffusionPrecond if preset in STABLE_DIFFUSION else VPPrecond
    return precond(place(read_official(path, PRESETS[preset]), device, backend))


def released_header(preset: str) -> dict:
    """What a snapshot's header would say of what a released network draws: latents have four channels."""
    C = PRESETS[preset].in_channels
    mean, std = ([0.0] * C, [LATENT_STD] * C) if C == 4 else (None, None)
    return {"latent_mean": mean, "latent_std": std}


def sample(config: SampleConfig) -> None:
    device = find_device(config.device)
    if config.official:
        require_fits(config.out, header := released_header(config.preset))  # before gigabytes are read
        D = load_released(config.official, config.preset, device, config.backend)
    else:
        D, header = load(config.source, config.sigma_rel, device, config.backend)
        require_fits(config.out, header)
    net = D.net.config
    guide = load_guide(config, device)
    labels = choose_labels(config, net.num_classes - net.null_class)
    require(not net.context_tokens, "no option gives text tokens: call the network with a context instead")
    can_guide = guide is not None or net.null_class
    require(config.guidance == 1 or can_guide, "guidance needs a guide, or a network with a null class")
    calls = 2 * config.steps - 1 if config.sampler == "heun" else config.steps
    images = []
    with tqdm(total=config.num * calls, unit="call", unit_scale=True) as progress:
        for start in range(0, config.num, config.batch_size):
            part = slice(start, min(start + config.batch_size, config.num))
            seeds = range(config.seed + part.start, config.seed + part.stop)
            y = labels[part] if labels else None
            images.append(draw(D, config, seeds, y, guide, progress))
    save_images(config.out, np.concatenate(images), labels, config.seed, header)
    print(config.out)


if __name__ == "__main__":
    cli(sample, SampleConfig, "Draw images with a trained U-ViT.")
