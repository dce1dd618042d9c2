"""Files of weights: whole or not there, describing themselves, and loaded strictly.

A snapshot is a safetensors file of averaged weights; its header says what network they are of, so that it can
be sampled from, reconstructed with or loaded in either framework with nothing else at hand.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.check import require

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """`write(file)` beside `path`, then rename: whoever reads `path`, at any moment, reads a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    write(beside)
    with open(beside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(beside, path)


def config_from_dict(cls: type, values: dict) -> Any:
    """The config dataclass, nested ones too, of what `dataclasses.asdict` and JSON made of it."""
    types = get_type_hints(cls)
    unknown = sorted(values.keys() - types.keys())
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}")

    def restore(name: str, value: Any) -> Any:
        if dataclasses.is_dataclass(types[name]):
            return config_from_dict(types[name], value)
        return tuple(value) if isinstance(value, list) else value

    return cls(**{name: restore(name, value) for name, value in values.items()})


def snapshot_path(folder: Path, nimg: int, sigma_rel: float) -> Path:
    return folder / f"{nimg:09d}-{sigma_rel:.3f}.safetensors"


def save_snapshot(path: Path, weights: dict[str, Tensor], header: dict, precision: str = "float32") -> None:
    """Write weights as `precision`, a key of PRECISIONS, with `header`'s JSON values in the file's header."""
    dtype = PRECISIONS[precision]
    cast = {k: (v.to(dtype) if v.is_floating_point() else v).cpu().contiguous() for k, v in weights.items()}
    write_whole(path, lambda file: save_file(cast, file, {k: json.dumps(v) for k, v in header.items()}))


def read_header(path: Path) -> dict:
    """A snapshot's header. ValueError, naming the file, where it is missing, truncated or no snapshot."""
    try:
        with safe_open(path, "pt") as file:
            header = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors snapshot ({error})") from error
    for key in ("network", "config", "nimg", "sigma_rel"):
        require(key in header, f"{path} is not a snapshot: its header has no {key}")
    return header


def read_snapshot(path: Path) -> tuple[dict[str, Tensor], dict]:
    """A snapshot's weights, on the CPU in float32, and its header. ValueError as `read_header`."""
    header = read_header(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, header


def load_strictly(net: nn.Module, weights: dict[str, Tensor], names: dict[str, str] | None = None) -> None:
    """Load weights, under `names[theirs] = ours` where they are called differently.

    ValueError, one sentence that lists them all, for entries that are missing, extra or of another shape.
    """
    ours, names = net.state_dict(), names or {name: name for name in weights}
    faults = [f"{name} is missing" for name in ours.keys() - names.values()]
    for theirs, name in names.items():
        if name not in ours:
            faults.append(f"{theirs} is not of this network")
        elif weights[theirs].shape != ours[name].shape:
            faults.append(f"{theirs} has shape {tuple(weights[theirs].shape)}, not {tuple(ours[name].shape)}")
    require(not faults, f"weights do not fit: {'; '.join(sorted(faults))}")
    net.load_state_dict({name: weights[theirs] for theirs, name in names.items()})
