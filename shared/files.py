"""Files that are whole or not there, and weights loaded strictly."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from shared.check import require


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """`write(file)` beside `path`, then rename: whoever reads `path`, at any moment, reads a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_strictly(net: nn.Module, weights: dict[str, Tensor], names: dict[str, str] | None = None) -> None:
    """Load weights, under `names[theirs] = ours` where they are called differently. One ValueError lists all
    entries that are missing, extra or of another shape."""
    ours, names = net.state_dict(), names or {name: name for name in weights}
    faults = [f"{name} is missing" for name in ours.keys() - names.values()]
    for theirs, name in names.items():
        if name not in ours:
            faults.append(f"{theirs} is not of this network")
        elif weights[theirs].shape != ours[name].shape:
            faults.append(f"{theirs} has shape {tuple(weights[theirs].shape)}, not {tuple(ours[name].shape)}")
    require(not faults, f"weights do not fit: {'; '.join(sorted(faults))}")
    net.load_state_dict({name: weights[theirs] for theirs, name in names.items()})
