"""Long-skip scaling in tinygrad: the twin of `long_skip.py`, which says what it is about."""

from collections.abc import Callable, Sequence
from functools import partial

from tinygrad import Tensor, nn

from shared.long_skip import LongSkipConfig, long_skip_coefficients


class CalibrationNetwork:
    """Squeeze-and-excitation of a pooled skip: (B, width) -> kappa in (0, 1), (B, width). Section 4.2."""

    def __init__(self, width: int, reduction: int, layer: Callable[[int, int], Callable]):
        hidden = max(1, width // reduction)
        self.fc1 = layer(width, hidden)
        self.fc2 = layer(hidden, width)

    def __call__(self, pooled: Tensor) -> Tensor:
        return self.fc2(self.fc1(pooled).relu()).sigmoid()


class LongSkipScaling:
    """kappa_i for each of N long skips; arguments as in `long_skip.py`."""

    def __init__(
        self, config: LongSkipConfig, widths: Sequence[int], pool_dims: tuple[int, ...],
        layer: Callable[[int, int], Callable] = nn.Linear,
    ):
        self.config = config
        self.widths = list(widths)
        self.pool_dims = pool_dims
        if config.learnable:
            keys = {self.key(i): width for i, width in enumerate(self.widths, start=1)}
            network = partial(CalibrationNetwork, reduction=config.reduction, layer=layer)
            self.networks = {key: network(width) for key, width in keys.items()}
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

    def __call__(self, skip: Tensor, i: int) -> Tensor:
        """kappa_i * skip, of skip's shape; a coefficient of 1 multiplies nothing."""
        kappa = self.kappa(skip, i)
        return skip if isinstance(kappa, float) and kappa == 1 else kappa * skip
