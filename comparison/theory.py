"""ScaleLong's three theorems, measured on the network that they are about.

Paper: ScaleLong, arXiv:2310.13545v1, section 3. The network is untrained, of constant width m, x in R^m:

    UNet(x) = f_0(x),    f_i(x) = b_{i+1} o [kappa_{i+1} a_{i+1} o x + f_{i+1}(a_{i+1} o x)],    0 <= i < N,

a_i, b_i and f_N each a perceptron of l layers with ReLU. h_i is what b_i puts out, f_{i-1}; c are constants:

| theorem         | statement                                                                            |
| --------------- | ------------------------------------------------------------------------------------ |
| 3.1, features   | |h_i|^2 ~ c1 |x|^2 sum_{j >= i} kappa_j^2 + c2                                       |
| 3.3, gradients  | |dL/dW|^2 <= c (L |x|^2 sum_j kappa_j^2 + c3), of every matrix W, L the loss         |
| 3.4, robustness | |UNet(x + d) - UNet(x)| <= |d| (sum_i kappa_i M0^i + c0), M0 the gain of b_i o a_i     |

Reading order: `Blocks`, `forward`, `measure`, `predict`, `check`, `theory`. What 3.1 and 3.3 leave open is
one factor for each kind of block, the geometric mean of measured over predicted; 3.4 leaves none.

Deviations: the statements are written down from descriptions of the paper, whose text was not at hand. How a
block ends matters and is left open there, so three kinds are measured. `unit`: with a linear layer drawn from
N(0, 1/m), so that a block keeps |x| on average; `linear`: with one from N(0, 2/m), the initialization of all
other layers, which doubles |x|^2; `relu`: with one from N(0, 2/m), rectified, which keeps |x|^2 but makes all
features positive. M0 is the largest gain measured for small random changes of the input, not the Lipschitz
constant, which is larger: a bound that holds for the one holds for the other.

    python compare.py theory            # prints the agreement, draws theory.png; a minute
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from comparison.figures import colours, log_scale, style
from comparison.summary import label
from comparison.training import parse_long_skip
from shared.check import require
from shared.files import write_whole
from shared.long_skip import long_skip_coefficients

End = Literal["unit", "linear", "relu"]
TITLES = {
    "features": ("3.1: hidden features", r"$\sum_{j\geq i}\kappa_j^2 + 1$", r"$|h_i|^2\ /\ |x|^2$"),
    "gradients": ("3.3: gradients", r"$\sum_j\kappa_j^2 + 1$", r"$|\partial L/\partial W|^2\ /\ L|x|^2$"),
    "robustness": ("3.4: robustness", r"$\sum_i\kappa_i M_0^i + M_0^N L_0$", "output / input change"),
}
FIXED = {"robustness": 1.0}  # factors that a theorem leaves no choice of
DISTANCE = 1e-3  # norm of a change of the input over that of the input


CONSTANTS = ("none", "inv_sqrt2", "constant:0.9", "constant:0.7", "constant:0.5", "constant:0.3")


@dataclass(frozen=True)
class TheoryOptions:
    depths: tuple[int, ...] = (2, 4, 8, 16)  # numbers N of long skips
    long_skips: tuple[str, ...] = CONSTANTS  # any of none, inv_sqrt2, constant:K
    ends: tuple[End, ...] = ("unit", "linear", "relu")  # how a block ends
    width: int = 256  # m
    layers: int = 2  # l, of each block
    networks: int = 8  # untrained networks over which squares are averaged, seeds 0 and up
    out: Path = Path("runs/compare")  # folder of theory.png

    def __post_init__(self) -> None:
        for name in ("depths", "long_skips", "ends"):
            require(getattr(self, name), f"{name} is empty: it needs one or more values")
        for name in ("width", "layers", "networks"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be at least 1")
        require(min(self.depths) > 0, f"depths are {self.depths}: they must be at least 1")
        for text in self.long_skips:
            require(not parse_long_skip(text).learnable, f"long-skips {text!r}: theory takes constants only")


@dataclass(frozen=True)
class Blocks:
    """The matrices (l, m, m) of a_1 .. a_N, of b_1 .. b_N and of f_N, and how each block ends."""

    a: list[Tensor]
    b: list[Tensor]
    middle: Tensor
    end: End

    def apply(self, block: Tensor, x: Tensor) -> Tensor:
        """(m,) -> (m,): all layers but the last are rectified, the last as `end` says."""
        for k, W in enumerate(block):
            x = W @ x
            x = x.relu() if k < len(block) - 1 or self.end == "relu" else x
        return x


def draw_blocks(depth: int, width: int, layers: int, end: End, seed: int) -> Blocks:
    """Kaiming's initialization, N(0, 2/m); of `unit` blocks the last layer is from N(0, 1/m)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * depth + 1, layers, width, width)
    W = torch.randn(shape, generator=generator, dtype=torch.float64) * (2 / width) ** 0.5
    if end == "unit":
        W[:, -1] *= 0.5**0.5
    a, b, middle = W.split([depth, depth, 1])
    return Blocks([*a], [*b], middle[0], end)


def forward(blocks: Blocks, kappas: list[float], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """[h_1, ..., h_N] and the output, which is h_1."""
    e = []
    for a in blocks.a:
        x = blocks.apply(a, x)
        e.append(x)
    h = blocks.apply(blocks.middle, x)
    features = []
    for kappa, b, skip in zip(reversed(kappas), reversed(blocks.b), reversed(e), strict=True):
        h = blocks.apply(b, kappa * skip + h)
        features.insert(0, h)
    return features, h


def gain(function: Callable[[Tensor], Tensor], x: Tensor, rng: np.random.Generator) -> float:
    """|f(x + d) - f(x)| / |d| for a random d of relative size DISTANCE."""
    d = torch.from_numpy(rng.standard_normal(len(x)))
    d *= DISTANCE * x.norm() / d.norm()
    return ((function(x + d) - function(x)).norm() / d.norm()).item()


def measure(blocks: Blocks, kappas: list[float], seed: int) -> dict[str, list[float]]:
    """Of one network and input: `features`, |h_i|^2 / |x|^2 of each i; `gradients`, the largest |dL/dW|^2
    over L |x|^2; `robustness`, the gain of the whole; `M0` and `L0`, the largest gain of a b_i o a_i and that
    of f_N."""
    rng = np.random.default_rng([seed, 1])  # of numpy: no stream that weights came from
    x, y = torch.from_numpy(rng.standard_normal((2, blocks.middle.shape[-1])))
    weights = [W.requires_grad_() for W in (*blocks.a, *blocks.b, blocks.middle)]
    features, output = forward(blocks, kappas, x)
    loss = (output - y).square().sum() / 2
    grads = torch.autograd.grad(loss, weights)
    largest = max(grad.square().sum((1, 2)).max().item() for grad in grads)
    with torch.no_grad():
        whole = gain(lambda z: forward(blocks, kappas, z)[1], x, rng)
        pairs = [gain(lambda z, a=a, b=b: blocks.apply(b, blocks.apply(a, z)), x, rng)
                 for a, b in zip(blocks.a, blocks.b, strict=True)]
        L0 = gain(lambda z: blocks.apply(blocks.middle, z), x, rng)
    power = x.square().sum().item()
    return {
        "features": [h.square().sum().item() / power for h in features],
        "gradients": [largest / (loss.item() * power)],
        "robustness": [whole], "M0": [max(pairs)], "L0": [L0],
    }


def predict(kappas: list[float], M0: float, L0: float) -> dict[str, list[float]]:
    """The theorems' right-hand sides, over |x|^2, over L |x|^2, and over |d|. The constants c2, c3 and c0 are
    what the middle block, which has no skip, adds: a 1 beside the kappa_j^2, and M0^N L0."""
    squares = np.square(kappas)
    bound = sum(kappa * M0**i for i, kappa in enumerate(kappas, start=1)) + M0 ** len(kappas) * L0
    return {
        "features": (np.cumsum(squares[::-1])[::-1] + 1).tolist(),
        "gradients": [float(squares.sum()) + 1], "robustness": [float(bound)],
    }


def check(options: TheoryOptions, end: End) -> dict[str, np.ndarray]:
    """{theorem: points (3, n)}: what is predicted, what is measured (the mean over networks), and the number
    of the scaling in `long_skips`."""
    points: dict[str, list[tuple[float, float, int]]] = {name: [] for name in TITLES}
    for depth in options.depths:
        drawn = [draw_blocks(depth, options.width, options.layers, end, s) for s in range(options.networks)]
        for number, text in enumerate(options.long_skips):
            config = parse_long_skip(text)
            kappas = long_skip_coefficients(config.kind, config.kappa, depth)
            each = [measure(blocks, kappas, seed) for seed, blocks in enumerate(drawn)]
            mean = {name: np.mean([values[name] for values in each], axis=0) for name in each[0]}
            predicted = predict(kappas, max(v["M0"][0] for v in each), max(v["L0"][0] for v in each))
            for name in TITLES:
                points[name] += [(p, m, number) for p, m in zip(predicted[name], mean[name], strict=True)]
    return {name: np.array(pairs).T for name, pairs in points.items()}


def agreement(predicted: np.ndarray, measured: np.ndarray, c: float | None = None) -> tuple[float, ...]:
    """(c, lowest and highest measured / (c predicted), exponent p, correlation): c is the geometric mean of
    measured over predicted, unless given; p of measured ~ predicted^p is fitted to logarithms."""
    ratio = np.log(measured / predicted)
    c = math.exp(ratio.mean()) if c is None else c
    p, _ = np.polyfit(np.log(predicted), np.log(measured), 1)
    r = np.corrcoef(np.log(predicted), np.log(measured))[0, 1]
    return c, math.exp(ratio.min()) / c, math.exp(ratio.max()) / c, float(p), float(r)


def verdict(name: str, low: float, high: float, p: float, r: float) -> str:
    """What the points say of a theorem, in a few words."""
    if name == "robustness":
        loose = f"{1 / high:.2g} to {1 / low:.2g} times what is measured"
        return f"{'holds' if high <= 1 else 'fails'}: the bound is {loose}"
    if r < 0.8:
        return "parts: other things than the sum decide"
    close = max(high, 1 / low) <= 1.5
    return "agrees" if close else f"follows, but as the power {p:.2g} of what is predicted"


def draw(options: TheoryOptions, points: dict[End, dict[str, np.ndarray]], path: Path) -> None:
    """Measured points over predicted lines: a row a kind of block, a column a theorem, a colour a scaling."""
    figure = Figure(figsize=(8.3, 0.7 + 2.2 * len(points)), layout="constrained")
    axes = figure.subplots(len(points), len(TITLES), squeeze=False)
    palette = colours(options.long_skips)
    for k, (end, of_end) in enumerate(points.items()):
        for axis, (name, (title, x, y)) in zip(axes[k], TITLES.items(), strict=True):
            predicted, measured, kind = of_end[name]
            shades = [palette[options.long_skips[int(number)]] for number in kind]
            c = agreement(predicted, measured, FIXED.get(name))[0]
            line = np.array([predicted.min(), predicted.max()])
            axis.plot(line, c * line, color="0.5", linewidth=1.2, zorder=0)
            axis.scatter(predicted, measured, s=11, color=shades, alpha=0.8, linewidth=0)
            style(axis)
            log_scale(axis, "x")
            log_scale(axis, "y")
            if k == 0:
                axis.set_title(title, fontsize=10.5, fontweight="bold")
            if k == len(points) - 1:
                axis.set_xlabel(f"predicted {x}", fontsize=9)
            told = y if name != "features" else f"blocks end: {end}\n{y}"
            axis.set_ylabel(told, fontsize=9)
    handles = [axes[0, 0].plot([], [], "o", color=colour)[0] for colour in palette.values()]
    figure.legend(handles, [label(text) for text in palette], loc="outside upper center", ncols=len(palette),
                  frameon=False, fontsize=9.5, labelcolor=list(palette.values()), columnspacing=1.2)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=160))


def theory(options: TheoryOptions) -> None:
    """Measure, print the agreement of each theorem for each kind of block, and draw."""
    points = {end: check(options, end) for end in options.ends}
    print("theorem     blocks end   constant   measured / predicted   exponent  correlation of logarithms")
    for name in TITLES:
        for end, of_end in points.items():
            c, low, high, p, r = agreement(*of_end[name][:2], FIXED.get(name))
            numbers = f"{c:9.3g}  {low:9.2g} .. {high:<8.2g}  {p:8.2f}  {r:6.3f}"
            print(f"{name:10}  {end:10}  {numbers}  {verdict(name, low, high, p, r)}")
    draw(options, points, options.out / "theory.png")
    print(options.out / "theory.png")
