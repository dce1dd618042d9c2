"""The process of Improved DDPM: schedules, learned variances, losses, sampling, classifier guidance.

Papers: Improved DDPM, arXiv:2102.09672v1; DDIM, arXiv:2010.02502v4; classifier guidance, arXiv:2105.05233v4.

T steps add noise to images; a network, told the step, predicts the noise, and where the variance of the step
back lies between its bounds. Steps t count from 0, the least noise. Schedules are float64 NumPy; images
(B, C, H, W) are arrays of torch, tinygrad or NumPy. All randomness is an argument.

| symbol              | name                 |                                                               |
| ------------------- | -------------------- | ------------------------------------------------------------- |
| beta_t, alpha_bar_t | `betas`, `alpha_bar` | noise that step t adds; what it leaves of the signal's power  |
| epsilon, v          | `eps`, `v`           | the network's outputs: noise; the variance's place, -1 to 1   |
| mu, Sigma           | `mu`, `log_var`      | mean and variance of x_{t-1} given x_t                        |
| L_simple, L_vlb     | `mse`, `vlb`         | losses; a step's term of L_vlb is in bits per dimension       |

Reading order: schedules, `IDDPM`, losses, sampling and guidance, likelihood, importance sampling.

Deviations: guidance of the ancestral step takes the gradient at x_t, as the released code does; `at_mean`
takes it at mu, as section 4.1 of arXiv:2105.05233 derives. Networks that predict x_0 are left out.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shared.check import require
from shared.diffusion import Array, Denoiser, exp, log, per_image

Steps = int | NDArray[np.int64] | Array  # one step for all images, or (B,), which tinygrad takes as its own
Net = Callable[[Array, Array, Array | None], Array]  # (x, timesteps, labels) -> eps, or eps and v (2C)
Gradient = Callable[[Array, Array], Array]  # (x, timesteps) -> gradient of s log p(y | x), of x's shape
Noise = Callable[[int], Array]  # k -> standard-normal noise of the k-th step that a sampler takes

# Schedules --------------------------------------------------------------------------------------------------


# DDPM's, rescaled so that any number of steps adds about as much noise as its 1000.
def linear_betas(num_steps: int) -> NDArray[np.float64]:
    return np.linspace(0.1 / num_steps, 20 / num_steps, num_steps)


# The cosine schedule, Eq. 17.
def cosine_betas(num_steps: int) -> NDArray[np.float64]:
    f = np.cos((np.arange(num_steps + 1) / num_steps + 0.008) / 1.008 * math.pi / 2) ** 2
    return np.minimum(1 - f[1:] / f[:-1], 0.999)


SCHEDULES = {"linear": linear_betas, "cosine": cosine_betas}


def space_timesteps(num_steps: int, spacing: str) -> list[int]:
    """The steps, rising, of a shorter process: for "" all; for "ddimN" N at a whole stride; for "a,b,c" so
    many of each equal section, its ends included (section 4). ValueError for what cannot be."""
    if not spacing:
        return list(range(num_steps))
    match = re.fullmatch(r"ddim(\d+)|\d+(,\d+)*", spacing)
    require(match is not None, f"respacing is {spacing!r}: it must be like 50, 10,10,5 or ddim25")
    if match[1]:
        strides = [i for i in range(1, num_steps) if len(range(0, num_steps, i)) == int(match[1])]
        require(len(strides) > 0, f"respacing {spacing}: no whole stride takes so many of {num_steps} steps")
        return list(range(0, num_steps, strides[0]))
    counts, steps, start = [int(count) for count in spacing.split(",")], [], 0
    require(sum(counts) > 0, f"respacing {spacing} takes no step")
    for i, count in enumerate(counts):
        size = num_steps // len(counts) + (i < num_steps % len(counts))
        require(count <= size, f"respacing {spacing} takes {count} steps of a section of {size}")
        stride = (size - 1) / (count - 1) if count > 1 else 1
        steps += [start + round(k * stride) for k in range(count)]
        start += size
    return steps


# The process ------------------------------------------------------------------------------------------------


def like(x: Array, values: NDArray) -> Array:
    """Numbers as an array of x's framework, precision and device."""
    if isinstance(x, np.ndarray):
        return values.astype(x.dtype)
    return x.new_tensor(values) if hasattr(x, "new_tensor") else type(x)(values, x.device, x.dtype)


def at(table: NDArray, t: Steps, x: Array) -> Array | float:
    """table[t]: a number for one step, (B, 1, 1, 1) like x for one an image. Rounded to float32, as in the
    released code, so that even in float64 we sample what it samples."""
    table = table.astype(np.float32)
    return float(table[t]) if isinstance(t, int) else per_image(like(x, table)[t])


class IDDPM:
    """The process of `betas` (T,), or of some `steps` of it, and with a network the way back.

    `variance` of a step back is "learned" by the network, or fixed at its bound "large", beta, or "small";
    `rescale` tells networks 1000 t / T instead of t. ValueError for a beta that is not between 0 and 1.
    """

    def __init__(
        self, betas: NDArray[np.float64], steps: Sequence[int] | None = None,
        variance: Literal["learned", "large", "small"] = "learned", rescale: bool = False,
    ):
        fits = len(betas) > 0 and betas.min() > 0 and betas.max() < 1
        require(fits, f"a beta of a schedule of {len(betas)} steps is not between 0 and 1: take more steps")
        fits = variance in ("learned", "large", "small")
        require(fits, f"variance is {variance!r}: it must be learned, large or small")
        steps = np.arange(len(betas)) if steps is None else np.array(steps)
        self.times = steps * (1000 / len(betas) if rescale else 1.0)  # what networks are told
        self.alpha_bar = np.cumprod(1 - betas)[steps]
        self.alpha_bar_prev = np.append(1.0, self.alpha_bar[:-1])
        self.sigma = np.sqrt(1 / self.alpha_bar - 1)  # noise level of x_t / sqrt(alpha_bar)
        self.betas = 1 - self.alpha_bar / self.alpha_bar_prev  # Eq. 19
        small = self.betas * (1 - self.alpha_bar_prev) / (1 - self.alpha_bar)  # beta_tilde, Eq. 10
        small[0] = small[1] if len(small) > 1 else self.betas[0]  # it is 0, which has no logarithm
        self.log_small, self.log_large = np.log(small), np.log(self.betas)
        if variance == "large":  # the released code's exception, for a better likelihood of the first step
            self.log_large[0] = self.log_small[0]
        self.variance = variance
        self.mean_of_x_0 = self.betas * self.alpha_bar_prev**0.5 / (1 - self.alpha_bar)  # Eq. 11
        self.mean_of_x_t = (1 - self.alpha_bar_prev) * (1 - self.betas) ** 0.5 / (1 - self.alpha_bar)

    def __len__(self) -> int:
        return len(self.betas)

    # Diffusion, Eq. 9; solved for x_0; and for the noise.
    def noisy(self, x_0: Array, t: Steps, noise: Array) -> Array:
        return at(self.alpha_bar**0.5, t, x_0) * x_0 + at((1 - self.alpha_bar) ** 0.5, t, x_0) * noise

    def x_0(self, x_t: Array, t: Steps, eps: Array) -> Array:
        return at(self.alpha_bar**-0.5, t, x_t) * x_t - at(self.sigma, t, x_t) * eps

    def eps(self, x_t: Array, t: Steps, x_0: Array) -> Array:
        return (at(self.alpha_bar**-0.5, t, x_t) * x_t - x_0) / at(self.sigma, t, x_t)

    # Mean of q(x_{t-1} | x_t, x_0), Eq. 11.
    def posterior_mean(self, x_0: Array, x_t: Array, t: Steps) -> Array:
        return at(self.mean_of_x_0, t, x_t) * x_0 + at(self.mean_of_x_t, t, x_t) * x_t

    def timesteps(self, x_t: Array, t: Steps) -> Array:
        """(B,): what networks are told at step t."""
        return x_t[:, 0, 0, 0] * 0 + float(self.times[t]) if isinstance(t, int) else like(x_t, self.times)[t]

    def call(self, net: Net, x_t: Array, t: Steps, labels: Array | None) -> tuple[Array, Array | None]:
        """The network's eps, and v where the variance is learned."""
        out, C = net(x_t, self.timesteps(x_t, t), labels), x_t.shape[1]
        if self.variance != "learned":
            return out[:, :C], None
        require(out.shape[1] == 2 * C, f"no variance learned: {out.shape[1]} outputs for {C} channels")
        return out[:, :C], out[:, C:]

    def back(self, eps: Array, v: Array | None, x_t: Array, t: Steps, clip: bool) -> tuple:
        """Mean and log-variance of x_{t-1}, and x_0, as predicted; `clip` keeps x_0 in [-1, 1]."""
        x_0 = self.x_0(x_t, t, eps)
        x_0 = x_0.clip(-1, 1) if clip else x_0
        large, small = at(self.log_large, t, x_t), at(self.log_small, t, x_t)
        if v is None:
            log_var = x_t * 0 + (large if self.variance == "large" else small)
        else:
            log_var = (1 + v) / 2 * large + (1 - v) / 2 * small  # Eq. 15
        return self.posterior_mean(x_0, x_t, t), log_var, x_0

    def scaled(self, x: Array, sigma: Array) -> tuple[Array, Array]:
        """x_t and time, also between the steps', of x = x_0 + sigma * noise."""
        level = sigma if isinstance(sigma, np.ndarray) else sigma.detach().to("cpu").numpy()
        times = np.interp(np.log(level), np.log(self.sigma), self.times)
        return x / per_image((1 + sigma * sigma) ** 0.5), like(x, times)

    def denoiser(self, net: Net) -> Denoiser:
        """The network as D(x; sigma, labels) of `shared.diffusion`."""
        return lambda x, sigma, labels=None: (
            x - per_image(sigma) * net(*self.scaled(x, sigma), labels)[:, : x.shape[1]]
        )


# Losses -----------------------------------------------------------------------------------------------------

# Weights of L_simple and a step's term of L_vlb, of N; rescaled_hybrid is Eq. 16 with lambda = 0.001.
Objective = Literal["simple", "hybrid", "rescaled_hybrid", "vlb", "rescaled_vlb"]
OBJECTIVES: dict[Objective, Callable[[int], tuple[float, float]]] = {
    "simple": lambda N: (1, 0), "hybrid": lambda N: (1, 1), "rescaled_hybrid": lambda N: (1, N / 1000),
    "vlb": lambda N: (0, 1), "rescaled_vlb": lambda N: (0, N),
}


def losses(
    process: IDDPM, net: Net, x_0: Array, t: NDArray[np.int64], noise: Array, labels: Array | None = None,
    objective: Objective = "hybrid",
) -> dict[str, Array]:
    """`loss`, and the `mse` and `vlb` that it is made of, one value an image each: (B,).

    In a hybrid, L_vlb teaches the variance only: ValueError where that is fixed.
    """
    w_mse, w_vlb = OBJECTIVES[objective](len(process))
    fits = process.variance == "learned" or not (w_mse and w_vlb)
    require(fits, f"objective {objective} needs a learned variance, not a {process.variance} one")
    x_t = process.noisy(x_0, t, noise)
    eps, v = process.call(net, x_t, t, labels)
    terms = {"mse": ((noise - eps) ** 2).mean((1, 2, 3))}
    if w_vlb:
        eps = eps.detach() if w_mse and hasattr(eps, "detach") else eps
        terms["vlb"] = vlb_term(process, eps, v, x_0, x_t, t, clip=False)
    return {"loss": w_mse * terms["mse"] + w_vlb * terms.get("vlb", 0), **terms}


# One term of the variational bound, Eqs. 5 and 6.
def vlb_term(process: IDDPM, eps: Array, v: Array, x_0: Array, x_t: Array, t: Steps, clip: bool) -> Array:
    """-log p(x_0 | x_1) at the first step, else KL(q(x_{t-1} | x_t, x_0) || p); bits per dimension, (B,)."""
    mu, log_var, _ = process.back(eps, v, x_t, t, clip)
    kl = normal_kl(process.posterior_mean(x_0, x_t, t), at(process.log_small, t, x_t), mu, log_var)
    first = at(np.eye(len(process))[0], t, x_t)
    nats = (1 - first) * kl - first * discretized_log_likelihood(x_0, mu, log_var / 2)
    return nats.mean((1, 2, 3)) / math.log(2)


def normal_kl(mean_1: Array, log_var_1: Array, mean_2: Array, log_var_2: Array) -> Array:
    """KL divergence of one normal distribution from another, in nats."""
    log_ratio = log_var_1 - log_var_2
    return (exp(log_ratio) - log_ratio + (mean_1 - mean_2) ** 2 * exp(-log_var_2) - 1) / 2


def discretized_log_likelihood(x: Array, mu: Array, log_std: Array) -> Array:
    """Log-probability, in nats, of x's of 256 equal bins; the outer two have no end."""
    edges = [(x - mu + half) * exp(-log_std) for half in (1 / 255, -1 / 255)]
    # Their distribution function is the released approximation (1 + tanh) / 2, off by at most 2e-4.
    edges = [(8 / math.pi) ** 0.5 * (z + 0.044715 * z**3) for z in edges]
    above, below = (1 / (1 + exp(-u.clip(-60, 60))) for u in edges)  # farther out, exp would overflow
    top, bottom = (x > 0.999) * 1.0, (x < -0.999) * 1.0
    return log((top + (1 - top) * above - (1 - bottom) * below).clip(1e-12, 1))


# Sampling and guidance --------------------------------------------------------------------------------------


# Algorithm 1 of arXiv:2105.05233: the mean moves by Sigma times the gradient of s log p(y | x).
def guided_mean(mu: Array, log_var: Array, gradient: Array) -> Array:
    return mu + exp(log_var) * gradient


def ancestral(
    process: IDDPM, net: Net, x: Array, noise: Noise, labels: Array | None = None, clip: bool = True,
    gradient: Gradient | None = None, at_mean: bool = False,
) -> Array:
    """Images of noise x, by one call of the network a step; `gradient` guides, at x_t or `at_mean`."""
    for k, t in enumerate(reversed(range(len(process)))):
        mu, log_var, _ = process.back(*process.call(net, x, t, labels), x, t, clip)
        if gradient is not None:
            point, step = (mu, max(t - 1, 0)) if at_mean else (x, t)  # mu is of the step before
            mu = guided_mean(mu, log_var, gradient(point, process.timesteps(point, step)))
        x = mu + exp(log_var / 2) * noise(k) if t > 0 else mu
    return x


# DDIM Eqs. 12 and 16.
def ddim(
    process: IDDPM, net: Net, x: Array, noise: Noise | None = None, labels: Array | None = None,
    clip: bool = True, gradient: Gradient | None = None, eta: float = 0.0,
) -> Array:
    """As `ancestral`; eta = 0 is deterministic, 1 is as random as ancestral sampling with small variances."""
    require(eta == 0 or noise is not None, "eta needs noise, the noise to add")
    for k, t in enumerate(reversed(range(len(process)))):
        x_0 = process.back(*process.call(net, x, t, labels), x, t, clip)[2]
        eps = process.eps(x, t, x_0)  # of the clipped x_0
        if gradient is not None:
            eps = eps - at((1 - process.alpha_bar) ** 0.5, t, x) * gradient(x, process.timesteps(x, t))
            x_0 = process.x_0(x, t, eps)  # Algorithm 2: the gradient is added to the score
        a, a_prev = np.float32(process.alpha_bar[t]), np.float32(process.alpha_bar_prev[t])  # as in `at`
        sigma = eta * np.sqrt((1 - a_prev) / (1 - a)) * np.sqrt(1 - a / a_prev)  # 0 at the last step
        x = float(np.sqrt(a_prev)) * x_0 + float(np.sqrt(1 - a_prev - sigma**2)) * eps
        x = x + float(sigma) * noise(k) if sigma > 0 else x
    return x


# DDIM Eq. 13, run towards noise.
def ddim_invert(process: IDDPM, net: Net, x: Array, labels: Array | None = None) -> Array:
    """The noise of which `ddim`, with eta = 0 and unclipped, makes images x, but for errors of its steps."""
    a, t = 1.0, 0  # without noise yet: the network is told the first step
    for step in range(len(process)):
        eps, _ = process.call(net, x, t, labels)
        x_0 = (x - math.sqrt(1 - a) * eps) / math.sqrt(a)
        a, t = float(process.alpha_bar[step]), step
        x = math.sqrt(a) * x_0 + math.sqrt(1 - a) * eps
    return x


def guided_denoiser(process: IDDPM, D: Denoiser, gradient: Gradient) -> Denoiser:
    """D + sigma^2 times the gradient with respect to its own x = x_t sqrt(1 + sigma^2)."""
    return lambda x, sigma, labels=None: D(x, sigma, labels) + (
        per_image(sigma * sigma / (1 + sigma * sigma) ** 0.5) * gradient(*process.scaled(x, sigma))
    )


# Likelihood, and importance sampling ------------------------------------------------------------------------


def bits_per_dim(
    process: IDDPM, net: Net, x_0: Array, noise: Noise, labels: Array | None = None, clip: bool = True
) -> dict:
    """The variational bound, Eq. 4: `total`, `prior`, and the list `vlb` of its terms from the last; (B,)."""
    vlb = []
    for k, t in enumerate(reversed(range(len(process)))):
        x_t = process.noisy(x_0, t, noise(k))
        vlb.append(vlb_term(process, *process.call(net, x_t, t, labels), x_0, x_t, t, clip))
    a, zero = float(process.alpha_bar[-1]), x_0 * 0
    prior = normal_kl(math.sqrt(a) * x_0, zero + math.log(1 - a), zero, zero).mean((1, 2, 3)) / math.log(2)
    return {"total": sum(vlb) + prior, "prior": prior, "vlb": vlb}


class LossSecondMoment:
    """Draws steps in proportion to the root mean square of their last losses, Eq. 18; evenly until all have
    `history` of them. `losses`, (T, history), is all its state."""

    def __init__(self, num_steps: int, history: int = 10, uniform: float = 0.001):
        self.losses = np.full((num_steps, history), np.nan)
        self.uniform = uniform  # share of the probability that is spread evenly

    def state_dict(self) -> dict:
        return {"losses": self.losses.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self.losses = np.array(state["losses"])

    def probabilities(self) -> NDArray[np.float64]:
        p = (self.losses**2).mean(1) ** 0.5
        p = np.ones_like(p) if np.isnan(p).any() else p
        return p / p.sum() * (1 - self.uniform) + self.uniform / len(p)

    def draw(self, uniform: NDArray) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps for uniform draws in [0, 1), and weights 1 / (T p) that keep the mean of the losses; (B,)."""
        p = self.probabilities()
        t = np.searchsorted(p.cumsum() / p.sum(), uniform, side="right")
        return t, 1 / (len(p) * p[t])

    def update(self, t: NDArray[np.int64], losses: NDArray) -> None:
        """Remember unweighted losses, in place of the oldest."""
        for step, loss in zip(t, losses, strict=True):
            self.losses[step] = np.append(self.losses[step, 1:], loss)
