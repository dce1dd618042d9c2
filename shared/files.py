"""Files that are whole or not there, and weights loaded strictly."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from shared.check import require
from shared.tinygrad_backend import load_weights, named_weights


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """`write(file)` beside `path`, then rename: whoever reads `path`, at any moment, reads a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_strictly(net: Any, weights: dict[str, Tensor], names: dict[str, str] | None = None) -> None:
    """Load weights into a network of either framework, under `names[theirs] = ours` where they are called
    differently. One ValueError lists all entries that are missing, extra or of another shape."""
    ours, names = named_weights(net), names or {name: name for name in weights}
    faults = [f"{name} is missing" for name in ours.keys() - names.values()]
    for theirs, name in names.items():
        if name not in ours:
            faults.append(f"{theirs} is not of this network")
        elif tuple(weights[theirs].shape) != tuple(ours[name].shape):
            faults.append(f"{theirs} has shape {tuple(weights[theirs].shape)}, not {tuple(ours[name].shape)}")
    require(not faults, f"weights do not fit: {'; '.join(sorted(faults))}")
    load_weights(net, {name: weights[theirs] for theirs, name in names.items()})
