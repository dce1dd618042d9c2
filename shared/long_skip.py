"""Long-skip scaling: how strongly an encoder feature enters its decoder block.

Paper: ScaleLong, arXiv:2310.13545v1. A U-shaped network hands N encoder features to its decoder over long
skips. The bounds on its hidden features, its gradients and its sensitivity all grow with the kappa_i, so
scaling the skips by kappa_i < 1 steadies training. Skips are numbered as in the paper: i = 1 is the outermost
(first encoder feature, last decoder block), i = N the innermost.

| kind               | kappa_i                                                             |
| ------------------ | ------------------------------------------------------------------- |
| `none`             | 1                                                                   |
| `inv_sqrt2`        | 1/sqrt(2)                                                           |
| `constant` (CS)    | kappa^(i-1)                                                         |
| `learnable` (LS)   | sigmoid(W2 relu(W1 pool(skip_i))), one calibration network per skip |
| `learnable_shared` | the same, one calibration network for all skips of one width        |

Deviations: a calibration network never has an empty hidden layer; the released code builds one of width 0
when `reduction` exceeds the width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn

from shared.check import require

Kind = Literal["none", "inv_sqrt2", "constant", "learnable", "learnable_shared"]


@dataclass(frozen=True)
class LongSkipConfig:
    kind: Kind = "none"  # how long skips are scaled
    kappa: float = 0.7  # base of the constant scaling kappa^(i-1), in (0, 1]
    reduction: int = 16  # a calibration network's hidden layer is this many times narrower than its input

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        require(self.kind in kinds, f"long-skip kind {self.kind!r} is unknown: one of {', '.join(kinds)}")
        require(0 < self.kappa <= 1, f"long-skip kappa is {self.kappa}: it must be in (0, 1]")
        require(self.reduction >= 1, f"long-skip reduction is {self.reduction}: it must be at least 1")

    @property
    def learnable(self) -> bool:
        return self.kind.startswith("learnable")


def long_skip_coefficients(kind: Kind, kappa: float, num_skips: int) -> list[float]:
    """kappa_1 .. kappa_N of a constant scaling, outermost first (ScaleLong section 4.1). ValueError for what
    `LongSkipConfig` refuses, and for learnable kinds, whose coefficients depend on the features."""
    learnable = LongSkipConfig(kind, kappa).learnable
    require(not learnable, f"long-skip kind {kind!r} has no constant coefficients")
    base = {"none": 1.0, "inv_sqrt2": 2**-0.5}
    return [base.get(kind, kappa ** (i - 1)) for i in range(1, num_skips + 1)]


class CalibrationNetwork(nn.Module):
    """Squeeze-and-excitation of a pooled skip: (B, width) -> kappa in (0, 1), (B, width). Section 4.2."""

    def __init__(self, width: int, reduction: int, layer: Callable[[int, int], nn.Module]):
        super().__init__()
        hidden = max(1, width // reduction)
        self.fc1 = layer(width, hidden)
        self.fc2 = layer(hidden, width)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.fc2(self.fc1(pooled).relu()).sigmoid()


class LongSkipScaling(nn.Module):
    """kappa_i for each of N long skips.

    `widths` are the lengths of the pooled skips, outermost first: channels in a UNet, tokens in U-ViT.
    `pool_dims` is what the learnable kinds average over: space, (2, 3), leaves a coefficient per channel;
    channels, (2,), one per token. `layer(inputs, outputs)` makes a calibration network's layers.
    """

    def __init__(
        self, config: LongSkipConfig, widths: Sequence[int], pool_dims: tuple[int, ...],
        layer: Callable[[int, int], nn.Module] = nn.Linear,
    ):
        super().__init__()
        self.config = config
        self.widths = list(widths)
        self.pool_dims = pool_dims
        if config.learnable:
            keys = {self.key(i): width for i, width in enumerate(self.widths, start=1)}
            network = partial(CalibrationNetwork, reduction=config.reduction, layer=layer)
            self.networks = nn.ModuleDict({key: network(width) for key, width in keys.items()})
        else:
            self.coefficients = long_skip_coefficients(config.kind, config.kappa, len(self.widths))

    def key(self, i: int) -> str:
        """Name of skip i's calibration network: its number, or the width that it shares."""
        return str(i if self.config.kind == "learnable" else self.widths[i - 1])

    def kappa(self, skip: Tensor, i: int) -> Tensor | float:
        """kappa_i, i = 1 outermost: a number, or a tensor with 1 in the pooled dimensions of `skip`."""
        if not self.config.learnable:
            return self.coefficients[i - 1]
        kappa = self.networks[self.key(i)](skip.mean(self.pool_dims))
        return kappa.reshape(*kappa.shape, *[1] * len(self.pool_dims))

    def forward(self, skip: Tensor, i: int) -> Tensor:
        """kappa_i * skip, of skip's shape; a coefficient of 1 multiplies nothing."""
        kappa = self.kappa(skip, i)
        return skip if isinstance(kappa, float) and kappa == 1 else kappa * skip
