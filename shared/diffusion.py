"""Denoisers and their training losses.

Papers: EDM, arXiv:2206.00364v2 (preconditioning, loss); U-ViT, arXiv:2209.12152v4, over the VP SDE of
arXiv:2011.13456v2 (the released noise-predicting networks).

Everything that trains or samples speaks of a denoiser D(x; sigma, labels): x = y + sigma * n are noisy images
(B, C, H, W), sigma (B,) is their noise level, labels (B,) are class indices or None. A network F becomes a
denoiser by preconditioning. Everything here is arithmetic on arrays, so torch, tinygrad and numpy all take
it, and all randomness is an argument, so two frameworks can be given the same.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # torch.Tensor, tinygrad.Tensor or numpy.ndarray
Denoiser = Callable[[Array, Array, Array | None], Array]  # (x, sigma, labels) -> D, of x's shape

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0  # the noise levels that EDM samples between
SIGMA_DATA = 0.5  # the standard deviation of images in [-1, 1], roughly, and of latents, exactly
VP_BETA_MIN, VP_BETA_MAX = 0.1, 20.0  # the VP process of U-ViT


def exp(x: Array) -> Array:
    return x.exp() if hasattr(x, "exp") else np.exp(x)


def log(x: Array) -> Array:
    return x.log() if hasattr(x, "log") else np.log(x)


def per_image(sigma: Array) -> Array:
    """(B,) -> (B, 1, 1, 1), to multiply images with."""
    return sigma.reshape(-1, 1, 1, 1)


def log_normal_sigma(normal: Array, P_mean: float = -1.2, P_std: float = 1.2) -> Array:
    """ln(sigma) ~ N(P_mean, P_std^2), from standard-normal draws (EDM, table 1)."""
    return exp(normal * P_std + P_mean)


def vp_alpha_bar(t: Array) -> Array:
    """exp(-int_0^t beta), beta rising linearly over t in [0, 1] (arXiv:2011.13456, Eq. 29)."""
    return exp(-(0.5 * (VP_BETA_MAX - VP_BETA_MIN) * t * t + VP_BETA_MIN * t))


def vp_sigma(t: Array) -> Array:
    """Noise level of x / sqrt(alpha_bar) at time t: sigma(1e-3) = 0.010486, sigma(1) = 152.167."""
    alpha_bar = vp_alpha_bar(t)
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def vp_time(sigma: Array) -> Array:
    """Inverse of `vp_sigma`: the positive root of the quadratic int_0^t beta = ln(1 + sigma^2)."""
    slope = VP_BETA_MAX - VP_BETA_MIN
    return ((VP_BETA_MIN**2 + 2 * slope * log(1 + sigma * sigma)) ** 0.5 - VP_BETA_MIN) / slope


def vp_uniform_sigma(uniform: Array, t_min: float = 1e-3) -> Array:
    """Noise level at t ~ U(t_min, 1), from uniform draws in [0, 1). At t = 0 there is nothing to predict."""
    return vp_sigma(t_min + (1 - t_min) * uniform)


class EDMPrecond:
    """D(x; sigma) = c_skip x + c_out F(c_in x, c_noise), EDM Eq. 7. c_noise is ln(sigma), brought to 0..1000
    over EDM's noise levels: the range that U-ViT's and ADM's sinusoidal embeddings were made for, to which
    EDM's own ln(sigma) / 4, a range of 2.6, would be nearly one time."""

    def __init__(self, net: Callable):
        self.net = net

    def __call__(self, x: Array, sigma: Array, labels: Array | None = None) -> Array:
        total = sigma * sigma + SIGMA_DATA**2
        c_skip = SIGMA_DATA**2 / total
        c_out = sigma * SIGMA_DATA / total**0.5
        c_in = 1 / total**0.5
        c_noise = 1000 / math.log(SIGMA_MAX / SIGMA_MIN) * (log(sigma) - math.log(SIGMA_MIN))
        F_x = self.net(per_image(c_in) * x, c_noise, labels)
        return per_image(c_skip) * x + per_image(c_out) * F_x


class VPPrecond:
    """D(x; sigma) = x - sigma F(x / sqrt(1 + sigma^2), time): a network that predicts the noise; by default
    its time is 999 t, t the VP process's at sigma, as that of U-ViT's released ones is."""

    def __init__(self, net: Callable, time: Callable = lambda sigma: 999 * vp_time(sigma)):
        self.net, self.time = net, time  # the network's time at a noise level

    def __call__(self, x: Array, sigma: Array, labels: Array | None = None) -> Array:
        c_in = 1 / (1 + sigma * sigma) ** 0.5
        return x - per_image(sigma) * self.net(per_image(c_in) * x, self.time(sigma), labels)


def mse(D: Denoiser, images: Array, sigma: Array, noise: Array, labels: Array | None) -> Array:
    """Mean squared error of denoising `images + sigma * noise`, one value an image: (B,)."""
    error = D(images + per_image(sigma) * noise, sigma, labels) - images
    return (error * error).mean((1, 2, 3))


def edm_loss(D: Denoiser, images: Array, sigma: Array, noise: Array, labels: Array | None = None) -> Array:
    """EDM Eq. 2 with lambda(sigma) of table 1, the mean over pixels, one value an image: (B,)."""
    weight = (sigma * sigma + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return weight * mse(D, images, sigma, noise, labels)
