"""tinygrad beside PyTorch: a compiler for it, and its tensors and networks where torch's are expected.

tinygrad's CPU backend runs `$CC`, `clang` unless set, for every kernel. Where there is none, the `ziglang`
wheel has `zig clang`: two words where CC takes one, so a script of one line stands between.
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

REMEDY = "tinygrad needs clang, and there is none here: pip install ziglang, or set CC to a clang"


def find_clang() -> bool:
    """Point CC at a clang, before tinygrad first compiles; False where none can be had: see REMEDY."""
    if "CC" in os.environ or shutil.which("clang"):
        return True
    wheel = find_spec("ziglang")
    if wheel is not None:
        folder = tempfile.mkdtemp(prefix="clang-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["CC"] = f"{folder}/clang"
        Path(folder, "clang").write_text(f'#!/bin/sh\nexec "{Path(wheel.origin).parent}/zig" clang "$@"\n')
        Path(folder, "clang").chmod(0o700)
    return wheel is not None


def to_torch(tensor: Any) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.numpy())


def to_tinygrad(tensor: torch.Tensor) -> Any:
    from tinygrad import Tensor  # here, so that PyTorch's side works without tinygrad

    array = tensor.numpy(force=True)  # of a lone number tinygrad makes a constant, one for all that are equal
    return Tensor(array.reshape(-1)).reshape(array.shape) if array.ndim == 0 else Tensor(array)


def named_weights(net: Any) -> dict[str, Any]:
    if hasattr(net, "state_dict"):
        return net.state_dict()
    from tinygrad.nn.state import get_state_dict

    return get_state_dict(net)


def load_weights(net: Any, weights: dict[str, torch.Tensor]) -> None:
    """Into a network of either framework; names and shapes fit."""
    if isinstance(net, torch.nn.Module):
        net.load_state_dict(weights)
    else:
        for name, value in named_weights(net).items():
            value.replace(to_tinygrad(weights[name]))


def convert(state: Any, tensor: Callable[[Any], Any]) -> Any:
    """Nested dicts and lists, `tensor` applied to every tensor."""
    if isinstance(state, dict):
        return {key: convert(value, tensor) for key, value in state.items()}
    if isinstance(state, list):
        return [convert(value, tensor) for value in state]
    return tensor(state) if hasattr(state, "numpy") else state


class TorchState:
    """The state of a tinygrad network, optimizer or tracker in torch tensors, for `Run.resume` and `save`."""

    def __init__(self, part: Any):
        self.part = part

    def state_dict(self) -> dict:
        return convert(named_weights(self.part), to_torch)

    def load_state_dict(self, state: dict) -> None:
        state = convert(state, to_tinygrad)
        if hasattr(self.part, "load_state_dict"):
            self.part.load_state_dict(state)
        else:  # in place, where TinyJit's kernels look for it
            for name, value in named_weights(self.part).items():
                value.assign(state[name]).realize()


class TorchFace:
    """A tinygrad network that takes and gives torch tensors, so that sampling and validation need no twin.

    It computes `batch` images at a time, or as many as at first, the last ones padded: TinyJit compiles for
    one shape.
    """

    def __init__(self, net: Any, batch: int | None = None):
        self.net, self.config, self.batch, self.compiled = net, net.config, batch, {}

    def parameters(self) -> Iterator[torch.Tensor]:
        yield torch.empty(0)  # for its device

    def __call__(self, *args: torch.Tensor | None) -> torch.Tensor:
        from tinygrad import Tensor, TinyJit

        given = tuple(arg is not None for arg in args)  # TinyJit records one such pattern
        net = self.compiled.setdefault(given, TinyJit(lambda *args: self.net(*args).realize()))
        parts, self.batch = [], self.batch or len(args[0])
        for k in range(0, len(args[0]), self.batch):
            rows = [arg if arg is None else arg[k : k + self.batch].numpy(force=True) for arg in args]
            rows = [a if a is None else Tensor(np.resize(a, (self.batch, *a.shape[1:]))) for a in rows]
            parts.append(torch.from_numpy(net(*rows).numpy()))
        return torch.cat(parts)[: len(args[0])].to(args[0].device)
