"""Long-skip scaling, ScaleLong arXiv:2310.13545: coefficients in closed form, calibration against numpy."""

import numpy as np
import pytest
import torch

from shared.long_skip import LongSkipConfig, LongSkipScaling, long_skip_coefficients

LEARNABLE = ["learnable", "learnable_shared"]


@pytest.mark.parametrize("kind, kappa, expected", [
    ("none", 0.5, [1, 1, 1, 1]),
    ("inv_sqrt2", 0.5, [0.7071067811865476] * 4),
    ("constant", 0.5, [1, 0.5, 0.25, 0.125]),  # outermost first: kappa^(i-1)
    ("constant", 1.0, [1, 1, 1, 1]),
])
def test_coefficients(kind, kappa, expected):
    assert long_skip_coefficients(kind, kappa, 4) == pytest.approx(expected, rel=1e-15)
    scaling = LongSkipScaling(LongSkipConfig(kind, kappa), [3] * 4, pool_dims=(2, 3))
    skip = torch.randn(2, 3, 5, 5)
    for i in range(1, 5):
        torch.testing.assert_close(scaling(skip, i), expected[i - 1] * skip, rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", LEARNABLE)
@pytest.mark.parametrize("pool_dims, shape, width", [((2, 3), (2, 6, 4, 5), 6), ((2,), (2, 7, 5), 7)])
def test_calibration_network(kind, pool_dims, shape, width):
    """sigmoid(W2 relu(W1 pool + b1) + b2), a coefficient per channel in UNets and per token in U-ViT."""
    torch.manual_seed(0)
    scaling = LongSkipScaling(LongSkipConfig(kind, reduction=2), [width] * 3, pool_dims)
    skip = torch.randn(shape)
    for i in (1, 2, 3):
        net = scaling.networks[str(i) if kind == "learnable" else str(width)]
        W1, b1, W2, b2 = (p.detach().double().numpy() for p in net.parameters())
        assert W1.shape == (width // 2, width)
        pooled = skip.double().numpy().mean(pool_dims)
        kappa = 1 / (1 + np.exp(-(np.maximum(pooled @ W1.T + b1, 0) @ W2.T + b2)))
        expected = skip.double().numpy() * kappa.reshape(*kappa.shape, *[1] * len(pool_dims))
        np.testing.assert_allclose(scaling(skip, i).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_networks_are_shared_by_width():
    shared = LongSkipScaling(LongSkipConfig("learnable_shared"), [8, 8, 16, 16, 16], (2, 3))
    assert set(shared.networks) == {"8", "16"}
    assert set(LongSkipScaling(LongSkipConfig("learnable"), [8, 8, 16], (2, 3)).networks) == {"1", "2", "3"}


@pytest.mark.parametrize("kind", LEARNABLE)
def test_hidden_layer_is_never_empty(kind):
    scaling = LongSkipScaling(LongSkipConfig(kind, reduction=16), [3], (2, 3))
    assert next(iter(scaling.networks.values())).fc1.weight.shape == (1, 3)


@pytest.mark.parametrize("arguments, sentence", [
    (("constant", 0.0), r"kappa is 0.0: it must be in \(0, 1\]"),
    (("constant", 1.5), "kappa is 1.5"),
    (("constant", float("nan")), "kappa is nan"),
    (("scaled",), "kind 'scaled' is unknown: one of none, inv_sqrt2, constant, learnable, learnable_shared"),
    (("learnable", 0.5, 0), "reduction is 0"),
])
def test_errors(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        LongSkipConfig(*arguments)


@pytest.mark.parametrize("kind", LEARNABLE)
def test_learnable_kinds_have_no_constant_coefficients(kind):
    with pytest.raises(ValueError, match=f"{kind}' has no constant"):
        long_skip_coefficients(kind, 0.5, 4)
