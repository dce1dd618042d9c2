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


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def test_there_are_twins():
    assert {f"{path.parent.name}/{path.name}" for path in TWINS} >= {
        "shared/long_skip_tinygrad.py", "posthoc_ema/ema_tinygrad.py",
        *(f"{project}/{name}_tinygrad.py" for name in ("model", "train")
          for project in ("minimal_uvit", "adm_unet", "edm2_mp_unet")),
    }  # fmt: skip


# What has no counterpart: in tinygrad weights stay where they lie, clipping keeps no mask, training is a
# state of the process, a step is compiled by hand, what is not to be fused is said.
ALONE = {
    "flatten(params)", "_EMA.gather(self)", "Clip", "Clip.forward(ctx, x, bound)", "Clip.backward(ctx, grad)",
    "MPConv.train(self, mode)", "Linear", "Linear.forward(self, x)", "Conv2d", "Conv2d.forward(self, x)",
    "scalar(optimizer)", "compiled(config, objective, D, params, optimizer)",
    "compiled(config, task, net, params, optimizer)",
}  # fmt: skip


@pytest.mark.parametrize("path", TWINS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_twins_have_the_same_definitions(path):
    """What the twin imports from its PyTorch file, such as configs, it has already."""
    torch_path = path.with_name(path.name.replace("_tinygrad", ""))
    twin, torch_file = ast.parse(path.read_text()), ast.parse(torch_path.read_text())
    module = f"{path.parent.name}.{torch_path.stem}"
    imports = [node for node in twin.body if isinstance(node, ast.ImportFrom) and node.module == module]
    imported = {alias.name for node in imports for alias in node.names}
    for node in reversed(torch_file.body):  # and what serves to define these, such as a table of presets
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if imported & set().union(*map(names_in, targets)):
            imported |= names_in(node.value)
    own = [node for node in torch_file.body if getattr(node, "name", None) not in imported]
    theirs, ours = ([line for line in definitions(body) if line not in ALONE] for body in (own, twin.body))
    assert ours == theirs


def test_all_that_stands_alone_is_there():
    files = [path for twin in TWINS for path in (twin, twin.with_name(twin.name.replace("_tinygrad", "")))]
    assert set().union(*(definitions(ast.parse(path.read_text()).body) for path in files)) >= ALONE
