"""Power-function EMA of weights in tinygrad: the trackers of `ema.py`, line by line.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
section 3 and appendix C. Profiles and Algorithm 3 are numpy and come from that file, whose docstring says more.

Deviations: as there; buffers are tensors that `is_param_(False)` marks.

    ema = PowerFunctionEMA(net)        # after every optimizer step: ema.update(t)
    ema.weights(0.05)                  # the average of length 0.05, a state dict
"""

from collections.abc import Sequence
from typing import Any

from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.nn.state import get_state_dict

from posthoc_ema.ema import power_function_beta, sigma_rel_to_gamma

# Trackers ---------------------------------------------------------------------------------------------------


class _EMA:
    """Averages of a network's parameters, one for each of `lengths`, updated at times that only rise."""

    def __init__(self, net: Any, lengths: Sequence[float]):
        self.net, self.lengths, self.t = net, tuple(lengths), 0
        self.params = [p for p in get_state_dict(net).values() if p.is_param]
        low = {p.dtype for p in self.params} - {dtypes.float32, dtypes.float64}
        if low:
            raise ValueError(f"weights are {low.pop()}: averages need float32 master weights")
        self.averages = [[p.detach().clone().realize() for p in self.params] for _ in self.lengths]
        # PyTorch's _foreach_lerp_. The weight is a tensor: a number would be compiled into the kernels.
        self.foreach_lerp = TinyJit(lambda average, params, weight: Tensor.realize(
            *(a.assign(a.lerp(p, weight)) for a, p in zip(average, params, strict=True))))  # fmt: skip

    def betas(self, t: float, t_delta: float) -> list[float]:
        raise NotImplementedError

    def update(self, t: float) -> None:
        """Take in the network's weights at time t, later than at the last update. ValueError otherwise."""
        if t <= self.t:
            raise ValueError(f"EMA update at time {t}, but the last was at {self.t}")
        for average, beta in zip(self.averages, self.betas(t, t - self.t), strict=True):
            self.foreach_lerp(average, self.params, Tensor([1 - beta]))
        self.t = t

    def weights(self, length: float) -> dict[str, Tensor]:
        """State dict of the average of this length; buffers are the network's own. Shares memory."""
        state = get_state_dict(self.net)
        names, average = [k for k, v in state.items() if v.is_param], self.averages[self.lengths.index(length)]
        return state | dict(zip(names, average, strict=True))

    def state_dict(self) -> dict:
        return {"t": self.t, "lengths": list(self.lengths), "averages": self.averages}

    def load_state_dict(self, state: dict) -> None:
        """Restore bit for bit. ValueError where the state is of other lengths."""
        if tuple(state["lengths"]) != self.lengths:
            raise ValueError(f"the saved averages have lengths {state['lengths']}, not {list(self.lengths)}")
        for average, saved in zip(self.averages, state["averages"], strict=True):
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
    """Exponential average of a half-life, ramped up so that early weights fade (as EDM's training did).

    Args:
        halflife: in the unit of time, as all times here.
        rampup_ratio: the half-life is at most this fraction of the time so far; None: no ramp-up.
    """

    def __init__(self, net: Any, halflife: float, rampup_ratio: float | None = 0.09):
        super().__init__(net, [halflife])
        self.rampup_ratio = rampup_ratio

    def betas(self, t: float, t_delta: float) -> list[float]:
        limit = float("inf") if self.rampup_ratio is None else t * self.rampup_ratio
        return [0.5 ** (t_delta / min(halflife, limit)) for halflife in self.lengths]
