"""From noise to images: samplers of the probability-flow ODE, and guidance.

Papers: EDM, arXiv:2206.00364v2 (Euler, Heun, churn); DPM-Solver++, arXiv:2211.01095v2 (multistep, second
order); classifier-free guidance, arXiv:2207.12598v1; autoguidance, arXiv:2406.02507v3.

A sampler takes a denoiser D(x; sigma, labels), standard-normal noise (B, C, H, W), labels (B,) or None and
the falling noise levels of `sigma_steps`, and returns images (B, C, H, W). It uses arithmetic only, so torch,
tinygrad and numpy arrays all pass through, in their own precision.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared.check import require
from shared.diffusion import SIGMA_MAX, SIGMA_MIN, Array, Denoiser


def sigma_steps(
    num_steps: int, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX, rho: float = 7
) -> list[float]:
    """sigma_max = sigma_0 > ... > sigma_(N-1) = sigma_min, then 0: N + 1 float64 numbers, EDM Eq. 5."""
    require(num_steps >= 1, f"the number of sampling steps is {num_steps}: it must be at least 1")
    limits = f"sigma_min {sigma_min} and sigma_max {sigma_max} must satisfy 0 < min < max < infinity"
    require(0 < sigma_min < sigma_max < math.inf, limits)
    require(0.1 <= rho <= 1000, f"rho is {rho}: it must be in 0.1..1000")
    ramp = np.arange(num_steps, dtype=np.float64) / max(num_steps - 1, 1)
    sigma = (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
    return [*sigma.tolist(), 0.0]


def seed_noise(seeds: Sequence[int], shape: tuple[int, ...], stream: int = 0) -> NDArray[np.float32]:
    """Standard-normal noise (len(seeds), *shape), image k's from seeds[k] alone; streams are independent."""
    return np.stack([np.random.default_rng([s, stream]).standard_normal(shape, np.float32) for s in seeds])


def at_sigma(D: Denoiser, x: Array, sigma: float, labels: Array | None) -> Array:
    """D at one noise level for the whole batch; the level becomes (B,) in x's own framework and precision."""
    return D(x, x[:, 0, 0, 0] * 0 + sigma, labels)


# EDM Algorithm 2: Heun's method with stochastic churn; S_churn = 0 leaves Algorithm 1, the deterministic one.
def heun(
    D: Denoiser, noise: Array, labels: Array | None, sigmas: Sequence[float],
    S_churn: float = 0, S_min: float = 0, S_max: float = math.inf, S_noise: float = 1,
    churn_noise: Callable[[int], Array] | None = None, second_order: bool = True,
) -> Array:
    """2 N - 1 calls of D in N steps; N without `second_order`, which is Euler's method. S_churn > 0 adds
    fresh noise before each step within [S_min, S_max]: `churn_noise(k)` in the k-th of these, from 0."""
    require(S_churn == 0 or churn_noise is not None, "S_churn needs churn_noise, the noise to add")
    x, churned = sigmas[0] * noise, 0
    for cur, nxt in pairwise(sigmas):
        hat = cur
        if S_churn > 0 and S_min <= cur <= S_max:
            hat = cur + cur * min(S_churn / (len(sigmas) - 1), math.sqrt(2) - 1)
            x = x + math.sqrt(hat**2 - cur**2) * S_noise * churn_noise(churned)
            churned += 1
        d_cur = (x - at_sigma(D, x, hat, labels)) / hat
        x_next = x + (nxt - hat) * d_cur
        if second_order and nxt > 0:  # the slope at the end of the step, averaged in
            d_next = (x_next - at_sigma(D, x_next, nxt, labels)) / nxt
            x_next = x + (nxt - hat) * (d_cur + d_next) / 2
        x = x_next
    return x


# DPM-Solver++(2M), Algorithm 2 of arXiv:2211.01095: the ODE is exact in x and a line through the last two D.
def dpmpp_2m(D: Denoiser, noise: Array, labels: Array | None, sigmas: Sequence[float]) -> Array:
    """N calls of D in N steps. lambda = -ln(sigma) is the paper's time, h its step."""
    x, D_last, h, h_last = sigmas[0] * noise, None, 0.0, 0.0
    for cur, nxt in pairwise(sigmas):
        D_cur = at_sigma(D, x, cur, labels)
        slope = 0.0
        if nxt > 0:  # the last step is infinitely long in lambda and lands on D itself
            h_last, h = h, math.log(cur / nxt)
            slope = 0.0 if D_last is None else (D_cur - D_last) * (h / (2 * h_last))
        x = (nxt / cur) * x + (1 - nxt / cur) * (D_cur + slope)
        D_last = D_cur
    return x


SAMPLERS = {"heun": heun, "dpmpp": dpmpp_2m, "euler": partial(heun, second_order=False)}


def unlabelled(D: Denoiser) -> Denoiser:
    """The same network without its label: the guide of classifier-free guidance."""
    return lambda x, sigma, labels: D(x, sigma, None)


def guided(D: Denoiser, guide: Denoiser, w: float) -> Denoiser:
    """guide + w (D - guide), autoguidance Eq. 3; w = 1 is D itself and never calls the guide. That is
    `unlabelled(D)` in classifier-free guidance, a worse network of the same labels in autoguidance."""

    def D_w(x: Array, sigma: Array, labels: Array | None = None) -> Array:
        D_guide = guide(x, sigma, labels)
        return D_guide + w * (D(x, sigma, labels) - D_guide)

    return D if w == 1 else D_w
