"""Denoisers, losses and samplers: golden cases in float64, closed forms, and torch against numpy."""

import math

import numpy as np
import pytest
import torch
from golden_cases import MATH, array

from minimal_uvit.train import vp_loss
from shared.diffusion import (
    EDMPrecond,
    VPPrecond,
    edm_loss,
    log_normal_sigma,
    vp_alpha_bar,
    vp_sigma,
    vp_time,
    vp_uniform_sigma,
)
from shared.samplers import SAMPLERS, dpmpp_2m, guided, heun, seed_noise, sigma_steps, unlabelled

SHAPE = (2, 1, 4, 4)
SCHEDULE = {"num_steps": None, "sigma_min": 0.002, "sigma_max": 80, "rho": 7}  # EDM's defaults


def tanh(x):
    return x.tanh() if hasattr(x, "tanh") else np.tanh(x)


def D(x, sigma, labels=None):  # the closed forms of math.json's `edm_denoiser`
    s = sigma.reshape(-1, 1, 1, 1)
    return (0.3 * s**2 + 0.25 * x) / (s**2 + 0.25) + 0.05 * tanh(x) / (1 + s**2)


def D2(x, sigma, labels=None):
    s = sigma.reshape(-1, 1, 1, 1)
    return (0.1 * s**2 + 0.36 * x) / (s**2 + 0.36)


def name_in(text):
    return text.split('"')[1]


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("case", MATH["edm_sampler"], ids=lambda case: name_in(case["noise"]))
def test_heun_golden(case, convert):
    args, name = dict(case["args"]), name_in(case["noise"])
    denoiser = guided(D, D2, args.pop("guidance", 1))
    noise = convert(array(name, SHAPE).astype(np.float64))
    churn = lambda k: convert(array(f"{name}:churn{k}", SHAPE).astype(float))
    steps = [args.pop(key, default) for key, default in SCHEDULE.items()]
    out = heun(denoiser, noise, None, sigma_steps(*steps), churn_noise=churn, **args)
    np.testing.assert_allclose(np.asarray(out), case["out"], rtol=1e-9)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("case", MATH["dpmpp_2m"], ids=lambda case: name_in(case["x0"]))
def test_dpmpp_golden(case, convert):
    noise = convert(array(name_in(case["x0"]), SHAPE).astype(np.float64))
    out = dpmpp_2m(D, noise, None, sigma_steps(*(case[key] for key in SCHEDULE)))
    np.testing.assert_allclose(np.asarray(out), case["out"], rtol=1e-9)


@pytest.mark.parametrize("sampler, calls", [("heun", 2 * 7 - 1), ("euler", 7), ("dpmpp", 7)])
def test_calls_of_the_denoiser(sampler, calls):
    seen = []

    def spy(x, sigma, labels):
        assert sigma.shape == (2,) and labels == "labels"
        seen.append(sigma[0])
        return D(x, sigma)

    SAMPLERS[sampler](spy, np.zeros(SHAPE), "labels", sigma_steps(7))
    assert len(seen) == calls and min(seen) > 0


@pytest.mark.parametrize("sampler, order", [("euler", 1), ("heun", 2), ("dpmpp", 2)])
def test_order_of_convergence(sampler, order):
    """For data N(0, 0.25 I) the ODE's solution goes as sqrt(sigma^2 + 0.25): the error falls as h^order."""

    def ideal(x, sigma, labels=None):
        return x * (0.25 / (sigma.reshape(-1, 1, 1, 1) ** 2 + 0.25))

    noise = np.ones(SHAPE)
    exact = 80 * 0.5 / math.sqrt(80**2 + 0.25)
    out = [SAMPLERS[sampler](ideal, noise, None, sigma_steps(n))[0, 0, 0, 0] for n in (64, 128)]
    error = np.abs(np.array(out) - exact)
    assert error[0] / error[1] == pytest.approx(2**order, rel=0.2)


def test_sigma_steps():
    steps = sigma_steps(3, 1, 16, rho=2)  # roots 4, 2.5, 1
    assert steps == pytest.approx([16, 6.25, 1, 0], rel=1e-15)
    assert sigma_steps(1) == [80, 0]
    for arguments in [(0,), (3, 0), (3, 5, 4), (3, 1, math.inf), (3, math.nan)]:
        with pytest.raises(ValueError):
            sigma_steps(*arguments)


def test_guidance():
    x, sigma = np.full((1, 1, 1, 1), 3.0), np.array([1.0])
    calls = []

    def labelled(x, sigma, labels=None):
        calls.append(labels)
        return x * (2.0 if labels is None else 5.0)

    assert guided(labelled, unlabelled(labelled), 2.5)(x, sigma, 7) == 3 * (2 + 2.5 * (5 - 2))
    assert sorted(calls, key=str) == [7, None]
    guide = lambda *args: pytest.fail("w = 1 must not call the guide")
    assert guided(labelled, guide, 1) is labelled


def test_churn_needs_noise():
    with pytest.raises(ValueError, match="churn_noise"):
        heun(D, np.zeros(SHAPE), None, sigma_steps(3), S_churn=1)


def test_seed_noise_depends_on_the_seed_alone():
    alone, among = seed_noise([5], (2, 3)), seed_noise([1, 5, 9], (2, 3))
    np.testing.assert_array_equal(alone[0], among[1])
    assert alone.dtype == np.float32 and not np.array_equal(alone, seed_noise([5], (2, 3), stream=1))


def test_vp_sde_golden():
    vp = MATH["vp_sde"]
    t = np.array(vp["t"])
    np.testing.assert_allclose(vp_alpha_bar(t), vp["alpha_bar"], rtol=1e-9)
    np.testing.assert_allclose(vp_sigma(t), vp["sigma"], rtol=1e-9)
    np.testing.assert_allclose(vp_time(np.array(vp["sigma"])), t, rtol=1e-9)
    assert vp_sigma(np.float64(1)) == pytest.approx(152.16697, rel=1e-7)
    assert vp_sigma(np.float64(1e-3)) == pytest.approx(0.010485993, rel=1e-7)


def test_noise_distributions():
    assert log_normal_sigma(np.array([-1.0, 0, 2]), -1.2, 1.2) == pytest.approx(np.exp([-2.4, -1.2, 1.2]))
    assert vp_uniform_sigma(np.array([0.0, 1.0])) == pytest.approx([0.010485993, 152.16697], rel=1e-7)


def test_edm_precond():
    """EDM table 1, and a network time of 0..1000 over sigma 0.002..80, ln(sigma) in between."""
    seen = {}

    def net(x, t, labels):
        seen.update(x=x, t=t, labels=labels)
        return np.ones_like(x)

    sigma = np.array([0.002, math.sqrt(0.002 * 80), 80.0])
    out = EDMPrecond(net)(np.full((3, 1, 1, 1), 2.0), sigma, "labels")
    total = sigma**2 + 0.25
    assert out.ravel() == pytest.approx(0.25 / total * 2 + sigma * 0.5 / np.sqrt(total))
    assert seen["x"].ravel() == pytest.approx(2 / np.sqrt(total))
    assert seen["t"] == pytest.approx([0, 500, 1000], abs=1e-9)
    assert seen["labels"] == "labels"


def test_vp_precond():
    seen = {}

    def net(x, t, labels):
        seen.update(x=x, t=t)
        return np.full_like(x, 0.1)

    sigma = np.array(MATH["vp_sde"]["sigma"])
    x = np.full((6, 1, 1, 1), 3.0)
    assert VPPrecond(net)(x, sigma).ravel() == pytest.approx(3 - 0.1 * sigma)
    assert seen["t"] == pytest.approx(999 * np.array(MATH["vp_sde"]["t"]), rel=1e-9)
    # the process's own x_t: sqrt(alpha_bar) times ours
    assert seen["x"].ravel() == pytest.approx(3 * np.sqrt(MATH["vp_sde"]["alpha_bar"]))


def test_losses():
    y, n = np.full((2, 1, 2, 2), 0.5), np.full((2, 1, 2, 2), -1.0)
    sigma = np.array([0.5, 2.0])
    zero = lambda x, sigma, labels=None: 0 * x
    assert edm_loss(zero, y, sigma, n) == pytest.approx((sigma**2 + 0.25) / (0.5 * sigma) ** 2 * 0.25)
    # a network that predicts F = 0: the loss is |n|^2 = 1 at every sigma
    assert vp_loss(VPPrecond(lambda x, t, labels: 0 * x), y, sigma, n, None) == pytest.approx([1, 1])
    # F = 0 under EDM: D = c_skip x, and for unit-variance data of 0.5 the weighted loss is 1 on average
    rng = np.random.default_rng(0)
    y, n = 0.5 * rng.standard_normal((4, 1, 99, 99)), rng.standard_normal((4, 1, 99, 99))
    sigma = np.full(4, 1.7)
    assert edm_loss(EDMPrecond(lambda x, t, labels: 0 * x), y, sigma, n).mean() == pytest.approx(1, abs=0.02)


def test_torch_equals_numpy():
    rng = np.random.default_rng(1)
    y, n = rng.standard_normal((2, 3, 2, 4, 4))
    sigma = np.array([0.01, 1, 50])
    for precond, loss in ((EDMPrecond, edm_loss), (VPPrecond, vp_loss)):
        net = lambda x, t, labels: tanh(x) * t.reshape(-1, 1, 1, 1) / 1000
        expected = loss(precond(net), y, sigma, n, None)
        ours = loss(precond(net), *map(torch.from_numpy, (y, sigma, n)), None)
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12)
