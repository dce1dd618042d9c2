"""Twins do not drift: each X_tinygrad.py has the definitions of X.py, in its order, with its arguments."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWINS = sorted(path for path in ROOT.glob("*/*_tinygrad.py") if path.parent.name != "tests")


def definitions(body: list[ast.stmt], prefix: str = "") -> list[str]:
    """Classes and functions in order, methods under their class: `UViT.forward(self, x, timesteps)`.

    PyTorch calls `forward` of a module where tinygrad calls the object itself, so the two names are one.
    """
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            found += [prefix + node.name, *definitions(node.body, f"{prefix}{node.name}.")]
        elif isinstance(node, ast.FunctionDef):
            names = [arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
            found.append(f"{prefix}{node.name.replace('__call__', 'forward')}({', '.join(names)})")
    return found


def test_there_are_twins():
    assert {f"{path.parent.name}/{path.name}" for path in TWINS} >= {
        "shared/long_skip_tinygrad.py", "minimal_uvit/model_tinygrad.py", "minimal_uvit/train_tinygrad.py",
        "adm_unet/model_tinygrad.py", "edm2_mp_unet/model_tinygrad.py", "posthoc_ema/ema_tinygrad.py",
    }  # fmt: skip


# What has no counterpart: in tinygrad training is a state of the process, a step is compiled by hand, what is
# not to be fused is said.
ALONE = {
    "MPConv.train(self, mode)", "compiled(config, objective, D, params, optimizer)",
    "Linear", "Linear.forward(self, x)",
}  # fmt: skip


@pytest.mark.parametrize("path", TWINS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_twins_have_the_same_definitions(path):
    """What the twin imports from its PyTorch file, such as configs, it has already."""
    torch_path = path.with_name(path.name.replace("_tinygrad", ""))
    twin, torch_file = ast.parse(path.read_text()), ast.parse(torch_path.read_text())
    module = f"{path.parent.name}.{torch_path.stem}"
    imports = [node for node in twin.body if isinstance(node, ast.ImportFrom) and node.module == module]
    imported = {alias.name for node in imports for alias in node.names}
    for node in torch_file.body:  # and what only serves to define these, such as a table of presets
        if isinstance(node, ast.AnnAssign) and node.target.id in imported:
            imported |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    own = [node for node in torch_file.body if getattr(node, "name", None) not in imported]
    theirs, ours = ([line for line in definitions(body) if line not in ALONE] for body in (own, twin.body))
    assert ours == theirs
