"""The tinygrad twins of adm_unet, against the released networks and torch."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from golden_cases import array, assert_close, cases, load_case
from test_adm import TINY, inputs, randomized
from tinygrad_cases import (  # noqa: F401
    Tensor,
    arrays,
    assert_same_gradients,
    compile_quickly,
    copy_weights,
    error,
    gradients,
)

from adm_unet.model_tinygrad import build
from adm_unet.official import load_official, official_name
from shared.long_skip import Kind, LongSkipConfig

QUICK = ("adm_superres", "adm_classifier_attention")
GOLDEN = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in cases("adm")]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    case = load_case(name)
    released = load_official(case.meta["config"], case.state_dict)
    net = build(released.config)
    copy_weights(released, net)
    out = net(**arrays(case.inputs("x", "timesteps", "labels", "low_res")))
    loss = (out * Tensor(array(f"{name}:probe", out.shape))).sum()
    grads = gradients(loss, net, out)
    assert_close(torch.from_numpy(out.numpy()), case.arrays["out"])
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    for released_name, norm in case.meta["grad_norm"].items():
        ours = np.linalg.norm(grads[official_name(released_name, net.config)])
        if norm > 2e-5:  # what is less is float32's idea of 0: see test_adm.py
            assert ours == pytest.approx(norm, rel=2e-4), released_name
        else:
            assert ours < 2e-4, released_name


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Kind))
def test_long_skips(kind):
    """Outputs to 2e-5 and gradients to 2e-4 of torch's."""
    config = replace(TINY, num_classes=3, long_skip=LongSkipConfig(kind, kappa=0.6, reduction=4))
    net, twin = randomized(config), build(config)
    copy_weights(net, twin)
    x, timesteps = inputs(net)
    labels = torch.tensor([2, 0])
    expected = net(x, timesteps, labels)
    probe = torch.randn(expected.shape)
    (expected * probe).sum().backward()
    out = twin(*(Tensor(a.numpy()) for a in (x, timesteps, labels)))
    grads = gradients((out * Tensor(probe.numpy())).sum(), twin, out)
    assert error(out, expected) <= 2e-5
    assert_same_gradients(grads, net)


def test_impossible_inputs():
    net, x, t = build(replace(TINY, num_classes=3)), Tensor.zeros(2, 3, 8, 8), Tensor.zeros(2)
    for args, sentence in [
        ((Tensor.zeros(2, 3, 8, 6), t, Tensor([0, 1])), "images are"), ((x, t), "needs labels"),
        ((x, t, Tensor([0, 3])), r"0\.\.3 not in 0\.\.2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            net(*args)
