"""Draw images with a trained EDM2, ours or a released one.

Papers: samplers as in `shared/samplers.py`; classifier-free guidance, arXiv:2207.12598v1; autoguidance,
arXiv:2406.02507v3; EDM2, arXiv:2312.02696v2.

    python edm2_mp_unet/sample.py                                          # a grid, from the last digits run
    python edm2_mp_unet/sample.py runs/edm2_mp_unet --labels 3 --guidance 2 --out threes.png
    python edm2_mp_unet/sample.py runs/edm2_mp_unet --guide runs/small --guidance 2    # autoguidance
    python edm2_mp_unet/sample.py --official edm2-img64-s-1073741-0.045.pkl \\
        --guide edm2-img64-xs-0134217-0.110.pkl --guidance 1.7 --num 50 --out released

Reading order: `SampleConfig`, `build`, `load`, `draw`. Image k depends on `seed + k` and its label alone,
whatever the batch size, to float32 rounding.

Guidance is guide + w (D - guide): by an unconditional network or the missing label it is classifier-free
guidance, by a smaller or less trained one, autoguidance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from edm2_mp_unet.model import Denoiser, EDM2Config
from edm2_mp_unet.official import load_official, read_official_pickle
from posthoc_ema.reconstruct import read_average
from posthoc_ema.samples import require_fits, save_images
from posthoc_ema.snapshots import config_from_dict
from shared.check import require
from shared.diffusion import SIGMA_MAX, SIGMA_MIN
from shared.files import load_strictly
from shared.run import cli, find_device
from shared.samplers import SAMPLERS, guided, seed_noise, sigma_steps, unlabelled

# Statistics of the latents that the released networks of four channels draw, Stability AI's.
LATENT_MEAN, LATENT_STD = [5.81, 3.25, 0.12, -2.15], [4.17, 4.62, 3.71, 3.28]


@dataclass(frozen=True)
class SampleConfig:
    source: tyro.conf.Positional[Path] = Path("runs/edm2_mp_unet")  # a run's folder, or a snapshot
    out: Path = Path("samples.png")  # .png: a grid; .npz: arrays; else a folder of one PNG an image
    num: int = 80  # number of images
    seed: int = 0  # seed of the first image; image k has seed + k
    labels: tuple[int, ...] = ()  # class of each image, repeated as needed; empty: every class in turn
    sampler: Literal["heun", "dpmpp", "euler"] = "heun"  # ODE solver: EDM's, DPM-Solver++(2M), Euler's
    steps: int = 32  # steps of the solver
    sigma_min: float = SIGMA_MIN  # last noise level before 0
    sigma_max: float = SIGMA_MAX  # first noise level
    rho: float = 7.0  # exponent of the schedule of noise levels
    churn: float = 0.0  # EDM's S_churn, fresh noise added along the way; heun and euler only
    guidance: float = 1.0  # guidance weight w; 1: none
    guide: Path | None = None  # a second run, snapshot or .pkl to guide with; None: no label
    sigma_rel: float | None = None  # relative length of the average, tracked or not; None: the shortest saved
    guide_sigma_rel: float | None = None  # the same for the guide
    official: Path | None = None  # a released .pkl file, instead of a run
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
        require(0 <= self.churn < 1e6, f"churn is {self.churn}: it must be finite and not negative")
        require(self.churn == 0 or self.sampler != "dpmpp", "dpmpp is deterministic: it takes no churn")


def place(net: Denoiser, device: str, backend: str) -> Callable:
    """The network in evaluation mode on its device, or its tinygrad twin of the same weights."""
    if backend == "torch":
        return net.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    from edm2_mp_unet.model_tinygrad import Denoiser as Twin  # here, so that PyTorch's side needs no tinygrad
    from posthoc_ema.tinygrad_bridge import TorchFace

    return TorchFace(Twin(net.config), net.state_dict())


def build(
    weights: dict[str, torch.Tensor], header: dict, device: str = "cpu", backend: str = "torch"
) -> Callable:
    """The denoiser, in evaluation mode, of a snapshot's weights and header. ValueError where they misfit."""
    require(header["network"] == "edm2_mp_unet", f"the network is {header['network']}, not an EDM2")
    net = Denoiser(config_from_dict(EDM2Config, header["config"]))
    load_strictly(net, weights)
    return place(net, device, backend)


def load(
    path: Path, sigma_rel: float | None = None, device: str = "cpu", backend: str = "torch"
) -> tuple[Callable, dict]:
    """The denoiser of a snapshot, or of a run's last one, in evaluation mode, and the snapshot's header; an
    average of a length that the run did not track is reconstructed. Or that of a released pickle.

    ValueError, naming the file, for what is no snapshot of an EDM2.
    """
    try:
        if path.suffix == ".pkl":
            config, weights = read_official_pickle(path)
            latents = config.get("img_channels") == len(LATENT_MEAN)
            mean, std = (LATENT_MEAN, LATENT_STD) if latents else (None, None)
            net = place(load_official(config, weights), device, backend)
            return net, {"label_dropout": 0, "latent_mean": mean, "latent_std": std}
        weights, header = read_average(path, sigma_rel)
        return build(weights, header, device, backend), header
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged header may lack anything
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error


def draw(
    D: Callable,
    config: SampleConfig,
    seeds: Sequence[int],
    labels: Sequence[int] | None,
    guide: Callable | None = None,
    progress: tqdm | None = None,
) -> np.ndarray:
    """One batch: images float32 (B, C, H, W), unclipped, of the given seeds and labels."""
    net, device = D.config, next(D.parameters()).device
    shape = (net.in_channels, net.img_size, net.img_size)

    def noise(stream: int) -> torch.Tensor:
        return torch.from_numpy(seed_noise(seeds, shape, stream)).to(device)

    def counted(x: torch.Tensor, sigma: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if progress is not None:
            progress.update(len(x))
        return D(x, sigma, y)

    sigmas = sigma_steps(config.steps, config.sigma_min, config.sigma_max, config.rho)
    churn = dict(S_churn=config.churn, churn_noise=lambda k: noise(k + 1)) if config.churn else {}
    y = None if labels is None else torch.tensor(labels, device=device)
    labelled = guide is not None and guide.config.num_classes > 0
    D_w = guided(counted, guide if labelled else unlabelled(guide or D), config.guidance)
    with torch.no_grad():
        return SAMPLERS[config.sampler](D_w, noise(0), y, sigmas, **churn).cpu().numpy()


def load_guide(config: SampleConfig, device: torch.device) -> Callable | None:
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


def check_guide(
    config: SampleConfig, net: EDM2Config, guide: EDM2Config | None, label_dropout: float
) -> None:
    """Raise ValueError where nothing can guide, or the guide speaks of other images or classes."""
    can_guide = guide is not None or label_dropout > 0
    require(config.guidance == 1 or can_guide, "guidance needs a guide, or training with label_dropout")
    if guide is not None:
        ours, its = ((c.in_channels, c.img_size) for c in (net, guide))
        require(ours == its, f"{config.guide} draws {its} channels and pixels, the network {ours}")
        fits = guide.num_classes in (0, net.num_classes)
        require(fits, f"{config.guide} has {guide.num_classes} classes, the network {net.num_classes}")


def sample(config: SampleConfig) -> None:
    device = find_device(config.device)
    D, header = load(config.official or config.source, config.sigma_rel, device, config.backend)
    require_fits(config.out, header)
    guide = load_guide(config, device)
    check_guide(config, D.config, guide.config if guide else None, header["label_dropout"])
    labels = choose_labels(config, D.config.num_classes)
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
    cli(sample, SampleConfig, "Draw images with a trained EDM2.")
