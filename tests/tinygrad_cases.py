"""What the tests of the tinygrad twins share: a compiler or a skip, weights by name, relative errors."""

import os

import numpy as np
import pytest
import torch
from tinygrad import Context, Tensor
from tinygrad.nn.state import get_state_dict, load_state_dict

from posthoc_ema.tinygrad_bridge import find_clang, to_tinygrad

try:
    find_clang()
except ValueError as error:
    if "CI" in os.environ:  # there the compiler must be had
        raise
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(autouse=True)
def compile_quickly():
    """Compile kernels as they come: tinygrad's optimizations cost more time than they save in a test."""
    with Context(NOOPT=1):
        yield


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Tensor]:
    return {name: to_tinygrad(tensor) for name, tensor in tensors.items()}


def copy_weights(net: torch.nn.Module, twin: object) -> None:
    """By name; both must have the same names and shapes."""
    weights = net.state_dict()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    assert {name: value.shape for name, value in get_state_dict(twin).items()} == shapes
    load_state_dict(twin, arrays(weights), verbose=False)


def error(ours: Tensor | np.ndarray, reference: torch.Tensor | np.ndarray) -> float:
    """max |ours - reference| / max |reference|."""
    ours = ours.numpy() if isinstance(ours, Tensor) else ours
    reference = reference.numpy(force=True) if isinstance(reference, torch.Tensor) else reference
    assert ours.shape == reference.shape
    return float(np.abs(ours - reference).max() / max(np.abs(reference).max(), 1e-12))


def gradients(loss: Tensor, net: object, *also: Tensor) -> dict[str, np.ndarray]:
    """Of each weight, by name; zeros for those that the loss does not depend on."""
    weights = get_state_dict(net)
    grads = dict(zip(weights, loss.gradient(*weights.values()), strict=True))
    Tensor.realize(loss, *also, *grads.values())
    return {name: grad.numpy() for name, grad in grads.items()}


def assert_same_gradients(ours: dict[str, np.ndarray], net: torch.nn.Module) -> None:
    """To 2e-4 of each weight's largest, after net's backward pass, and no closer than 1e-6 of the largest of
    all: a bias that a normalization takes out again has the rounding of float32 for a gradient."""
    largest = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
    for name, p in net.named_parameters():
        reference = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        scale = max(np.abs(reference).max(), 5e-3 * largest)
        assert np.abs(ours[name] - reference).max() <= 2e-4 * scale, name
