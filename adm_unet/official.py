"""Released guided-diffusion weights in our networks.

Paper: arXiv:2105.05233v4. `load_official` takes what the released constructor was given and its state dict,
and returns an `ADMUNet`, `ADMSuperRes` or `ADMClassifier`; nothing may be missing, left over or mis-shaped.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from adm_unet.model import ADMConfig, Encoder, build
from shared.check import require
from shared.files import load_strictly

# The released constructors' arguments, by our names; those in OTHERS are translated below.
FIELDS = {
    "image_size": "img_size", "in_channels": "in_channels", "model_channels": "channels",
    "num_res_blocks": "depth", "dropout": "dropout", "num_heads": "num_heads",
    "use_scale_shift_norm": "scale_shift_norm", "resblock_updown": "resblock_updown",
    "conv_resample": "conv_resample", "use_new_attention_order": "qkv_first",
    "use_checkpoint": "checkpointing",
}
OTHERS = {
    "model", "name", "out_channels", "attention_resolutions", "channel_mult", "num_classes", "pool",
    "num_head_channels", "num_heads_upsample", "use_fp16", "dims",
}
DEFAULTS = dict(channel_mult=(1, 2, 4, 8), num_heads=1, use_scale_shift_norm=False, resblock_updown=False)

# Released names of a residual block's, attention's, plain resampling's and the pool's parts, and ours.
PARTS = (
    (r"in_layers\.0\.", "norm1."), (r"in_layers\.2\.", "conv1."), (r"emb_layers\.1\.", "emb_proj."),
    (r"out_layers\.0\.", "norm2."), (r"out_layers\.3\.", "conv2."), (r"skip_connection\.", "shortcut."),
    (r"proj_out\.", "proj."), (r"qkv_proj\.", "qkv."), (r"c_proj\.", "proj."), (r"\.op\.", ".conv."),
    ("positional_embedding", "pos_embed"),
)


def official_config(config: dict) -> ADMConfig:
    """Our config of a released constructor's arguments. ValueError for an argument it never had.

    `model` (or `name`) tells `adm_unet`, the default, from `adm_superres` and `adm_classifier`.
    """
    kind = config.get("model", config.get("name", "adm_unet"))
    kinds = ("adm_unet", "adm_superres", "adm_classifier")
    require(kind in kinds, f"model is {kind!r}: it must be one of {', '.join(kinds)}")
    unknown = sorted(config.keys() - FIELDS.keys() - OTHERS)
    require(not unknown, f"the released ADM has no argument {', '.join(unknown)}")
    require(config.get("dims", 2) == 2, f"dims is {config.get('dims')}: only images, dims 2, are supported")
    config = DEFAULTS | config
    classifier = kind == "adm_classifier"
    size, C, C_out = config["image_size"], config["in_channels"], config["out_channels"]
    require(classifier or C_out in (C, 2 * C), f"out_channels is {C_out}: it must be {C} or {2 * C}")
    return ADMConfig(
        **{FIELDS[key]: value for key, value in config.items() if key in FIELDS},
        channel_mult=tuple(config["channel_mult"]),
        attn_resolutions=tuple(size // rate for rate in config["attention_resolutions"]),  # theirs are rates
        num_classes=C_out if classifier else config.get("num_classes") or 0,
        learn_sigma=not classifier and C_out == 2 * C,
        low_res=size // 4 if kind == "adm_superres" else 0,  # both released ones enlarge by 4
        pool=config.get("pool", "adaptive") if classifier else "",
        head_channels=max(config.get("num_head_channels", -1), 0),
        num_heads_up=max(config.get("num_heads_upsample", -1), 0),
    )


def official_name(name: str, config: ADMConfig) -> str:
    """Our name of a released state-dict entry; one that no network of this config has stays as it is."""
    ours = name
    for pattern, part in PARTS:
        ours = re.sub(pattern, part, ours)
    stage, *rest = ours.split(".")
    try:
        return ".".join(STAGES[stage](rest, config)) if stage in STAGES else ours
    except (IndexError, ValueError):
        return name


def input_blocks(rest: list[str], config: ADMConfig) -> list[str]:
    block, part, *leaf = rest
    if block == "0":
        return ["in_conv", *leaf]
    if int(block) % (config.depth + 1) == 0:  # every later level begins with a lone change of resolution
        return ["in_blocks", str(int(block) - 1), *leaf]
    return ["in_blocks", str(int(block) - 1), ("res", "attn")[int(part)], *leaf]


def middle_block(rest: list[str], config: ADMConfig) -> list[str]:
    return [("mid_block1.res", "mid_block1.attn", "mid_block2.res")[int(rest[0])], *rest[1:]]


def output_blocks(rest: list[str], config: ADMConfig) -> list[str]:
    block, part, *leaf = rest
    level = len(config.widths) - 1 - int(block) // (config.depth + 1)
    parts = ("res", "attn", "up") if config.heads(level) else ("res", "up")
    return ["out_blocks", block, parts[int(part)], *leaf]


def out(rest: list[str], config: ADMConfig) -> list[str]:
    if config.pool.startswith("spatial"):
        return ["out", *rest]
    if rest[0] == "0":
        return ["norm", *rest[1:]]
    return ["out" if config.pool else "out_conv", *rest[1:]]


STAGES = {
    "label_emb": lambda rest, config: ["label_embed", *rest], "input_blocks": input_blocks,
    "middle_block": middle_block, "output_blocks": output_blocks, "out": out,
}


def load_official(config: dict, state_dict: dict[str, Tensor]) -> Encoder:
    """The released constructor's arguments and weights in, our network out.

    ValueError, listing every entry, where weights are missing, extra or mis-shaped.
    """
    net = build(official_config(config))
    load_into(net, state_dict)
    return net


def load_into(net: Encoder, state_dict: dict[str, Tensor]) -> None:
    ours = {}
    for name, value in state_dict.items():
        if name.endswith("positional_embedding"):  # theirs is (C, L)
            value = value.mT
        elif re.search(r"(qkv|proj_out)\.weight$", name):  # theirs are of a sequence of pixels: (C, C, 1)
            value = value[..., None]
        elif re.search(r"(qkv_proj|c_proj|^out\.3)\.weight$", name):  # theirs are 1x1 convolutions
            value = value.flatten(1)
        ours[name] = value
    load_strictly(net, ours, {name: official_name(name, net.config) for name in state_dict})


def read_official(path: Path, config: ADMConfig) -> Encoder:
    """A released `.pt` file in the network of one of our presets; nothing in it is executed.

    ValueError, naming the file, where it is not a state dict of this network.
    """
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
        net = build(config)
        load_into(net, state_dict)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:
        raise ValueError(f"{path} is not a PyTorch state dict") from error
    return net
