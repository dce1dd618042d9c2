"""U-ViT, ADM and EDM2 as one kind of thing: as many long skips, as many parameters, stages numbered alike.

Papers: those of the three networks; long-skip scaling and its numbering, ScaleLong, arXiv:2310.13545v1.

Reading order: `Model`, the three builders, `match`, `build`. Stage i of a model is what its i-th long skip
joins, i = 1 outermost: the encoder block that makes the skip and the decoder block that takes it.

How the networks come to the same depth N and size:
- U-ViT has N blocks before its middle and N after. ADM and EDM2 have a skip for the first convolution, every
  block and every change of resolution, so N = levels (blocks + 1): the number of blocks that comes nearest.
- ADM normalizes 32 groups of channels, so its widths are multiples of 32, and of those few sizes the one
  nearest to the parameters asked for is taken. The widths of the others are then searched to match ADM's.

Deviations: all are unconditional; EDM2 is trained on EDM's loss like the others, so its uncertainty u has no
part, and its layer is counted but not trained.

    python comparison/networks.py       # depths, widths and parameter counts of the default command
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from adm_unet.model import ADMConfig, ADMUNet
from edm2_mp_unet.model import Denoiser as EDM2
from edm2_mp_unet.model import EDM2Config
from minimal_uvit.model import UViT, UViTConfig
from shared.check import require
from shared.diffusion import EDMPrecond
from shared.long_skip import LongSkipConfig, LongSkipScaling

NETWORKS = ("uvit", "adm", "edm2")
LEARNING_RATES = {"uvit": 3e-3, "adm": 2e-3, "edm2": 1e-2}  # those of their `digits` presets
TOLERANCE = 0.05  # by how much parameter counts may differ from ADM's
LEAST = 4  # images are halved level by level while they stay at least this large


@dataclass(frozen=True)
class Model:
    """A network with what training and measuring need to know of it."""

    net: nn.Module  # what is trained
    D: Callable[[Tensor, Tensor], Tensor]  # the denoiser D(x; sigma) that it makes
    encoder: list[nn.Module]  # encoder blocks of stages 1 .. N, whose outputs are the long skips
    decoder: list[nn.Module]  # decoder blocks of stages 1 .. N, which take them
    scaling: LongSkipScaling
    decay: int  # steps after which its learning rate falls as 1/sqrt(step); 0: never
    weight_decay: float  # AdamW's


def levels(size: int) -> int:
    """Resolutions that a UNet for images of this size has."""
    return 1 + (levels(size // 2) if size % 2 == 0 and size // 2 >= LEAST else 0)


def blocks(depth: int, size: int) -> int:
    """Blocks a level that bring levels (blocks + 1) nearest to `depth`."""
    return max(1, round(depth / levels(size)) - 1)


def uvit(depth: int, width: int, wide: int, shape: tuple[int, int, int], skip: LongSkipConfig) -> Model:
    """`width` is in units of 2 channels, one for each of 2 heads. `wide` is of no meaning here."""
    C, H, _ = shape
    patch = next(p for p in (4, 2, 1) if H % p == 0 and H // p >= LEAST)
    net = UViT(UViTConfig(H, patch, C, width=2 * width, depth=2 * depth, num_heads=2, long_skip=skip))
    stages = list(net.in_blocks), list(net.out_blocks)[::-1]
    return Model(net, EDMPrecond(net), *stages, net.long_skip, decay=0, weight_decay=0.03)


def adm(depth: int, width: int, wide: int, shape: tuple[int, int, int], skip: LongSkipConfig) -> Model:
    """`width` is in units of 32 channels, `wide` multiplies it below the full resolution."""
    C, H, _ = shape
    L = levels(H)
    mult, inner = (1, *[wide] * (L - 1)), (H >> L - 1,)
    net = ADMUNet(ADMConfig(H, C, 32 * width, mult, blocks(depth, H), inner, long_skip=skip))
    stages = [net.in_conv, *net.in_blocks], list(net.out_blocks)[::-1]
    return Model(net, EDMPrecond(net), *stages, net.long_skip, decay=0, weight_decay=0.0)


def edm2(depth: int, width: int, wide: int, shape: tuple[int, int, int], skip: LongSkipConfig) -> Model:
    """`width` is in channels, and attention has one head; `wide` as ADM's."""
    C, H, _ = shape
    L = levels(H)
    mult, inner, head = (1, *[wide] * (L - 1)), (H >> L - 1,), wide * width
    config = EDM2Config(H, C, 0, width, mult, num_blocks=blocks(depth, H), attn_resolutions=inner,
                        channels_per_head=head, long_skip=skip)
    net = EDM2(config)
    decoder = [block for block in net.unet.dec if block.takes_skip][::-1]
    stages = [net.unet.conv_in, *net.unet.enc], decoder
    return Model(net, net, *stages, net.unet.long_skip, decay=250, weight_decay=0.0)


BUILDERS = {"uvit": uvit, "adm": adm, "edm2": edm2}


@cache
def count(network: str, depth: int, width: int, wide: int, shape: tuple[int, int, int]) -> int:
    """Parameters of an unscaled network, which is not made."""
    with torch.device("meta"):
        net = BUILDERS[network](depth, width, wide, shape, LongSkipConfig()).net
    return sum(p.numel() for p in net.parameters())


@cache
def match(network: str, depth: int, parameters: int, shape: tuple[int, int, int]) -> tuple[int, int]:
    """(width, wide) of the network: ADM's come nearest to `parameters`, the others' to ADM. ValueError where
    none is within `TOLERANCE` of ADM."""
    require(shape[1] == shape[2], f"images are {shape}: they must be square, as data.image_size makes them")
    sizes = [(width, wide) for width in (1, 2, 3, 4) for wide in ((1, 2) if levels(shape[1]) > 1 else (1,))]
    best = min(sizes, key=lambda size: abs(math.log(count("adm", depth, *size, shape) / parameters)))
    if network == "adm":
        return best
    target, (low, high) = count("adm", depth, *best, shape), (1, 1)
    while count(network, depth, high, best[1], shape) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        less = count(network, depth, middle, best[1], shape) < target
        low, high = (middle, high) if less else (low, middle)
    width = min(low, high, key=lambda width: abs(count(network, depth, width, best[1], shape) - target))
    off = count(network, depth, width, best[1], shape) / target - 1
    told = f"{network} at depth {depth} comes no nearer to ADM's {target:,} parameters than {off:+.1%}"
    require(abs(off) <= TOLERANCE, f"{told}: choose another depth or other parameters")
    return width, best[1]


def build(network: str, depth: int, parameters: int, shape: tuple[int, int, int], skip: LongSkipConfig,
          seed: int) -> Model:
    """A new network. Its weights are a function of the seed alone, whatever the scaling; those of calibration
    networks, which only the learnable kinds have, come from the same seed."""
    size = match(network, depth, parameters, shape)
    torch.manual_seed(seed)
    model = BUILDERS[network](depth, *size, shape, skip)
    torch.manual_seed(seed)
    plain = BUILDERS[network](depth, *size, shape, LongSkipConfig())
    model.net.load_state_dict(plain.net.state_dict(), strict=False)
    return model


def describe(network: str, depth: int, parameters: int, shape: tuple[int, int, int]) -> str:
    """A line on the network: how many long skips and parameters it has."""
    size = match(network, depth, parameters, shape)
    with torch.device("meta"):
        skips = len(BUILDERS[network](depth, *size, shape, LongSkipConfig()).decoder)
    ours, adms = (count(n, depth, *match(n, depth, parameters, shape), shape) for n in (network, "adm"))
    return f"{network:5} {skips:3} long skips {ours:11,} parameters ({ours / adms - 1:+.1%} of adm's)"


if __name__ == "__main__":
    for name in NETWORKS:
        print(describe(name, 4, 300_000, (1, 8, 8)))
