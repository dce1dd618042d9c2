"""Released U-ViT, text-to-image U-ViT and ScaleLong weights in our network.

Papers: arXiv:2209.12152v4 and arXiv:2310.13545v1. `load_official` takes what the released constructor was
given and its state dict, and returns a `UViT`; nothing may be missing, left over or of another shape.
`StableDiffusionPrecond` is the denoiser that the released H/2 and H/4 make, which have a noise schedule of
their own; the others are `VPPrecond`'s.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minimal_uvit.model import UViT, UViTConfig
from shared.check import require
from shared.diffusion import SIGMA_DATA, VPPrecond
from shared.files import load_strictly
from shared.long_skip import LongSkipConfig

# The released constructor's arguments, by our names; those that only choose an implementation are ignored.
FIELDS = {
    "img_size": "img_size", "patch_size": "patch_size", "in_chans": "in_channels", "embed_dim": "width",
    "depth": "depth", "num_heads": "num_heads", "mlp_ratio": "mlp_ratio", "qkv_bias": "qkv_bias",
    "mlp_time_embed": "mlp_time_embed", "clip_dim": "context_dim", "num_clip_token": "context_tokens",
    "conv": "conv", "skip": "skip", "use_checkpoint": "checkpointing",
}
SCALELONG = ("none", "inv_sqrt2", "constant", "learnable_shared", "learnable")  # by the released `scalelong`
OTHERS = {"model", "name", "num_classes", "scalelong", "kappa"}

# The constructors' defaults that our config does not share.
DEFAULTS = dict(img_size=224, patch_size=16, in_chans=3, embed_dim=768, depth=12, num_heads=12)
DEFAULTS_T2I = DEFAULTS | dict(clip_dim=768, num_clip_token=77)

# Released state-dict names, as patterns, and ours.
NAMES = (
    (r"^patch_embed\.proj\.", "patch_embed."),
    (r"^label_emb\.", "label_embed."),
    (r"^decoder_pred\.", "to_patches."),
    (r"^final_layer\.", "final_conv."),
    (r"\.mlp\.", "."),
)

# Presets whose released networks were trained on Stable Diffusion's noise schedule.
STABLE_DIFFUSION = ("h2_imagenet256", "h4_imagenet512", "s2_mscoco", "s2_deep_mscoco")
LATENT_SCALE = 0.18215  # released latent networks draw this many times what the autoencoder takes
LATENT_STD = SIGMA_DATA / LATENT_SCALE  # the same, as a snapshot's header says it


def official_config(config: dict) -> UViTConfig:
    """Our config of a released constructor's arguments. ValueError for an argument it never had.

    `model` (or `name`) tells `uvit`, the default, from `uvit_t2i`.
    """
    t2i = config.get("model", config.get("name", "uvit")) == "uvit_t2i"
    config = (DEFAULTS_T2I if t2i else DEFAULTS) | config
    unknown = sorted(config.keys() - FIELDS.keys() - OTHERS)
    require(not unknown, f"the released U-ViT has no argument {', '.join(unknown)}")
    num_classes = max(config.get("num_classes", -1), 0)
    return UViTConfig(
        **{FIELDS[key]: value for key, value in config.items() if key in FIELDS},
        num_classes=num_classes,
        null_class=num_classes == 1001,  # released networks of 1,001 classes: ImageNet's and the null class
        long_skip=LongSkipConfig(SCALELONG[config.get("scalelong", 0)], config.get("kappa", 0.5)),
    )


def official_name(name: str, config: UViTConfig) -> str:
    """Our name of a released state-dict entry."""
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    calibration = re.match(r"^se\.(?:(\d+)\.)?layer([12])\.(.*)", name)
    if calibration:  # released skips count from the innermost; a shared network has no number
        number, layer, leaf = calibration.groups()
        key = config.depth // 2 - int(number) if number is not None else config.num_tokens
        name = f"long_skip.networks.{key}.fc{layer}.{leaf}"
    return name


def load_official(config: dict, state_dict: dict[str, Tensor]) -> UViT:
    """The released constructor's arguments and weights in, our network out.

    ValueError, listing every entry, where weights are missing, extra or mis-shaped.
    """
    net = UViT(official_config(config))
    load_strictly(net, state_dict, {name: official_name(name, net.config) for name in state_dict})
    return net


def read_official(path: Path, config: UViTConfig) -> UViT:
    """A released `.pth` file in the network of one of our presets; nothing in it is executed.

    ValueError, naming the file, where it is not a state dict of this network.
    """
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
        net = UViT(config)
        load_strictly(net, state_dict, {name: official_name(name, config) for name in state_dict})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:
        raise ValueError(f"{path} is not a PyTorch state dict") from error
    return net


class StableDiffusionPrecond(VPPrecond):
    """`VPPrecond` of a network whose time is the step n of Stable Diffusion's process, 1 .. 1000; between two
    steps n is linear in ln alpha, as DPM-Solver has it."""

    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    log_alpha = np.cumsum(np.log1p(-betas)) / 2  # alpha_n = 1 / sqrt(1 + sigma_n^2)
    sigmas = np.expm1(-2 * log_alpha) ** 0.5  # of steps 1 .. 1000

    def __init__(self, net: Callable):
        super().__init__(net, self.step)

    def step(self, sigma: Tensor) -> Tensor:
        log_alpha = -np.log1p(sigma.double().cpu().numpy() ** 2) / 2
        n = np.interp(-log_alpha, -self.log_alpha, np.arange(1.0, 1001.0))
        return torch.from_numpy(n).to(sigma)
