"""Draw images with a trained ADM, ours or a released one, or enlarge images.

Papers: samplers as in `shared/samplers.py` and `iddpm.py`; classifier guidance, arXiv:2105.05233v4;
classifier-free guidance, arXiv:2207.12598v1; autoguidance, arXiv:2406.02507v3.

    python adm_unet/sample.py                                          # a grid, from the last digits run
    python adm_unet/sample.py --labels 3 --guidance 2 --out threes.png
    python adm_unet/sample.py --classifier runs/adm_classifier --classifier-scale 1 --out digits.npz
    python adm_unet/sample.py runs/adm_superres --low-res small.npz --out large.npz
    python adm_unet/sample.py --official 64x64_diffusion.pt --preset imagenet64 --sampler ancestral

Reading order: `SampleConfig`, `Model`, `load`, `draw`. Image k depends on `seed + k`, its label and its
small image alone, whatever the batch size, to float32 rounding.

Guidance is guide + w (D - guide). `ancestral` and `ddim` take any network; where it learned no variance,
or w guides it, the variance is the process's own, beta_tilde.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from adm_unet.iddpm import IDDPM, ancestral, ddim, guided_denoiser
from adm_unet.model import PRESETS, ADMConfig, Encoder
from adm_unet.model import build as build_net
from adm_unet.official import read_official
from adm_unet.tasks import Schedule, beside, classifier_gradient, denoiser, make_process, noise_predictor
from posthoc_ema.reconstruct import read_average
from posthoc_ema.samples import require_fits, save_images
from posthoc_ema.snapshots import config_from_dict
from shared.check import require
from shared.data import DataConfig, load_data
from shared.diffusion import SIGMA_MAX, SIGMA_MIN
from shared.files import load_strictly
from shared.run import cli, find_device
from shared.samplers import SAMPLERS, guided, seed_noise, sigma_steps, unlabelled


@dataclass(frozen=True)
class SampleConfig:
    source: tyro.conf.Positional[Path] = Path("runs/adm_unet")  # a run's folder, or a snapshot
    out: Path = Path("samples.png")  # .png: a grid; .npz: arrays; else a folder of one PNG an image
    num: int = 80  # number of images
    seed: int = 0  # seed of the first image; image k has seed + k
    labels: tuple[int, ...] = ()  # class of each image, repeated as needed; empty: every class in turn
    sampler: Literal["heun", "dpmpp", "euler", "ancestral", "ddim"] = "heun"  # the last two: the papers' own
    steps: int = 32  # steps of heun, dpmpp and euler
    sigma_min: float | None = None  # their last noise level before 0; None: what the network was trained for
    sigma_max: float | None = None  # their first noise level; None: what the network was trained for
    rho: float = 7.0  # exponent of their schedule of noise levels
    churn: float = 0.0  # EDM's S_churn, fresh noise added along the way; heun and euler only
    respacing: str = "100"  # steps of ancestral and ddim: a number, one a section as 10,10,5, or as ddim25
    eta: float = 0.0  # noise that ddim adds, 0 none, 1 as much as ancestral
    clip: bool = True  # keep what ancestral and ddim predict in [-1, 1]
    guidance: float = 1.0  # guidance weight w; 1: none
    guide: Path | None = None  # a second run or snapshot to guide with; None: no label, or --guide-sigma-rel
    classifier: Path | None = None  # run, snapshot or released .pt of a classifier to guide with
    classifier_scale: float = 1.0  # strength s of its guidance
    at_mean: bool = False  # take its gradient at the predicted mean, as the paper derives; ancestral only
    low_res: Path | None = None  # folder, zip or .npz of small images, and their labels, to enlarge
    sigma_rel: float | None = None  # relative length of the average, tracked or not; None: the shortest saved
    guide_sigma_rel: float | None = None  # the same for the guide
    official: Path | None = None  # a released .pt file, instead of a run
    preset: str = "imagenet64"  # the network in the released file
    classifier_preset: str = "classifier64"  # the classifier in a released .pt file
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
        for preset in (self.preset, self.classifier_preset):
            require(preset in PRESETS, f"preset {preset!r} is unknown: one of {', '.join(PRESETS)}")
        require(0 <= self.churn < 1e6, f"churn is {self.churn}: it must be finite and not negative")
        require(self.churn == 0 or self.sampler in ("heun", "euler"), f"{self.sampler} takes no churn")
        require(0 <= self.eta <= 1, f"eta is {self.eta}: it must be in [0, 1]")
        require(self.eta == 0 or self.sampler == "ddim", f"{self.sampler} takes no eta")
        fits = not self.at_mean or self.sampler == "ancestral"
        require(fits, f"at_mean: {self.sampler} has no mean to be guided at")


@dataclass
class Model:
    """A network, what it was trained for and on which process; called, its D(x; sigma, labels)."""

    net: Callable
    objective: str  # edm, a loss of iddpm, or classifier
    schedule: Schedule
    num_steps: int = 1000

    def process(self, variance: str = "small", spacing: str = "") -> IDDPM:
        return make_process(self.schedule, self.num_steps, variance, spacing)

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        return denoiser(self.net, self.objective, self.process())(x, sigma, labels)


def place(net: Encoder, device: str, backend: str) -> Callable:
    """The network in evaluation mode on its device, or its tinygrad twin of the same weights."""
    if backend == "torch":
        return net.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    from adm_unet.model_tinygrad import build as build_twin  # here, so that PyTorch's side needs no tinygrad
    from posthoc_ema.tinygrad_bridge import TorchFace

    return TorchFace(build_twin(net.config), net.state_dict())


def build(weights: dict[str, Tensor], header: dict, device: str = "cpu", backend: str = "torch") -> Model:
    """The model, in evaluation mode, of a snapshot's weights and header. ValueError where they misfit."""
    require(header["network"] == "adm_unet", f"the network is {header['network']}, not an ADM")
    net = build_net(config_from_dict(ADMConfig, header["config"]))
    load_strictly(net, weights)
    return Model(place(net, device, backend), header["objective"], header["schedule"], header["num_steps"])


def load(
    path: Path, sigma_rel: float | None = None, device: str = "cpu", backend: str = "torch"
) -> tuple[Model, dict]:
    """The model of a snapshot, or of a run's last one, and the snapshot's header; an average of a length that
    the run did not track is reconstructed.

    ValueError, naming the file, for what is no snapshot of an ADM.
    """
    weights, header = read_average(path, sigma_rel)
    try:
        return build(weights, header, device, backend), header
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a damaged header may lack anything
        raise ValueError(f"{path}: {error}") from error


def load_released(path: Path, preset: str, device: str, backend: str = "torch") -> Model:
    """A released network, with the process that it was trained on."""
    net = place(read_official(path, PRESETS[preset]), device, backend)
    kind = "classifier" if net.config.pool else "hybrid"
    return Model(net, kind, "cosine" if net.config.img_size == 64 else "linear")


def draw(
    model: Model, config: SampleConfig, seeds: Sequence[int], labels: Sequence[int] | None,
    low_res: Tensor | None = None, guide: Model | None = None, classifier: Model | None = None,
    progress: tqdm | None = None,
) -> np.ndarray:
    """One batch: images float32 (B, C, H, W), unclipped, of the given seeds, labels and small images."""
    net, device = model.net.config, next(model.net.parameters()).device
    shape = (net.in_channels, net.img_size, net.img_size)
    y = None if labels is None else torch.tensor(labels, device=device)
    gradient = None
    if classifier is not None:
        gradient = classifier_gradient(classifier.net, y, config.classifier_scale)
        y = y if net.num_classes else None  # an unconditional network may be guided to a class

    def noise(stream: int) -> Tensor:
        return torch.from_numpy(seed_noise(seeds, shape, stream)).to(device)

    def counted(net: Callable):
        def call(x: Tensor, *args: Tensor | None) -> Tensor:
            if progress is not None:
                progress.update(len(x))
            return net(x, *args)

        return call

    process = model.process()
    D = denoiser(counted(model.net), model.objective, process, low_res)
    other = guide or model
    D_guide = denoiser(other.net, other.objective, other.process(), low_res)
    D_w = guided(D, D_guide if guide else unlabelled(D_guide), config.guidance)
    with torch.no_grad():
        if config.sampler in SAMPLERS:
            if gradient is not None:
                D_w = guided_denoiser(classifier.process(), D_w, gradient)
            edm = model.objective == "edm"
            sigma_min = config.sigma_min or (SIGMA_MIN if edm else float(process.sigma[0]))
            sigma_max = config.sigma_max or (SIGMA_MAX if edm else float(process.sigma[-1]))
            sigmas = sigma_steps(config.steps, sigma_min, sigma_max, config.rho)
            churn = dict(S_churn=config.churn, churn_noise=lambda k: noise(k + 1)) if config.churn else {}
            return SAMPLERS[config.sampler](D_w, noise(0), y, sigmas, **churn).cpu().numpy()
        if model.net.config.learn_sigma and config.guidance == 1:
            process, predict = model.process("learned", config.respacing), beside(counted(model.net), low_res)
        else:
            process = model.process("small", config.respacing)
            predict = noise_predictor(D_w, process)
        args = process, predict, noise(0), lambda k: noise(k + 1), y, config.clip, gradient
        sampled = ddim(*args, config.eta) if config.sampler == "ddim" else ancestral(*args, config.at_mean)
        return sampled.cpu().numpy()


def load_guide(config: SampleConfig, device: torch.device) -> Model | None:
    """The network to guide with: another one's, or another average of the same run. None: none was given."""
    if config.guide is None and config.guide_sigma_rel is None:
        return None
    return load(config.guide or config.source, config.guide_sigma_rel, device, config.backend)[0]


def choose_labels(config: SampleConfig, classes: int, known: np.ndarray | None) -> list[int] | None:
    """The label of every image: those asked for, those of the small images, or all classes, in turn.

    ValueError for one out of range.
    """
    require(not config.labels or classes > 0, "labels were given, but nothing here takes any")
    turn = list(config.labels or (range(classes) if known is None else known.tolist()))
    wrong = sorted({y for y in turn if not 0 <= y < classes})
    require(not wrong or not classes, f"labels {wrong} are out of range: there are classes 0..{classes - 1}")
    return [turn[k % len(turn)] for k in range(config.num)] if classes else None


def small_images(config: SampleConfig, net: ADMConfig) -> tuple[Tensor | None, np.ndarray | None]:
    """The images to enlarge, in [-1, 1], repeated as needed, and their labels, if any."""
    require(not config.low_res or net.low_res > 0, "low_res was given, but the network enlarges no images")
    if not net.low_res:
        return None, None
    require(config.low_res is not None, "this network enlarges images: --low-res says which")
    dataset, _ = load_data(DataConfig(str(config.low_res), holdout=0))
    shape = (net.in_channels, net.low_res, net.low_res)
    require(dataset.shape == shape, f"{config.low_res} has images {dataset.shape}, the network takes {shape}")
    chosen = np.arange(config.num) % len(dataset)
    labels = None if dataset.labels is None else dataset.labels[chosen]
    return torch.from_numpy(dataset.images(chosen)), labels


def sample(config: SampleConfig) -> None:
    device = find_device(config.device)
    if config.official:
        model = load_released(config.official, config.preset, device, config.backend)
        header = {"latent_mean": None}
    else:
        model, header = load(config.source, config.sigma_rel, device, config.backend)
    net = model.net.config
    require(not net.pool, "this is a classifier: it guides, with --classifier, and draws nothing itself")
    require_fits(config.out, header)
    guide = load_guide(config, device)
    can_guide = guide is not None or net.null_class
    require(config.guidance == 1 or can_guide, "guidance needs a guide, or a network with a null class")
    classifier, classes = None, net.num_classes - net.null_class
    if config.classifier:
        if config.classifier.suffix == ".pt":
            classifier = load_released(config.classifier, config.classifier_preset, device)
        else:
            classifier = load(config.classifier, None, device)[0]
        require(bool(classifier.net.config.pool), f"{config.classifier} is no classifier")
        same = config.sampler in SAMPLERS or classifier.schedule == model.schedule
        require(same, f"{config.classifier} knows the {classifier.schedule} schedule, the network another")
        classes = classes or classifier.net.config.num_classes
    low_res, known = small_images(config, net)
    labels = choose_labels(config, classes, known)
    images = []
    calls = len(model.process(spacing=config.respacing)) if config.sampler not in SAMPLERS else config.steps
    calls = 2 * calls - 1 if config.sampler == "heun" else calls
    with tqdm(total=config.num * calls, unit="call", unit_scale=True) as progress:
        for start in range(0, config.num, config.batch_size):
            part = slice(start, min(start + config.batch_size, config.num))
            seeds = range(config.seed + part.start, config.seed + part.stop)
            y = labels[part] if labels else None
            small = None if low_res is None else low_res[part].to(device)
            images.append(draw(model, config, seeds, y, small, guide, classifier, progress))
    save_images(config.out, np.concatenate(images), labels, config.seed, header)
    print(config.out)


if __name__ == "__main__":
    cli(sample, SampleConfig, "Draw images with a trained ADM.")
