"""The process of Improved DDPM against golden cases of the released code and closed forms."""

import math

import numpy as np
import pytest
import torch
from golden_cases import MATH, array

from adm_unet import iddpm
from adm_unet.iddpm import (
    IDDPM,
    SCHEDULES,
    LossSecondMoment,
    ancestral,
    bits_per_dim,
    ddim,
    losses,
    space_timesteps,
)
from shared.samplers import heun, sigma_steps

FRAMEWORKS = {"numpy": np.asarray, "torch": lambda a: torch.from_numpy(np.asarray(a))}


def golden_net(x, timesteps, labels=None):
    """The closed-form network of math.json's `adm_model`."""
    numpy, t = isinstance(x, np.ndarray), timesteps.reshape(-1, 1, 1, 1)
    sin, tanh, cat = (np.sin, np.tanh, np.concatenate) if numpy else (torch.sin, torch.tanh, torch.cat)
    eps = 0.6 * x + 0.1 * sin(3 * x) + 0.2 * t / 1000
    return cat([eps, tanh(0.5 * x) - 0.2 + t / 1000], 1)


def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return array(name, shape).astype(np.float64)


# Schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedules(name):
    case, betas = MATH["beta_schedules"][name], SCHEDULES[name](1000)
    np.testing.assert_allclose(betas[case["index"]], case["betas"], rtol=1e-9)
    alpha_bar = IDDPM(betas).alpha_bar[case["index"]]
    np.testing.assert_allclose(alpha_bar, case["alphas_cumprod"], rtol=1e-9)


def test_schedules_scale_with_the_number_of_steps():
    """Half way, alpha_bar is about that of infinitely many: exp(-(0.1 / 2 + 19.9 / 8)), and Eq. 17's."""
    angle = (0.5 + 0.008) / 1.008 * math.pi / 2
    limits = {"linear": math.exp(-(0.05 + 19.9 / 8)), "cosine": math.cos(angle) ** 2}
    for name, half in limits.items():
        for T in (500, 4000):
            process = IDDPM(SCHEDULES[name](T))
            assert process.alpha_bar[T // 2] == pytest.approx(half, abs=4e-3)
            assert process.alpha_bar[-1] < 1e-4


def test_too_few_steps():
    IDDPM(SCHEDULES["linear"](21))
    for T in (20, 10):
        with pytest.raises(ValueError, match=f"a schedule of {T} steps is not between 0 and 1"):
            IDDPM(SCHEDULES["linear"](T))
    with pytest.raises(ValueError, match="variance is 'tiny'"):
        IDDPM(SCHEDULES["linear"](100), variance="tiny")


@pytest.mark.parametrize("spacing", MATH["respacing"])
def test_golden_respacing(spacing):
    assert space_timesteps(1000, spacing) == MATH["respacing"][spacing]


def test_respacing_by_hand():
    assert space_timesteps(5, "") == [0, 1, 2, 3, 4]
    assert space_timesteps(7, "2,1") == [0, 3, 4]  # sections of 4 and 3
    assert space_timesteps(10, "0,3") == [5, 7, 9]
    assert space_timesteps(10, "ddim4") == [0, 3, 6, 9]


@pytest.mark.parametrize("spacing, sentence", [
    ("ddim7", "no whole stride takes so many of 10 steps"), ("6,1", "takes 6 steps of a section of 5"),
    ("0", "takes no step"), ("ten", "'ten': it must be like"), ("5,", "it must be like"), ("ddim2,3", "like"),
    ("-1", "like"),
])  # fmt: skip
def test_impossible_respacing(spacing, sentence):
    with pytest.raises(ValueError, match=sentence):
        space_timesteps(10, spacing)


def test_a_shorter_process_keeps_its_noise_levels():
    betas = SCHEDULES["cosine"](100)
    whole, some = IDDPM(betas), IDDPM(betas, [3, 50, 98])
    np.testing.assert_allclose(np.cumprod(1 - some.betas), whole.alpha_bar[[3, 50, 98]])
    assert some.times.tolist() == [3, 50, 98]
    assert IDDPM(betas, [3, 50, 98], rescale=True).times.tolist() == [30, 500, 980]


# Sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("k", range(len(MATH["adm_sampling"])))
def test_golden_sampling(k, framework):
    """Ancestral samples agree to 1e-9. DDIM's golden samples hold the square roots that their machine took in
    float32: the released code, run on this one, is 1.5e-7 away from them and equals ours."""
    case, name, convert = MATH["adm_sampling"][k], "gd:" + "abcd"[k], FRAMEWORKS[framework]
    process = IDDPM(SCHEDULES[case["schedule"]](1000), space_timesteps(1000, case["respacing"]))
    x = convert(normal(name, (2, 1, 4, 4)))
    noise = lambda k: convert(normal(f"{name}:{k}", (2, 1, 4, 4)))
    if case["kind"] == "ddim":
        out = ddim(process, golden_net, x, noise, clip=case["clip_denoised"], eta=case["eta"])
    else:
        out = ancestral(process, golden_net, x, noise, clip=case["clip_denoised"])
    golden = np.array(case["out"])
    tolerance = 3e-7 if case["kind"] == "ddim" else 1e-9
    assert np.abs(np.asarray(out) - golden).max() <= tolerance * np.abs(golden).max()


def perfect_net(process: IDDPM, variance: float):
    """The noise that remains in images of N(0, variance): the posterior mean of eps is linear in x_t."""

    def net(x, timesteps, labels=None):
        a = np.interp(np.asarray(timesteps), process.times, process.alpha_bar).reshape(-1, 1, 1, 1)
        return (1 - a) ** 0.5 / (a * variance + 1 - a) * x

    return net


def test_ddim_with_eta_1_is_ancestral_sampling_with_small_variances():
    process = IDDPM(SCHEDULES["linear"](1000), space_timesteps(1000, "20"), variance="small")
    net, x = perfect_net(process, 0.25), normal("x", (3, 1, 2, 2))
    noise = lambda k: normal(f"n{k}", x.shape)
    a, b = ancestral(process, net, x, noise, clip=False), ddim(process, net, x, noise, clip=False, eta=1.0)
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


def test_ddim_follows_the_ode():
    """Images of N(0, s^2): x / sqrt(alpha_bar s^2 + 1 - alpha_bar) stays what it is along the ODE."""
    process = IDDPM(SCHEDULES["cosine"](2000), variance="small")
    x, s = normal("x", (3, 1, 2, 2)), 0.5
    out = ddim(process, perfect_net(process, s * s), x, clip=False)
    np.testing.assert_allclose(out, s * x, rtol=3e-3)


@pytest.mark.parametrize("steps, error", [(100, 0.05), (1000, 0.005)])
def test_inversion_round_trip(steps, error):
    """The error of coming back shrinks with the number of steps, and the noise is that of the ODE."""
    process = IDDPM(SCHEDULES["cosine"](steps), variance="small")
    net, x_0 = perfect_net(process, 0.25), 0.5 * normal("x", (3, 1, 2, 2))
    x_T = iddpm.ddim_invert(process, net, x_0)
    np.testing.assert_allclose(x_T, x_0 / 0.5, rtol=error)
    np.testing.assert_allclose(ddim(process, net, x_T, clip=False), x_0, rtol=error)


def test_eta_needs_noise():
    with pytest.raises(ValueError, match="eta needs noise"):
        ddim(IDDPM(SCHEDULES["cosine"](10)), golden_net, np.zeros((1, 1, 2, 2)), eta=0.5)


def test_clipping_holds_the_prediction():
    process = IDDPM(SCHEDULES["cosine"](50), variance="small")
    far = lambda x, timesteps, labels: 0 * x - 5
    x = normal("x", (2, 1, 2, 2))
    assert np.abs(ddim(process, far, x)).max() == 1.0  # the last step lands on x_0 itself
    assert np.abs(ddim(process, far, x, clip=False)).max() > 1.5


def test_a_learned_variance_needs_outputs():
    with pytest.raises(ValueError, match="no variance learned: 1 outputs for 1 channels"):
        ddim(IDDPM(SCHEDULES["cosine"](10)), lambda x, t, y: x, np.zeros((1, 1, 2, 2)))


# Denoiser ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_denoiser(framework):
    """Images of N(0, s^2): D = s^2 / (s^2 + sigma^2) x, between steps too, and what the sampler makes."""
    convert = FRAMEWORKS[framework]
    process, s = IDDPM(SCHEDULES["cosine"](2000), variance="small"), 0.5

    def net(x, timesteps, labels):
        out = perfect_net(process, s * s)(np.asarray(x), np.asarray(timesteps))
        return convert(out)

    D = process.denoiser(net)
    x, sigma = normal("x", (4, 1, 2, 2)), np.array([0.01, 0.3, 1.0, 40.0])
    out = np.asarray(D(convert(x), convert(sigma), None))
    np.testing.assert_allclose(out, x * (s * s / (s * s + sigma**2))[:, None, None, None], rtol=5e-3)
    out = np.asarray(heun(D, convert(x), None, sigma_steps(64, 0.002, 80)))
    np.testing.assert_allclose(out, x * s * 80 / (s * s + 80**2) ** 0.5, rtol=5e-3)


# Classifier guidance ----------------------------------------------------------------------------------------


def test_guidance_closed_form():
    """log p(y | x) = -x^2 / 2, x_t = 3, mean 1, variance 0.5: the released code moves the mean to -0.5,
    section 4.1 to 0.5."""
    x, mu, log_var = (np.full((1, 1, 1, 1), value) for value in (3.0, 1.0, math.log(0.5)))
    assert iddpm.guided_mean(mu, log_var, -x).item() == pytest.approx(-0.5)
    assert iddpm.guided_mean(mu, log_var, -mu).item() == pytest.approx(0.5)


@pytest.mark.parametrize("at_mean", [False, True])
def test_ancestral_takes_the_gradient_where_it_says(at_mean):
    """Two steps: the gradient is asked for x_t and its time, or for the mean and the time that it is of."""
    process = IDDPM(SCHEDULES["cosine"](1000), [400, 900], variance="small")
    asked, x = [], normal("x", (1, 1, 2, 2))
    net, noise = perfect_net(process, 0.25), lambda k: normal(f"n{k}", x.shape)

    def gradient(point, timesteps):
        asked.append((point, timesteps.item()))
        return -point

    out = ancestral(process, net, x, noise, clip=False, gradient=gradient, at_mean=at_mean)
    eps = net(x, process.timesteps(x, 1))
    mu, log_var, _ = process.back(eps, None, x, 1, clip=False)
    expected = [(mu, 400.0)] if at_mean else [(x, 900.0)]
    x = mu - np.exp(log_var) * expected[0][0] + np.exp(log_var / 2) * noise(0)
    mu, log_var, _ = process.back(net(x, process.timesteps(x, 0)), None, x, 0, clip=False)
    expected += [(mu if at_mean else x, 400.0)]
    for (point, time), (expected_point, expected_time) in zip(asked, expected, strict=True):
        np.testing.assert_allclose(point, expected_point)
        assert time == expected_time
    np.testing.assert_allclose(out, mu - np.exp(log_var) * expected[1][0])


def test_guidance_samples_the_product():
    """Images of N(0, s^2) times a classifier exp(-x^2 / (2 r^2)) of clean images: N(0, 1 / (s^-2 + r^-2)).
    With the noisy classifier's exact gradient both DDIM and EDM's sampler scale noise to its deviation."""
    process, s, r = IDDPM(SCHEDULES["cosine"](2000), variance="small"), 0.5, 0.4
    product = 1 / (1 / s**2 + 1 / r**2)

    def gradient(x, timesteps):  # difference of two scores, each -x / (alpha_bar variance + 1 - alpha_bar)
        a = np.interp(timesteps, process.times, process.alpha_bar).reshape(-1, 1, 1, 1)
        return x / (a * s * s + 1 - a) - x / (a * product + 1 - a)

    net, x = perfect_net(process, s * s), normal("x", (3, 1, 2, 2))
    out = ddim(process, net, x, clip=False, gradient=gradient)
    np.testing.assert_allclose(out, product**0.5 * x, rtol=1e-2)
    D = iddpm.guided_denoiser(process, process.denoiser(net), gradient)
    out = heun(D, x, None, sigma_steps(64, 0.002, 80))
    np.testing.assert_allclose(out, product**0.5 * x, rtol=1e-2)


# Losses and likelihood --------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("k", range(len(MATH["adm_losses"])))
def test_golden_losses(k, framework):
    case, name, convert = MATH["adm_losses"][k], "gl:" + "ab"[k], FRAMEWORKS[framework]
    x_0 = convert(np.clip(0.5 * normal(name, (4, 1, 4, 4)), -1, 1))
    noise, t = convert(normal(f"{name}:noise", (4, 1, 4, 4))), np.array(case["t"])
    process = IDDPM(SCHEDULES[case["schedule"]](1000))
    terms = losses(process, golden_net, x_0, t, noise)
    for ours, golden in (("mse", "mse"), ("vlb", "vb"), ("loss", "loss")):
        np.testing.assert_allclose(np.asarray(terms[ours]), case[golden], rtol=1e-9)
    for objective, w_mse, w_vlb in (("vlb", 0, 1), ("rescaled_vlb", 0, 1000), ("rescaled_hybrid", 1, 1)):
        total = losses(process, golden_net, x_0, t, noise, objective=objective)["loss"]
        expected = w_mse * np.array(case["mse"]) + w_vlb * np.array(case["vb"])
        np.testing.assert_allclose(np.asarray(total), expected, rtol=1e-9)
    simple = losses(process, golden_net, x_0, t, noise, objective="simple")
    assert simple.keys() == {"loss", "mse"}


def test_the_bound_of_a_hybrid_does_not_teach_the_mean():
    process = IDDPM(SCHEDULES["cosine"](100))
    eps, v = (torch.zeros(4, 1, 2, 2, requires_grad=True) for _ in range(2))
    x_0, noise = torch.randn(4, 1, 2, 2), torch.randn(4, 1, 2, 2)
    args = process, lambda x, t, y: torch.cat([eps, v], 1), x_0, np.array([0, 5, 50, 99]), noise
    losses(*args, objective="hybrid")["loss"].sum().backward()
    torch.testing.assert_close(eps.grad, 2 * (eps.detach() - noise) / 4)  # that of L_simple alone
    assert v.grad.abs().min() > 0
    eps.grad = None
    losses(*args, objective="vlb")["loss"].sum().backward()
    assert eps.grad.abs().sum() > 0 and eps.grad.isfinite().all()


def test_fixed_variances():
    """With the true noise, the bound of a step is that of its variance: nothing for beta_tilde, and for beta
    (r - 1 - ln r) / 2 nats, r = beta_tilde / beta."""
    betas, x_0, noise = SCHEDULES["cosine"](100), normal("x", (2, 1, 2, 2)), normal("n", (2, 1, 2, 2))
    t = np.array([20, 90])
    for variance in ("small", "large"):
        process = IDDPM(betas, variance=variance)
        terms = losses(process, lambda x, t, y: noise, x_0, t, noise, objective="vlb")
        r = np.exp(process.log_small - process.log_large)[t] if variance == "large" else np.ones(2)
        np.testing.assert_allclose(terms["vlb"], (r - 1 - np.log(r)) / 2 / math.log(2), rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(terms["mse"], 0, atol=1e-20)
        with pytest.raises(ValueError, match=f"hybrid needs a learned variance, not a {variance} one"):
            losses(process, lambda x, t, y: noise, x_0, t, noise, objective="hybrid")


def test_bits_per_dim_closed_form():
    """One image, known to the network: nothing costs but the last step, the image's own bin under a normal
    distribution around it, and the prior, KL(N(sqrt(a) x_0, 1 - a) || N(0, 1))."""
    process = IDDPM(SCHEDULES["linear"](200), variance="small")
    x_0 = np.array([-0.5, 0.1, 0.9]).reshape(1, 1, 1, 3)

    def net(x, timesteps, labels):
        return process.eps(x, int(timesteps[0]), x_0)

    out = bits_per_dim(process, net, x_0, lambda k: normal(f"n{k}", x_0.shape))
    a, std = process.alpha_bar[-1], math.exp(process.log_small[0] / 2)
    prior = ((1 - a) + a * x_0**2 - 1 - math.log(1 - a)).mean() / 2 / math.log(2)
    last = -math.log2(math.erf(1 / 255 / std / math.sqrt(2)))
    assert out["prior"].item() == pytest.approx(prior, rel=1e-9)
    assert out["vlb"][-1].item() == pytest.approx(last, abs=2e-3)  # the distribution function is good to 2e-4
    assert np.abs(out["vlb"][:-1]).max() < 1e-9
    assert out["total"].item() == pytest.approx(sum(out["vlb"]).item() + prior)


def test_discretized_likelihood_is_a_distribution():
    """Over all 256 values the probabilities add up to 1, even far off and narrow."""
    x = np.linspace(-1, 1, 256)
    for mu, std in ((0.0, 0.5), (0.3, 0.01), (-1.2, 0.1)):
        p = np.exp(iddpm.discretized_log_likelihood(x, np.full(256, mu), np.full(256, math.log(std))))
        assert p.sum() == pytest.approx(1, abs=1e-9)


# Importance sampling ----------------------------------------------------------------------------------------


def test_importance_sampling():
    """Steps are even until each has its history; then in proportion to the root mean square of its losses;
    weighted losses keep their mean."""
    sampler = LossSecondMoment(4, history=2, uniform=0.1)
    sampler.update(np.array([0, 0, 0, 1, 1, 2, 2, 3]), np.array([9.0, 1, 1, 2, 4, 3, 3, 5]))
    np.testing.assert_allclose(sampler.probabilities(), 0.25)
    sampler.update(np.array([3]), np.array([7.0]))
    rms = np.array([1, 10**0.5, 3, 37**0.5])  # the 9 was pushed out
    p = 0.9 * rms / rms.sum() + 0.1 / 4
    np.testing.assert_allclose(sampler.probabilities(), p)
    uniform = (np.arange(100_000) + 0.5) / 100_000
    t, weight = sampler.draw(uniform)
    np.testing.assert_allclose(np.bincount(t) / len(t), p, atol=1e-4)
    loss = np.array([1.0, 5.0, 2.0, 8.0])
    assert (loss[t] * weight).mean() == pytest.approx(loss.mean(), rel=1e-3)
