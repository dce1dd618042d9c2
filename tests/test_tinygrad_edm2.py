"""The tinygrad twin of edm2_mp_unet, against the released networks and torch."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from golden_cases import array, assert_close, cases, load_case
from test_edm2 import TINY, awake, inputs
from tinygrad_cases import (  # noqa: F401
    Context,
    Tensor,
    arrays,
    assert_same_gradients,
    compile_quickly,
    copy_weights,
    error,
    get_state_dict,
    gradients,
)

from edm2_mp_unet.model_tinygrad import Denoiser, resample
from edm2_mp_unet.official import load_official, official_name
from shared.long_skip import Kind, LongSkipConfig


@pytest.mark.parametrize("name", ["edm2_class", pytest.param("edm2_uncond", marks=pytest.mark.slow)])
def test_golden(name):
    assert name in cases("edm2")
    case = load_case(name)
    released = load_official(case.meta["config"], case.state_dict)
    net = Denoiser(released.config)
    copy_weights(released, net)
    D_x, logvar = net(**arrays(case.inputs("x", "sigma", "labels")), return_logvar=True)
    loss = (D_x * Tensor(array(f"{name}:probe", D_x.shape))).sum() + logvar.sum()
    grads = gradients(loss, net, D_x, logvar)
    assert_close(torch.from_numpy(D_x.numpy()), case.arrays["denoised"])
    assert_close(torch.from_numpy(logvar.numpy()), case.arrays["logvar"])
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    for released_name, norm in case.meta["grad_norm"].items():
        ours = np.linalg.norm(grads[official_name(released_name, net.config)])
        assert ours == pytest.approx(norm or 0, rel=2e-4, abs=1e-7), released_name


@pytest.mark.parametrize("kind", [
    kind if kind == "learnable" else pytest.param(kind, marks=pytest.mark.slow) for kind in get_args(Kind)
])  # fmt: skip
def test_long_skips_in_training(kind):
    """Forced normalization of the weights, then outputs to 2e-5 and gradients to 2e-4 of torch's."""
    config = replace(TINY, channel_mult=(1, 2), long_skip=LongSkipConfig(kind, kappa=0.6, reduction=4))
    net, twin = awake(config).train(), Denoiser(config)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    copy_weights(net, twin)
    x, sigma, labels = inputs(2)
    D_x, logvar = net(x, sigma, labels, return_logvar=True)
    probe = torch.randn(D_x.shape)
    ((D_x * probe).sum() + logvar.sum()).backward()
    with Context(TRAINING=1):
        ours, our_logvar = twin(*(Tensor(a.numpy()) for a in (x, sigma, labels)), return_logvar=True)
        grads = gradients((ours * Tensor(probe.numpy())).sum() + our_logvar.sum(), twin, ours, our_logvar)
    assert error(ours, D_x) <= 2e-5 and error(our_logvar, logvar) <= 2e-5
    assert_same_gradients(grads, net)
    for name, value in net.state_dict().items():
        assert error(get_state_dict(twin)[name], value) <= 2e-5, name


@pytest.mark.parametrize("mode", ["down", "up"])
def test_resampling_with_a_longer_filter(mode):
    from edm2_mp_unet.model import resample as torch_resample

    x = torch.randn(2, 3, 4, 4)
    expected = torch_resample(x, (1, 3, 3, 1), mode)
    assert error(resample(Tensor(x.numpy()), (1, 3, 3, 1), mode), expected) <= 2e-6


def test_impossible_inputs():
    net, x, sigma = Denoiser(TINY), Tensor.zeros(2, 3, 8, 8), Tensor([1.0, 2.0])
    for args, sentence in [
        ((Tensor.zeros(2, 3, 8, 7), sigma), "images are"), ((x, Tensor([1.0])), "sigma is"),
        ((x, Tensor([1.0, 0.0])), "not positive"), ((x, sigma, Tensor([0, 5])), r"0\.\.5 not in 0\.\.4"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            net(*args)
