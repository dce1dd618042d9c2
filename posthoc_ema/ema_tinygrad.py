"""Power-function EMA of weights in tinygrad: the trackers of `ema.py`, line by line.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3 and appendix C. Profiles and Algorithm 3 are numpy and come from `ema.py`, which says more.

Deviations: as there; buffers are tensors that `is_param_(False)` marks.

    ema = PowerFunctionEMA(net)        # after every optimizer step: ema.update(t)
    ema.weights(0.05)                  # the average of length 0.05, a state dict
"""

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.nn.state import get_state_dict

from posthoc_ema.ema import (  # noqa: F401  the twin offers what its file does
    SIGMA_REL_MAX,
    gamma_to_sigma_rel,
    power_function_beta,
    power_function_inner,
    power_function_profile,
    power_function_response,
    sigma_rel_to_gamma,
    solve_posthoc_coefficients,
)

# Trackers ---------------------------------------------------------------------------------------------------


class _EMA:
    """Averages of a network's parameters, one of each length. The kinds differ in their `betas`."""

    def __init__(self, net: Any, lengths: Sequence[float]):
        self.net, self.lengths, self.t = net, tuple(lengths), 0
        self.params = list(dict.fromkeys(p for p in get_state_dict(net).values() if p.is_param))
        low = {p.dtype for p in self.params} - {dtypes.float32, dtypes.float64}
        if low:
            raise ValueError(f"weights are {low.pop()}: averages need float32 master weights")
        Tensor.realize(*self.params)
        self.averages = [[p.clone().realize() for p in self.params] for _ in self.lengths]
        # PyTorch's foreach_lerp_. The weight is a tensor: a number would be compiled into the kernels.
        self.foreach_lerp = TinyJit(lambda average, params, weight: Tensor.realize(
            *(a.assign(a.lerp(p, weight)) for a, p in zip(average, params, strict=True))))  # fmt: skip

    def update(self, t: float) -> None:
        """Take in the network's weights at time t, later than at the last update. ValueError otherwise."""
        if t <= self.t:
            raise ValueError(f"EMA update at time {t}, but the last was at {self.t}")
        for average, beta in zip(self.averages, self.betas(t, t - self.t), strict=True):
            self.foreach_lerp(average, self.params, Tensor([1 - beta]).reshape(()))
        self.t = t

    def weights(self, length: float) -> dict[str, Tensor]:
        """State dict of the average of this length; buffers are the network's own. Shares memory."""
        if length not in self.lengths:
            raise ValueError(f"no average of length {length} is tracked: only {list(self.lengths)}")
        average = dict(zip(self.params, self.averages[self.lengths.index(length)], strict=True))
        return {name: average.get(p, p) for name, p in get_state_dict(self.net).items()}

    def state_dict(self) -> dict:
        return {"t": self.t, "lengths": list(self.lengths), "averages": self.averages}

    def load_state_dict(self, state: dict) -> None:
        """Restore bit for bit. ValueError where the state is of other lengths or another network."""
        if tuple(state["lengths"]) != self.lengths:
            raise ValueError(f"the saved averages have lengths {state['lengths']}, not {list(self.lengths)}")
        for average, saved in zip(self.averages, state["averages"], strict=True):
            if [a.shape for a in average] != [a.shape for a in saved]:
                raise ValueError("the saved averages are of a network with other parameters")
            Tensor.realize(*(a.assign(s) for a, s in zip(average, saved, strict=True)))
        self.t = state["t"]


class PowerFunctionEMA(_EMA):
    """One average for each sigma_rel; the weight of the past follows tau^gamma (section 3.1)."""

    def __init__(self, net: Any, sigma_rels: Sequence[float] = (0.05, 0.10)):
        sigma_rel_to_gamma(sigma_rels)  # refuses what has no profile
        super().__init__(net, sigma_rels)

    def betas(self, t: float, t_delta: float) -> list[float]:
        return power_function_beta(self.lengths, t, t_delta).tolist()


class TraditionalEMA(_EMA):
    """Exponential average of a half-life in units of t, as EDM's training used; so that early weights fade,
    it is at most `rampup_ratio` of the time so far (None: no ramp-up)."""

    def __init__(self, net: Any, halflife: float, rampup_ratio: float | None = 0.09):
        if not halflife > 0:
            raise ValueError(f"the half-life is {halflife}: it must be positive")
        super().__init__(net, [halflife])
        self.rampup_ratio = float("inf") if rampup_ratio is None else rampup_ratio

    def betas(self, t: float, t_delta: float) -> list[float]:
        return [0.5 ** (t_delta / min(halflife, t * self.rampup_ratio)) for halflife in self.lengths]
