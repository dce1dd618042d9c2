"""How fast are the three networks, and beside the released code?

    python benchmarks/speed.py --sizes digits small
    python benchmarks/speed.py --networks edm2 --sizes small --compile
    python benchmarks/speed.py --released ~/U-ViT ~/guided-diffusion ~/edm2       # checkouts of their code

Tasks: `train` is loss, backward pass, optimizer and two averages of the weights; `evaluate` is one call of
the denoiser; `sample` is 18 steps of Heun's method, 35 calls, with labels and guidance twice as many. FLOPs
are those of matrix products and convolutions, as PyTorch counts them, of a batch of one times the batch.

Rounds take turns: a step of ours, the released code's, and a matrix product that says what the machine gives
at that moment; which is first alternates. Times are medians; `of sgemm` and `ratio`, released over ours, are
medians of the rounds' own, with quartiles. On CUDA times are those of events, in bfloat16.

With `--released` both networks have the same weights and inputs, and must agree to 2e-5 of the largest output
before anything is timed. The released train step is what the released loops do: an optimizer that is not
fused, and averages updated tensor by tensor. It runs as it is, also under `--compile`, which compiles ours as
train.py does: one graph for batches of every size.

With `--profile`, `at most` is what the ratio would be if of our step only some operations took time, as much
as they do: convolutions, matrix products and attention, and for the first number, of eager steps,
normalizations and activations as well, which `--compile` may fuse with others.

Memory is the peak of two steps in a process of their own over that process before it had a network: resident
memory as Linux counts it on a CPU, where what is freed is given back at once (which takes time, so nothing
else is measured so), allocated memory on CUDA. In brackets is what is left of it without the weights, moments
and averages, whose sizes are known: activations and gradients, and on a CPU workspaces.
"""

import contextlib
import ctypes
import importlib
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from adm_unet import official as adm
from adm_unet.model import build as build_adm
from benchmarks.timing import TRACKED, LoopEMA, quartiles, resident, time_in_turns
from edm2_mp_unet import official as edm2
from edm2_mp_unet.model import Denoiser as EDM2
from minimal_uvit import official as uvit
from minimal_uvit.model import UViT
from posthoc_ema.ema import PowerFunctionEMA
from shared.check import require
from shared.diffusion import Denoiser, EDMPrecond, edm_loss
from shared.run import Run, cli, find_device
from shared.samplers import guided, heun, sigma_steps

Network = Literal["uvit", "adm", "edm2"]
Size = Literal["digits", "small", "released"]
Task = Literal["train", "evaluate", "sample"]
TOLERANCE, GUIDANCE, SIGMAS = 2e-5, 1.5, sigma_steps(18)
PRODUCTS = r"mm$|addmm$|bmm$|baddbmm$|\w*convolution|\w*scaled_dot_product"  # operations, for `at most`
POINTWISE = PRODUCTS + r"|silu|gelu|native_\w+_norm"

OURS = {"uvit": (uvit, UViT), "adm": (adm, build_adm), "edm2": (edm2, EDM2)}
FILES = {"uvit": "libs/uvit.py", "adm": "guided_diffusion/unet.py", "edm2": "training/networks_edm2.py"}
CLASSES = {"uvit": "UViT", "adm": "UNetModel", "edm2": "Precond"}

# What the released constructors are given. The last class of U-ViT and ADM stands for no label.
ADM = dict(use_scale_shift_norm=True, resblock_updown=True)
CONFIGS: dict[tuple[Network, Size], dict] = {
    ("uvit", "digits"): dict(
        img_size=8, patch_size=2, in_chans=1, embed_dim=96, depth=4, num_heads=3, num_classes=11),
    ("uvit", "small"): dict(img_size=32, patch_size=4, in_chans=3, embed_dim=256, depth=8, num_heads=4),
    ("uvit", "released"): dict(img_size=32, patch_size=2, in_chans=3, embed_dim=512, depth=12, num_heads=8),
    ("adm", "digits"): ADM | dict(
        image_size=8, in_channels=1, out_channels=1, model_channels=32, num_res_blocks=1, num_heads=2,
        channel_mult=(1, 2), attention_resolutions=(2,), num_classes=11),
    ("adm", "small"): ADM | dict(
        image_size=32, in_channels=3, out_channels=3, model_channels=64, num_res_blocks=2,
        num_head_channels=32, channel_mult=(1, 2, 2), attention_resolutions=(2, 4)),
    ("adm", "released"): ADM | dict(  # imagenet64, without the learned variance
        image_size=64, in_channels=3, out_channels=3, model_channels=192, num_res_blocks=3,
        num_head_channels=64, channel_mult=(1, 2, 3, 4), attention_resolutions=(2, 4, 8), num_classes=1000,
        use_new_attention_order=True, dropout=0.1),
    ("edm2", "digits"): dict(
        img_resolution=8, img_channels=1, label_dim=10, use_fp16=False, model_channels=32,
        channel_mult=[1, 2], num_blocks=2, attn_resolutions=[4], channels_per_head=32),
    ("edm2", "small"): dict(
        img_resolution=32, img_channels=3, label_dim=0, use_fp16=False, model_channels=64,
        channel_mult=[1, 2, 2], num_blocks=3, attn_resolutions=[16, 8]),
    ("edm2", "released"): dict(  # edm2-img512-xs
        img_resolution=64, img_channels=4, label_dim=1000, use_fp16=False, model_channels=128),
}
LABELS = {"uvit": dict(num_classes=11), "adm": dict(num_classes=11), "edm2": dict(label_dim=10)}  # to sample


@dataclass(frozen=True)
class Options:
    networks: tuple[Network, ...] = ("uvit", "adm", "edm2")  # what to time
    sizes: tuple[Size, ...] = ("digits", "small")  # released: CIFAR-10 U-ViT-S/2, ADM 64x64, EDM2-XS
    tasks: tuple[Task, ...] = ("train", "evaluate", "sample")  # what to time it in
    batch_size: int = 16  # images of a step
    compile: bool = False  # torch.compile our networks; the released ones stay as they are
    checkpointing: bool = False  # our networks recompute blocks in the backward pass
    pairs: int = 9  # rounds that are timed
    released: tuple[Path, ...] = ()  # checkouts of the released code, to time beside ours
    memory: bool = True  # measure peak memory too, in processes of their own
    profile: bool = False  # add columns: the operations that take most of a step, and a bound from them
    threads: int = 0  # CPU threads; 0: as many as PyTorch takes
    device: str = "auto"  # torch device; auto: CUDA where there is one, else the CPU

    def __post_init__(self) -> None:
        require(min(self.batch_size, self.pairs) > 0, "batch_size and pairs must be at least 1")
        require(self.threads >= 0, f"threads is {self.threads}: it must not be negative")


# Networks ---------------------------------------------------------------------------------------------------


def find_released(folders: tuple[Path, ...]) -> dict[Network, Path]:
    """Which network each checkout has. ValueError where it has none of the three."""
    found = {}
    for folder in folders:
        names = [name for name, file in FILES.items() if (folder.expanduser() / file).is_file()]
        require(len(names) > 0, f"--released {folder} has none of {', '.join(FILES.values())}")
        found |= dict.fromkeys(names, folder)
    return found


def build_released(name: Network, config: dict, folder: Path) -> nn.Module:
    """The released network, random where it starts at zero: nothing may hide behind a gain of 0."""
    folder = folder.expanduser()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(sys.stderr):  # it says things when imported
        module = importlib.import_module(FILES[name].removesuffix(".py").replace("/", "."))
    net = getattr(module, CLASSES[name])(**config)
    for p in net.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1) if p.ndim else nn.init.ones_(p)
    return net


def build_ours(name: Network, config: dict, checkpointing: bool = False) -> nn.Module:
    official, make = OURS[name]
    return make(replace(official.official_config(config), checkpointing=checkpointing))


def make_batch(name: Network, config: dict, batch_size: int, device: torch.device) -> tuple:
    """Images, noise levels, noise, labels, and the labels that say none; None in a network without labels."""
    net, shape = OURS[name][0].official_config(config), (batch_size,)
    images, noise = torch.randn(2, *shape, net.in_channels, net.img_size, net.img_size).to(device)
    sigma = torch.randn(shape).exp().to(device)
    if not net.num_classes:
        return images, sigma, noise, None, None
    labels = (torch.arange(batch_size) % (net.num_classes - 1)).to(device)
    return images, sigma, noise, labels, None if name == "edm2" else labels * 0 + net.num_classes - 1


def make_denoiser(name: Network, net: Callable, ours: bool) -> Denoiser:
    if name != "edm2":
        return EDMPrecond(net)

    def D(x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:  # the released one takes one-hot labels
        return net(x, sigma, None if labels is None else F.one_hot(labels, net.label_dim).float())

    return net if ours else D


# Steps ------------------------------------------------------------------------------------------------------


def make_step(
    options: Options, name: Network, task: Task, net: nn.Module, batch: tuple, ours: bool
) -> Callable[[], Tensor | None]:
    """What is timed: a function of no arguments. The network is this step's from now on."""
    images, sigma, noise, labels, no_labels = batch
    device = images.device.type
    precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    run = SimpleNamespace(config=options)  # as much of a run as `Run.compile` looks at
    D = make_denoiser(name, Run.compile(run, net) if ours else net, ours)
    if ours and (name, task) != ("adm", "train") and name != "uvit":  # as train.py and sample.py do
        net.to(memory_format=torch.channels_last)
    if task == "train":
        kind = torch.optim.Adam if name == "edm2" else torch.optim.AdamW
        optimizer = kind(net.train().parameters(), 1e-4, **(dict(fused=True) if ours else {}))
        ema = PowerFunctionEMA(net, TRACKED) if ours else LoopEMA(net)

        def step() -> None:
            with precision:
                loss = edm_loss(D, images, sigma, noise, labels).mean()
            loss.backward()
            optimizer.step()
            ema.update(ema.t + len(images))
            optimizer.zero_grad()

        return step
    net.eval().requires_grad_(False)
    D_w = D if labels is None else guided(D, lambda x, sigma, labels: D(x, sigma, no_labels), GUIDANCE)

    @torch.no_grad()
    def call() -> Tensor:
        with precision:
            return D(images, sigma, labels) if task == "evaluate" else heun(D_w, noise, labels, SIGMAS)

    return call


def count_flops(name: Network, task: Task, config: dict, batch_size: int) -> int:
    """Floating-point operations of a step: of matrix products and convolutions."""
    with torch.device("meta"):
        net, batch = build_ours(name, config), make_batch(name, config, 1, torch.device("meta"))
    D, (images, sigma, noise, labels, _) = make_denoiser(name, net, True), batch
    math = sdpa_kernel(SDPBackend.MATH)  # the one that it can count
    with math, FlopCounterMode(display=False) as counter:
        loss = edm_loss(D, images, sigma, noise, labels).mean()
        if task == "train":
            loss.backward()
    calls = (2 * len(SIGMAS) - 3) * (1 if labels is None else 2) if task == "sample" else 1
    return counter.get_total_flops() * batch_size * calls


def measure_memory(options: Options, name: Network, task: Task, config: dict, folder: Path | None) -> tuple:
    """Peak in MB of a step in a process of its own, and of it all but weights, two moments and two averages;
    with a folder, of the released network."""
    device = start(options)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # M_MMAP_THRESHOLD: keep no tensor that is freed
        libc.mallopt(-3, 1 << 16)
    tiny = CONFIGS["uvit", "digits"]  # a first step, which loads what PyTorch puts off loading
    first = build_ours("uvit", tiny).to(device), make_batch("uvit", tiny, 1, device)
    make_step(replace(options, compile=False), "uvit", task, *first, ours=not folder)()
    before = resident("VmRSS")
    net = build_released(name, config, folder) if folder else build_ours(name, config, options.checkpointing)
    batch = make_batch(name, config, options.batch_size, device)
    step = make_step(options, name, task, net.to(device), batch, ours=not folder)
    for _ in range(2):  # the moments are there from the second on
        step()
    peak = resident("VmHWM") - before if device.type == "cpu" else torch.cuda.max_memory_allocated() / 1e6
    return peak, peak - 5 * sum(p.nbytes for p in net.parameters()) / 1e6


# The command ------------------------------------------------------------------------------------------------


def start(options: Options) -> torch.device:
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    return find_device(options.device)


def pair(options: Options, name: Network, config: dict, folder: Path | None, batch: tuple) -> list[nn.Module]:
    """Our network and, with a folder, the released one of the same weights. ValueError if they disagree."""
    if folder is None:
        return [build_ours(name, config, options.checkpointing)]
    theirs = build_released(name, config, folder)
    ours = build_ours(name, config, options.checkpointing)
    ours.load_state_dict(OURS[name][0].load_official(config, theirs.state_dict()).state_dict())
    images, sigma, _, labels, _ = batch
    with torch.no_grad():
        nets = ours.eval().to(images.device), theirs.eval().to(images.device)
        out, target = (make_denoiser(name, net, net is ours)(images, sigma, labels) for net in nets)
    error = ((out - target).abs().max() / target.abs().max()).item()
    require(error <= TOLERANCE, f"our {name} and the one in {folder} disagree: by {error:.1e}")
    return [ours, theirs]


def profiled(step: Callable, device: torch.device) -> dict[str, float]:
    """Each operation's share of a step's time, the largest first."""
    cuda, times = device.type == "cuda", Counter()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as found:
        for _ in range(3):
            step()
    for event in found.key_averages():
        if event.device_type == DeviceType.CPU:  # an operation; on CUDA it has the time of its kernels
            spent = event.self_device_time_total if cuda else event.self_cpu_time_total
            times[event.key.removeprefix("aten::")] += spent
    return {name: spent / times.total() for name, spent in times.most_common()}


def share(profile: dict[str, float], pattern: str) -> float:
    """What operations whose names begin like this take of a step."""
    return sum(part for name, part in profile.items() if re.match(pattern, name))


def sgemm(device: torch.device) -> tuple[Callable, int]:
    """A product of square matrices, in the precision of the networks, and its FLOPs."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b, c = torch.ones(3, n, n, dtype=dtype, device=device)
    return partial(torch.mm, a, b, out=c), 2 * n**3


def row(options: Options, name: Network, size: Size, task: Task, folder: Path | None) -> list[str]:
    """A line of the table."""
    config, device = CONFIGS[name, size], start(options)
    if task == "sample" and size == "small":
        config = config | LABELS[name]
    memory = []
    if options.memory:  # first, while there is room
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for where in [None, folder] if folder else [None]:
                memory.append(pool.apply(measure_memory, (options, name, task, config, where)))
    batch = make_batch(name, config, options.batch_size, device)
    nets = pair(options, name, config, folder, batch)
    steps = [make_step(options, name, task, net.to(device), batch, net is nets[0]) for net in nets]
    multiply, multiply_flops = sgemm(device)
    *seconds, gemm = time_in_turns([*steps, multiply], options.pairs, device)
    flops = count_flops(name, task, config, options.batch_size)
    cells, profiles = [], []
    for k, times in enumerate(seconds):
        rate = flops / times
        of_gemm = np.median(rate * gemm / multiply_flops)
        cells += [f"{np.median(times) * 1e3:.1f}", f"{np.median(rate) / 1e9:.1f}", f"{of_gemm:.2f}"]
        peak, rest = (f"{megabytes:.0f}" for megabytes in memory[k]) if memory else ("", "")
        cells.append(f"{peak} ({rest})" if memory and task == "train" else peak)
        if options.profile:
            profiles.append(profiled(steps[k], device))
            cells.append(", ".join(f"{key} {100 * part:.1f}" for key, part in [*profiles[k].items()][:8]))
    ratio = [quartiles(seconds[1] / seconds[0]) if folder else ""]
    if options.profile:
        faster = np.median(seconds[-1] / seconds[0])
        bounds = [faster / share(profiles[0], pattern) for pattern in (POINTWISE, PRODUCTS)]
        ratio.append(" / ".join(f"{bound:.2f}" for bound in bounds) if folder else "")
    return [name, size, task, *ratio, *cells, *([""] * len(cells) if folder is None else [])]


def machine(device: torch.device) -> str:
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = re.search(r"model name\s*: (.*)", info.read_text() + "model name: unknown")[1]
    chip = f"{torch.cuda.get_device_name()}, " if device.type == "cuda" else ""
    return f"{chip}{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main(options: Options) -> None:
    found, device = find_released(options.released), start(options)
    Run.compile(SimpleNamespace(config=options), nn.Identity())  # refuses at once where there is no compiler
    print(f"{machine(device)}, batch {options.batch_size}, {'compiled' if options.compile else 'eager'}, "
          f"{options.pairs} rounds")
    ours = ["ms", "GFLOP/s", "of sgemm", "peak MB (activations, gradients)"]
    ours += ["operations, %"] * options.profile
    ratio = ["ratio", *["at most, eager / compiled"] * options.profile]
    head = ["network", "size", "task", *ratio, *ours, *(f"released: {cell}" for cell in ours)]
    print(f"| {' | '.join(head)} |\n{'| --- ' * len(head)}|")
    for case in product(options.networks, options.sizes, options.tasks):
        print(f"| {' | '.join(row(options, *case, found.get(case[0])))} |", flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    cli(main, Options, "Time the networks, beside the released code where it is given.")
