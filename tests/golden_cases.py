"""The golden cases: inputs and answers of the released implementations (see tests/golden/README.md)."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parent / "golden"
_rule: dict = {}
exec(compile((FOLDER / "rule.py").read_text(), "rule.py", "exec"), _rule)
weight, array = _rule["weight"], _rule["array"]
MATH = json.loads((FOLDER / "math.json").read_text())
SIZES = {row["model"]: row for row in json.loads((FOLDER / "sizes.json").read_text())}


@dataclass
class Case:
    name: str
    meta: dict
    arrays: dict[str, np.ndarray]

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The released weights, rebuilt from names and shapes."""
        shapes = self.meta["state_dict"]
        return {name: torch.from_numpy(weight(name, shape)) for name, shape in shapes.items()}

    def inputs(self, *names: str) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(self.arrays[name]) for name in names if name in self.arrays}

    def probe(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(array(f"{self.name}:probe", tuple(shape)))


def load_case(name: str) -> Case:
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    meta = json.loads(str(arrays.pop("meta")))
    return Case(meta["case"], meta, arrays)


def cases(prefix: str) -> list[str]:
    return sorted(path.stem for path in FOLDER.glob(f"{prefix}_*.npz"))


def assert_close(ours: torch.Tensor, golden: np.ndarray, tolerance: float = 2e-5) -> None:
    """max |ours - golden| <= tolerance * max |golden|, the golden README's match."""
    error = np.abs(ours.detach().numpy() - golden).max() / np.abs(golden).max()
    assert error <= tolerance, f"off by {error:.2e} of the largest value"


def assert_grad_norms(net: nn.Module, golden: dict[str, float | None], ours: dict[str, str]) -> None:
    """Each parameter's gradient norm against its released entry's, to 2e-4 relative; None: no gradient."""
    params = dict(net.named_parameters())
    for name, norm in golden.items():
        grad = params[ours[name]].grad
        assert (grad is None) == (norm is None), name
        if norm is not None:
            assert grad.norm().item() == pytest.approx(norm, rel=2e-4, abs=1e-7), name
