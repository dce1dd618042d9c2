"""Released EDM2 weights in our network, from state dicts or from the released pickles.

Paper: arXiv:2312.02696v2. `load_official` takes what the released constructor was given and its state dict,
and returns a `Denoiser`; nothing may be missing, left over or of another shape. `read_official_pickle` takes
both out of a released `.pkl` and executes nothing of it: these carry source code that plain unpickling runs.

    net = load_official(*read_official_pickle(Path("edm2-img512-xs-2147483-0.135.pkl")))
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edm2_mp_unet.model import Denoiser, EDM2Config
from shared.check import require
from shared.files import load_strictly

# The released constructor's arguments, in its order, by our names; None only chooses an implementation.
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


# Released pickles -------------------------------------------------------------------------------------------
#
# Unpickling calls whatever globals the file names. Here each of them is a class of `Inert`, which only notes
# what it was called with; afterwards the notes are read, and of them the few that say where weights lie.

# Packages whose names released pickles hold. None of them is imported; a name of any other is reported.
PACKAGES = {"collections", "dnnlib", "numpy", "torch", "torch_utils", "training", "_codecs"}


class Inert:
    """What stands in a pickle for a global: its name, and what unpickling would have done with it."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        self = super().__new__(cls)
        self.__dict__.update(args=args, items={}, state=None)
        return self

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.items[len(self.items)] = value


class InertUnpickler(pickle.Unpickler):
    """Plain containers, strings and numbers, and `Inert`s: nothing is imported, nothing called."""

    def __init__(self, file: io.BufferedIOBase):
        super().__init__(file)
        self.foreign: set[str] = set()

    def find_class(self, module: str, name: str) -> type:
        if module.split(".")[0] not in PACKAGES:
            self.foreign.add(f"{module}.{name}")
        return type("Inert", (Inert,), {"name": f"{module}.{name}"})  # a new class each time: no shared state

    def persistent_load(self, pid: Any) -> None:
        raise pickle.UnpicklingError("storages outside the pickle")


def as_dict(value: Any) -> dict:
    """A plain, ordered or attribute-access dictionary; empty for None."""
    value = {} if value is None else value.items if isinstance(value, Inert) else value
    require(isinstance(value, dict), "its modules are not as released ones")
    return value


def module_state(module: Any) -> tuple[str, dict]:
    """Class name and attributes of a module: one of torch's, or one of the released code's own, which come
    with their source code."""
    require(isinstance(module, Inert), "its modules are not as released ones")
    if module.name == "torch_utils.persistence._reconstruct_persistent_obj" and module.args:
        meta = as_dict(module.args[0])
        return str(meta.get("class_name")), as_dict(meta.get("state"))
    return module.name, as_dict(module.state)


def read_tensor(value: Any) -> Tensor:
    """The tensor that a note of `_rebuild_parameter` or `_rebuild_tensor_v2` describes."""
    while isinstance(value, Inert) and value.name == "torch._utils._rebuild_parameter" and value.args:
        value = value.args[0]
    fits = isinstance(value, Inert) and value.name == "torch._utils._rebuild_tensor_v2"
    require(fits and len(value.args) >= 4, "a weight in it is not a tensor")
    storage, offset, size, stride = value.args[:4]
    fits = isinstance(storage, Inert) and storage.name == "torch.storage._load_from_bytes" and storage.args
    require(fits, "a tensor in it has no storage")
    # A file of torch.save within the pickle, read by torch's own restricted unpickler.
    storage = torch.load(io.BytesIO(storage.args[0]), map_location="cpu", weights_only=True)
    return torch.empty(0, dtype=storage.dtype).set_(storage.untyped(), offset, size, stride)


def read_tensors(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """State dict of a noted module and of those within it."""
    _, state = module_state(module)
    params, buffers = as_dict(state.get("_parameters")), as_dict(state.get("_buffers"))
    tensors = {prefix + k: read_tensor(v) for k, v in (params | buffers).items() if v is not None}
    for name, child in as_dict(state.get("_modules")).items():
        if child is not None:
            tensors |= read_tensors(child, f"{prefix}{name}.")
    return tensors


def read_official_pickle(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Constructor's arguments and state dict (in the file's precision) of a released `.pkl`.

    ValueError, naming the file, where it is not one, and naming any global that no released one has; whatever
    the file holds, nothing in it is executed.
    """
    try:
        with open(path, "rb") as file:
            unpickler = InertUnpickler(file)
            data = unpickler.load()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # a broken pickle can fail in any way
        raise ValueError(f"{path} is truncated or not a pickle ({error})") from error
    foreign = ", ".join(sorted(unpickler.foreign))
    require(not foreign, f"{path} asks for {foreign}, which no released network needs; nothing was executed")
    try:
        name, state = module_state(as_dict(data).get("ema"))
        require(name == "Precond", f"its network is a {name}, not EDM2's Precond")
        config = dict(zip(FIELDS, state.get("_init_args") or (), strict=False))
        return config | as_dict(state.get("_init_kwargs")), read_tensors(as_dict(data)["ema"])
    except Exception as error:
        raise ValueError(f"{path} is not a released EDM2 pickle: {error}") from error
