"""tinygrad beside PyTorch: a compiler for it, and its tensors and networks where torch's are expected.

tinygrad's CPU backend runs `$CC`, `clang` unless set, for every kernel. Where the machine has no clang, the `ziglang`
wheel has one: `zig clang`. That is two words and CC takes one, so a script of one line stands between.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

REMEDY = "tinygrad needs clang, and there is none here: pip install ziglang, or set CC to a clang"


def find_clang() -> bool:
    """Point CC at a clang, before tinygrad compiles for the first time; False where none can be had."""
    if "CC" in os.environ or shutil.which("clang"):
        return True
    wheel = find_spec("ziglang")
    if wheel is None:
        return False
    folder = Path(tempfile.mkdtemp(prefix="clang-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / "clang"
    script.write_text(f'#!/bin/sh\nexec "{Path(wheel.origin).parent}/zig" clang "$@"\n')
    script.chmod(0o700)
    os.environ["CC"] = str(script)
    return True


def convert(state: Any, leaf: Callable[[Any], Any]) -> Any:
    """`leaf` of every tensor in nested dicts and lists; other values as they are."""
    if isinstance(state, dict):
        return {key: convert(value, leaf) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [convert(value, leaf) for value in state]
    return leaf(state) if hasattr(state, "numpy") else state


def to_torch(tensor: Any) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.numpy())


def to_tinygrad(tensor: torch.Tensor) -> Any:
    from tinygrad import Tensor  # here, so that PyTorch alone runs without it

    return Tensor(tensor.numpy(force=True))


class TorchFace:
    """A tinygrad network that takes and gives torch tensors, and so serves samplers and validation as torch's.

    It computes `batch` images at a time, padding the last part, because TinyJit compiles for one shape.
    """

    def __init__(self, net: Any, batch: int):
        self.net, self.config, self.batch, self.compiled = net, net.config, batch, {}

    def __call__(self, *args: torch.Tensor | None) -> torch.Tensor:
        from tinygrad import Tensor, TinyJit

        given = tuple(arg is not None for arg in args)
        net = self.compiled.setdefault(given, TinyJit(lambda *args: self.net(*args).realize()))
        arrays, parts = [None if arg is None else arg.numpy(force=True) for arg in args], []
        for k in range(0, len(args[0]), self.batch):
            rows = [a if a is None else a[k : k + self.batch] for a in arrays]
            rows = [a if a is None else Tensor(np.resize(a, (self.batch, *a.shape[1:]))) for a in rows]
            parts.append(torch.from_numpy(net(*rows).numpy()))
        return torch.cat(parts)[: len(args[0])].to(args[0].device)
