"""The bridge between tinygrad's networks and the rest, which is PyTorch's: snapshots, checkpoints, sampling.

tinygrad's CPU backend runs `$CC`, `clang` unless set, for every kernel. Where there is none, the `ziglang`
wheel has `zig clang`: two words where CC takes one, so a script of one line stands between.

Reading order: `find_clang`, `to_torch`, `to_tinygrad`, `TorchState`, `TorchFace`.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinygrad import Device, Tensor, TinyJit
from tinygrad.nn.state import get_state_dict, load_state_dict

from shared.check import require

# tinygrad's compiling processes are replaced after 16 kernels each unless told otherwise, which takes longer
# than these kernels do.
os.environ.setdefault("BEAM_MAX_TASKS_PER_CHILD", "1000000")


def find_clang() -> None:
    """Point CC at a clang, before tinygrad first compiles. ValueError where it needs one and none is here."""
    if Device.DEFAULT != "CPU" or "CC" in os.environ or shutil.which("clang"):
        return
    wheel = find_spec("ziglang")
    require(wheel is not None, "tinygrad needs clang, and there is none: pip install ziglang, or set CC")
    folder = tempfile.mkdtemp(prefix="clang-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = Path(folder, "clang")
    script.write_text(f'#!/bin/sh\nexec "{Path(wheel.origin).parent}/zig" clang "$@"\n')
    script.chmod(0o700)
    os.environ["CC"] = str(script)


def to_torch(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.numpy())


def to_tinygrad(tensor: torch.Tensor) -> Tensor:
    array = tensor.numpy(force=True)  # of a lone number tinygrad makes a constant, one for all that are equal
    return Tensor(array.reshape(-1)).reshape(array.shape) if array.ndim == 0 else Tensor(array)


def convert(state: Any, tensor: Callable[[Any], Any]) -> Any:
    """Nested dicts and lists, `tensor` applied to every tensor."""
    if isinstance(state, dict):
        return {key: convert(value, tensor) for key, value in state.items()}
    if isinstance(state, list):
        return [convert(value, tensor) for value in state]
    return tensor(state) if isinstance(state, torch.Tensor | Tensor) else state


def load_torch(net: Any, weights: dict[str, torch.Tensor]) -> Any:
    """The tinygrad network with these weights, one for each of its names."""
    load_state_dict(net, convert(weights, to_tinygrad), verbose=False)
    return net


class TorchState:
    """The state of a tinygrad optimizer or tracker in torch tensors, for `Run.resume` and `Run.save`."""

    def __init__(self, part: Any):
        self.part = part

    def state_dict(self) -> dict:
        own = hasattr(self.part, "state_dict")
        return convert(self.part.state_dict() if own else get_state_dict(self.part), to_torch)

    def load_state_dict(self, state: dict) -> None:
        state = convert(state, to_tinygrad)
        if hasattr(self.part, "load_state_dict"):
            self.part.load_state_dict(state)
        else:  # in place, where TinyJit's kernels look for it
            for name, value in get_state_dict(self.part).items():
                value.assign(state[name]).realize()


class TorchFace:
    """A tinygrad network, of a torch network's weights, that takes and gives torch tensors: to be sampled.

    TinyJit compiles for one shape, that of the first batch. Smaller ones are filled up, and cut again.
    """

    def __init__(self, net: Any, weights: dict[str, torch.Tensor]):
        find_clang()
        self.net, self.config, self.batch, self.jits = load_torch(net, weights), net.config, 0, {}

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.empty(0)  # on the device that its tensors come from and go to

    def __call__(self, *args: torch.Tensor | None) -> torch.Tensor:
        given = tuple(arg is not None for arg in args)  # TinyJit records one such pattern
        jit = self.jits.setdefault(given, TinyJit(lambda *args: self.net(*args).realize()))
        count = len(args[0])
        self.batch = max(self.batch, count)
        arrays = [arg if arg is None else arg.numpy(force=True) for arg in args]
        full = [a if a is None else np.resize(a, (self.batch, *a.shape[1:])) for a in arrays]
        return to_torch(jit(*[a if a is None else Tensor(a) for a in full]))[:count]
