"""Power-function EMA of weights, and choosing its length after training.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3 and appendix C. Training tracks a few averages of one shape and saves snapshots of them; a weighted
sum of the snapshots gives, afterwards, the average of any other length.

| symbol        | name          |                                                                            |
| ------------- | ------------- | -------------------------------------------------------------------------- |
| t, tau        | `t`, `tau`    | training time, here counted in images                                      |
| gamma         | `gamma`       | exponent of the profile p(tau) = (gamma + 1) tau^gamma / t^(gamma+1)       |
| sigma_rel     | `sigma_rel`   | the profile's standard deviation relative to t: the length of the average  |
| beta_gamma(t) | `beta`        | what remains of the average at an update                                   |
| A, b, x       | `A`, `b`, `x` | Algorithm 3: inner products among snapshots, with the target; coefficients |

Reading order: profiles, Algorithm 3, the trackers. This file needs numpy and torch alone: copy it.

Deviations: an update may follow the last by any number of images, with beta over that interval; buffers are
copied, never averaged; a nearly singular Algorithm 3, which many lengths make, is damped.

    ema = PowerFunctionEMA(net)        # after every optimizer step: ema.update(t)
    ema.weights(0.05)                  # the average of length 0.05, a state dict
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

SIGMA_REL_MAX = 12**-0.5  # gamma = 0, the average over all of training

# Profiles ---------------------------------------------------------------------------------------------------


# The relative standard deviation of a power-function profile, Eq. 123.
def gamma_to_sigma_rel(gamma: ArrayLike) -> NDArray[np.float64]:
    """sigma_rel of exponents gamma >= 0, same shape."""
    gamma = np.asarray(gamma, np.float64)
    return (gamma + 1) ** 0.5 / ((gamma + 2) * (gamma + 3) ** 0.5)


# Its inverse, Eq. 126 and Algorithm 2: the largest root of (gamma+2)^2 (gamma+3) = sigma_rel^-2 (gamma+1).
def sigma_rel_to_gamma(sigma_rel: ArrayLike) -> NDArray[np.float64]:
    """gamma of relative standard deviations, same shape. ValueError outside 0 < sigma_rel < 0.288675."""
    sigma_rel = np.asarray(sigma_rel, np.float64)
    if not np.all((sigma_rel > 0) & (sigma_rel < SIGMA_REL_MAX)):  # NaN too
        raise ValueError(f"sigma_rel is {sigma_rel}: it must be in (0, {SIGMA_REL_MAX:.6f})")
    p, q = -1 / 3 - sigma_rel**-2.0, 2 / 27 + 4 / 3 * sigma_rel**-2.0  # y^3 + p y + q = 0, y = gamma + 7/3
    return 2 * (-p / 3) ** 0.5 * np.cos(np.arccos(1.5 * q / p * (-3 / p) ** 0.5) / 3) - 7 / 3  # Viete's root


# The profile itself, Eq. 121: the weight of training time tau in the average at time t.
def power_function_profile(tau: ArrayLike, t: ArrayLike, sigma_rel: ArrayLike) -> NDArray[np.float64]:
    """p_(t, gamma)(tau) as a density over tau in [0, t], zero outside; arguments broadcast."""
    tau, t, gamma = np.asarray(tau, np.float64), np.asarray(t, np.float64), sigma_rel_to_gamma(sigma_rel)
    return np.where((tau >= 0) & (tau <= t), (gamma + 1) / t * np.clip(tau / t, 0, 1) ** gamma, 0.0)


# What n equally spaced updates of Eq. 127 make of each weight: the discrete profile, Eq. 108.
def power_function_response(num_updates: int, sigma_rel: float) -> NDArray[np.float64]:
    """(n,) coefficients of the weights at updates 1 .. n in the average after update n; they sum to 1."""
    edges = np.linspace(0, 1, num_updates + 1)  # products of betas telescope into differences of these powers
    return np.diff(edges ** (sigma_rel_to_gamma(sigma_rel) + 1))


# Inner products of profiles, Eq. 151.
def power_function_inner(
    t_a: ArrayLike, sigma_rel_a: ArrayLike, t_b: ArrayLike, sigma_rel_b: ArrayLike
) -> NDArray[np.float64]:
    """Integral of p_a p_b over tau, in units of 1 / t; arguments broadcast."""
    t_a, t_b = np.asarray(t_a, np.float64), np.asarray(t_b, np.float64)
    gamma_a, gamma_b = sigma_rel_to_gamma(sigma_rel_a), sigma_rel_to_gamma(sigma_rel_b)
    first, last = np.minimum(t_a, t_b), np.maximum(t_a, t_b)
    gamma_last = np.where(t_a < t_b, gamma_b, gamma_a)  # the later one's exponent; either, when t_a = t_b
    return (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1) * (first / last) ** gamma_last / last


# Post-hoc reconstruction, Algorithm 3 -----------------------------------------------------------------------


def solve_posthoc_coefficients(
    t: ArrayLike, sigma_rel: ArrayLike, t_out: ArrayLike, sigma_rel_out: ArrayLike
) -> NDArray[np.float64]:
    """Coefficients (N, M) of N snapshots (t, sigma_rel) in M reconstructed averages (t_out, sigma_rel_out).

    The least-squares fit of each target's profile, scaled to sum to 1. Times may be in any unit. Snapshots
    later than a target, or of time 0, get no weight. ValueError where a target's time is not a snapshot's
    (nothing says what the weights were between them), and where two snapshots are the same.
    """
    t, sigma_rel = np.broadcast_arrays(np.ravel(t).astype(np.float64), np.ravel(sigma_rel))
    t_out, sigma_rel_out = np.broadcast_arrays(np.ravel(t_out), np.ravel(sigma_rel_out))
    if len(set(zip(t, sigma_rel, strict=True))) < len(t):
        raise ValueError("two snapshots have the same time and sigma_rel")
    order = np.lexsort((sigma_rel, t))  # so that the order of the list changes no bit
    x = np.zeros((len(t), len(t_out)))
    for m, (t_m, sigma_rel_m) in enumerate(zip(t_out, sigma_rel_out, strict=True)):
        if t_m not in t[t > 0]:
            raise ValueError(f"no snapshot was taken at the target time {t_m:.15g}")
        use = order[(t[order] > 0) & (t[order] <= t_m)]
        tau, rel = t[use] / t_m, sigma_rel[use]
        A = power_function_inner(tau[:, None], rel[:, None], tau[None], rel[None])
        b = power_function_inner(tau, rel, 1.0, sigma_rel_m)
        A += (np.linalg.cond(A) > 1e12) * 1e-12 * np.diag(np.diag(A))  # else x is huge, and so is rounding
        x[use, m] = (solution := np.linalg.solve(A, b)) / solution.sum()
    return x


# Trackers ---------------------------------------------------------------------------------------------------

# The decay of a power-function average, Eq. 127.
def power_function_beta(sigma_rel: ArrayLike, t_next: float, t_delta: float) -> NDArray[np.float64]:
    """beta of an update at time t_next, t_delta after the last; the first, t_delta = t_next, has beta = 0."""
    return (1 - t_delta / t_next) ** (sigma_rel_to_gamma(sigma_rel) + 1)


# One operation on all weights takes a fraction of the time that an operation on each tensor does.
def flatten(params: Sequence[nn.Parameter]) -> Tensor:
    """Makes parameters of one dtype and device views of one tensor (N,) and returns it; where they are that
    already, it is the one that was. ValueError where two of them share memory."""
    step = 64 // params[0].itemsize  # each begins at a multiple of 64 bytes, as tensors elsewhere do
    *starts, N = accumulate((-(-p.numel() // step) * step for p in params), initial=0)
    storage, begins = params[0].untyped_storage(), [p.data_ptr() for p in params if p.numel()]
    together = all(p.untyped_storage().data_ptr() == storage.data_ptr() for p in params)
    if together and [p.storage_offset() for p in params] == starts:
        return params[0].detach().new_empty(0).set_(storage)
    if len(set(begins)) < len(begins):
        raise ValueError("two parameters share memory: to tie them, let them be one nn.Parameter")
    flat = params[0].detach().new_zeros(N)
    for p, start in zip(params, starts, strict=True):
        stride = torch.empty_like(p, device="meta").stride()  # of its memory format
        p.data = flat[start:].as_strided(p.shape, stride).copy_(p.detach())
    return flat


class _EMA:
    """Averages of a network's parameters, one of each length. The kinds differ in their `betas`.
    The network's weights stay the same, but lie together in memory from now on: see `flatten`."""

    def __init__(self, net: nn.Module, lengths: Sequence[float]):
        while hasattr(net, "_orig_mod") or isinstance(net, nn.parallel.DistributedDataParallel):
            net = net._orig_mod if hasattr(net, "_orig_mod") else net.module  # inside torch.compile and DDP
        self.net, self.lengths, self.t = net, tuple(lengths), 0
        self.params = list(net.parameters())
        self.averages = [list(self.params) for _ in self.lengths]
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Lay out the weights of a dtype and device as one tensor (N,), and their averages beside, (M, N)."""
        kinds = {}
        for i, p in enumerate(self.params):
            kinds.setdefault((p.dtype, p.device), []).append(i)
        low = {dtype for dtype, _ in kinds} - {torch.float32, torch.float64}
        if low:
            raise ValueError(f"weights are {low.pop()}: averages need float32 master weights")
        self.parts = []
        for group in kinds.values():
            params = [self.params[i] for i in group]
            flat = flatten(params)
            stack = flat.new_zeros(len(self.lengths), len(flat))
            for average, row in zip(self.averages, stack, strict=True):
                for i, p in zip(group, params, strict=True):
                    average[i] = row[p.storage_offset() :].as_strided(p.shape, p.stride()).copy_(average[i])
            self.parts.append((params, [p.data_ptr() - flat.data_ptr() for p in params], flat, stack))

    @torch.no_grad()
    def update(self, t: float) -> None:
        """Take in the network's weights at time t, later than at the last update. ValueError otherwise."""
        if t <= self.t:
            raise ValueError(f"EMA update at time {t}, but the last was at {self.t}")
        for params, starts, flat, _ in self.parts:
            first = flat.data_ptr()
            if [p.data_ptr() - first for p in params] != starts:  # the network has moved: to a GPU, say
                self.gather()
                break
        rest = 1 - torch.tensor(self.betas(t, t - self.t), dtype=torch.float64)[:, None]
        for *_, flat, stack in self.parts:
            stack.lerp_(flat, rest.to(flat, non_blocking=True))
        self.t = t

    def weights(self, length: float) -> dict[str, Tensor]:
        """State dict of the average of this length: copies of it; buffers are the network's own."""
        if length not in self.lengths:
            raise ValueError(f"no average of length {length} is tracked: only {list(self.lengths)}")
        average = dict(zip(self.params, self.averages[self.lengths.index(length)], strict=True))
        names = self.net.named_parameters(remove_duplicate=False)  # tied weights have several
        return self.net.state_dict() | {name: average[p].clone() for name, p in names}

    def state_dict(self) -> dict:
        return {"t": self.t, "lengths": list(self.lengths), "averages": self.averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restore bit for bit. ValueError where the state is of other lengths or another network."""
        if tuple(state["lengths"]) != self.lengths:
            raise ValueError(f"the saved averages have lengths {state['lengths']}, not {list(self.lengths)}")
        for average, saved in zip(self.averages, state["averages"], strict=True):
            if [a.shape for a in average] != [a.shape for a in saved]:
                raise ValueError("the saved averages are of a network with other parameters")
            torch._foreach_copy_(average, saved)
        self.t = state["t"]


class PowerFunctionEMA(_EMA):
    """One average for each sigma_rel; the weight of the past follows tau^gamma (section 3.1)."""

    def __init__(self, net: nn.Module, sigma_rels: Sequence[float] = (0.05, 0.10)):
        sigma_rel_to_gamma(sigma_rels)  # refuses what has no profile
        super().__init__(net, sigma_rels)

    def betas(self, t: float, t_delta: float) -> list[float]:
        return power_function_beta(self.lengths, t, t_delta).tolist()


class TraditionalEMA(_EMA):
    """Exponential average of a half-life in units of t, as EDM's training used; so that early weights fade,
    it is at most `rampup_ratio` of the time so far (None: no ramp-up)."""

    def __init__(self, net: nn.Module, halflife: float, rampup_ratio: float | None = 0.09):
        if not halflife > 0:
            raise ValueError(f"the half-life is {halflife}: it must be positive")
        super().__init__(net, [halflife])
        self.rampup_ratio = float("inf") if rampup_ratio is None else rampup_ratio

    def betas(self, t: float, t_delta: float) -> list[float]:
        return [0.5 ** (t_delta / min(halflife, t * self.rampup_ratio)) for halflife in self.lengths]
