"""Released EDM2 weights in our network, from state dicts or from the released pickles.

Paper: arXiv:2312.02696v2. `load_official` takes what the released constructor was given and its state dict,
and returns a `Denoiser`; nothing may be missing, left over or of another shape. `read_official_pickle`, which
executes nothing, takes both out of a released `.pkl`.

    net = load_official(*read_official_pickle(Path("edm2-img512-xs-2147483-0.135.pkl")))
"""

from torch import Tensor

from edm2_mp_unet.model import Denoiser, EDM2Config
from posthoc_ema.pickles import read_official_pickle
from shared.check import require
from shared.files import load_strictly

__all__ = ["load_official", "official_config", "official_name", "read_official_pickle"]

# The released constructor's arguments by our names; None only chooses an implementation.
FIELDS = {
    "img_resolution": "img_size", "img_channels": "in_channels", "label_dim": "num_classes", "use_fp16": None,
    "sigma_data": "sigma_data", "logvar_channels": "logvar_channels", "model_channels": "channels",
    "channel_mult": "channel_mult", "channel_mult_noise": "channel_mult_noise",
    "channel_mult_emb": "channel_mult_emb", "num_blocks": "num_blocks",
    "attn_resolutions": "attn_resolutions", "label_balance": "label_balance",
    "concat_balance": "concat_balance", "resample_filter": "resample_filter",
    "channels_per_head": "channels_per_head", "dropout": "dropout", "res_balance": "res_balance",
    "attn_balance": "attn_balance", "clip_act": "clip_act", "model": None,
}  # fmt: skip

# The constructor's defaults that our config does not share.
DEFAULTS = dict(model_channels=192, channel_mult=[1, 2, 3, 4], num_blocks=3, attn_resolutions=[16, 8])
DEFAULTS |= dict(channels_per_head=64)


def official_config(config: dict) -> EDM2Config:
    """Our config of a released constructor's arguments. ValueError for an argument it never had."""
    unknown = sorted(config.keys() - FIELDS.keys())
    require(not unknown, f"the released EDM2 has no argument {', '.join(unknown)}")
    ours = {FIELDS[name]: value for name, value in (DEFAULTS | config).items() if FIELDS[name]}
    return EDM2Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in ours.items()})


def official_names(config: EDM2Config) -> dict[str, str]:
    """Released names of blocks, `unet.enc.16x16_block0`, to ours, `unet.enc.0`: both as they run."""
    enc, dec, levels = [], [], range(len(config.channel_mult))
    for level in levels:
        size = f"{config.img_size >> level}x{config.img_size >> level}"
        enc += [f"{size}_down"] * (level > 0) + [f"{size}_block{i}" for i in range(config.num_blocks)]
        first = [f"{size}_up"] if level < levels[-1] else [f"{size}_in0", f"{size}_in1"]
        dec = first + [f"{size}_block{i}" for i in range(config.num_blocks + 1)] + dec
    names = {f"unet.enc.{name}": f"unet.enc.{i}" for i, name in enumerate(enc)}
    names |= {f"unet.dec.{name}": f"unet.dec.{i}" for i, name in enumerate(dec)}
    size = f"{config.img_size}x{config.img_size}"
    return names | {f"unet.enc.{size}_conv": "unet.conv_in"}


def official_name(name: str, config: EDM2Config) -> str:
    """Our name of a released state-dict entry."""
    block = ".".join(name.split(".")[:3])
    name = name.replace(block, official_names(config).get(block, block))
    for theirs, ours in (
        ("unet.out_conv", "unet.conv_out"), ("unet.out_gain", "unet.conv_out.gain"),
        (".emb_gain", ".emb_linear.gain"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def load_official(config: dict, state_dict: dict[str, Tensor]) -> Denoiser:
    """The released constructor's arguments and weights in, our network out.

    ValueError, listing every entry, where weights are missing, extra or mis-shaped.
    """
    net = Denoiser(official_config(config))
    load_strictly(net, state_dict, {name: official_name(name, net.config) for name in state_dict})
    return net
