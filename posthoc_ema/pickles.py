"""Released EDM2 pickles, read without executing anything in them.

Paper: arXiv:2312.02696v2. The released networks are pickles that carry their own source code, which plain
unpickling runs, as it calls whatever else a file names. Here every name becomes an `Inert`, which only notes
what it was called with; afterwards the notes are read, and of these the few that say where weights lie.

Reading order: `Inert`, `InertUnpickler`, `read_tensors`, `read_official_pickle`.

    config, state_dict = read_official_pickle(Path("edm2-img512-xs-2147483-0.135.pkl"))
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.check import require

# The first arguments of the released constructor, which its pickles may hold without their names.
POSITIONAL = ("img_resolution", "img_channels", "label_dim", "use_fp16", "sigma_data", "logvar_channels")

# Packages and types whose names released pickles hold: not imported either, but any other is reported.
PACKAGES = {"collections", "dnnlib", "numpy", "torch", "torch_utils", "training", "_codecs"}
TYPES = {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "object", "dict")}


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
        name = f"{module}.{name}"
        if module.split(".")[0] not in PACKAGES and name not in TYPES:
            self.foreign.add(name)
        return type("Inert", (Inert,), {"name": name})  # a new class each time: the file can alter none

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
    return torch.empty(0, dtype=storage.dtype).set_(storage).as_strided(size, stride, offset)


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
        network = as_dict(data).get("ema")
        require(network is not None, "it holds no network")
        name, state = module_state(network)
        require(name == "Precond", f"its network is a {name}, not EDM2's Precond")
        config = dict(zip(POSITIONAL, state.get("_init_args") or (), strict=False))
        return config | as_dict(state.get("_init_kwargs")), read_tensors(network)
    except Exception as error:
        raise ValueError(f"{path} is not a released EDM2 pickle: {error}") from error
