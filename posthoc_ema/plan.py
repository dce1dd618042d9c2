"""What a reconstruction sums, and how good it can be: all that is known before a weight is read.

Paper: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv:2312.02696v2,
appendix C.3. The times and lengths of the snapshots fix the coefficients, how far the reconstructed profile
is from the target's, and by how much rounding errors in the snapshots grow.

Reading order: `Plan`, `profile_errors`, `make_plan`.

Shapes: N snapshots, M targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posthoc_ema.ema import power_function_inner, power_function_profile, solve_posthoc_coefficients
from posthoc_ema.snapshots import NAME, PRECISIONS, Snapshot, list_snapshots, require_alike, some
from shared.check import require

HALVES = {"float16": 2**-11 / 2.5, "bfloat16": 2**-8 / 2.5}  # their rounding of a weight, root mean square


@dataclass(frozen=True)
class Plan:
    snapshots: list[Snapshot]  # N of them, up to the targets' time
    sigma_rels: list[float]  # the M targets' lengths
    x: NDArray[np.float64]  # (N, M) coefficients, Algorithm 3
    condition: float  # condition number of the linear system that they solve
    L1: NDArray[np.float64]  # (M,) relative errors of the reconstructed profiles
    L2: NDArray[np.float64]  # (M,)
    dtypes: set[torch.dtype]  # of the snapshots' weights

    def header(self, m: int) -> dict:
        """The m-th target's: that of its time, with its own length and what it is made of."""
        names, coefficients = [s.path.name for s in self.snapshots], self.x[:, m].tolist()
        new = {"sigma_rel": self.sigma_rels[m], "reconstructed": names, "coefficients": coefficients}
        return self.snapshots[-1].header | new

    def rounding(self, precision: str) -> NDArray[np.float64]:
        """(M,) relative errors of the weights, root mean square, that snapshots of half precision bring."""
        return HALVES[precision] * np.linalg.norm(self.x, axis=0)

    def table(self) -> str:
        tracked = ", ".join(str(s) for s in sorted({s.sigma_rel for s in self.snapshots}))
        lines = [
            f"{len(self.snapshots)} snapshots of sigma_rel {tracked}, up to {self.snapshots[-1].nimg} images",
            f"condition number of their inner products {self.condition:.1e}",
            "sigma_rel   profile error: L1       L2   added by snapshots in float16   bfloat16",
        ]
        for row in zip(self.sigma_rels, self.L1, self.L2, *map(self.rounding, HALVES), strict=True):
            lines.append("{:9.3f}   {:17.3%} {:8.3%}   {:29.3%} {:10.3%}".format(*row))
        return "\n".join(lines)

    def warnings(self) -> list[str]:
        """A sentence for each target that cannot be had well, and on files that are missing or foreign."""
        have = {(s.nimg, s.sigma_rel) for s in self.snapshots}
        times, tracked = (sorted(set(values)) for values in zip(*have, strict=True))
        missing = [f"{t:09d}-{s:.3f}" for t in times for s in tracked if (t, s) not in have]
        files = sorted(path.name for path in self.snapshots[0].path.parent.iterdir() if path.is_file())
        foreign = [name for name in files if not NAME.fullmatch(name) and not name.startswith(".")]
        said = [f"snapshots are missing: {some(missing)}"] if missing else []
        said += [f"not named as snapshots, and left out: {some(foreign)}"] if foreign else []
        for m, s in enumerate(self.sigma_rels):
            if self.L2[m] > 0.05:
                side = "shorter" if s < tracked[0] else "longer"
                off = f"its profile is {self.L2[m]:.0%} off"
                said.append(f"sigma_rel {s} is {side} than the snapshots support: {off}")
            for precision in HALVES:
                error = self.rounding(precision)[m]
                if error > 0.01:
                    adds = "adds" if PRECISIONS[precision] in self.dtypes else "would add"
                    said.append(f"sigma_rel {s}: {precision} snapshots {adds} an error of {error:.1%}")
        return said


# How far a sum of the snapshots' profiles, Eq. 121, is from a target's.
def profile_errors(
    t: NDArray, sigma_rel: NDArray, x: NDArray, t_out: float, sigma_rel_out: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Relative L1 and L2 errors (M,) of coefficients x (N, M), by Gauss quadrature between the times."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    L1, L2, norm = np.zeros((3, x.shape[1]))
    for first, last in pairwise(np.unique([0, *t])):  # profiles jump at the times and are smooth between
        tau = (first + (last - first) * (nodes + 1) / 2)[:, None]
        target = power_function_profile(tau, t_out, sigma_rel_out)             # 64 M
        error = power_function_profile(tau, t, sigma_rel) @ x - target
        L1 += (last - first) / 2 * weights @ np.abs(error)  # the target's own L1 norm is 1
        L2 += (last - first) / 2 * weights @ error**2
        norm += (last - first) / 2 * weights @ target**2
    return L1, (L2 / norm) ** 0.5


def make_plan(folder: Path, sigma_rels: Sequence[float], nimg: int | None = None) -> Plan:
    """Plan these lengths at time nimg, a snapshot's, the last by default. ValueError where it cannot be."""
    snapshots = list_snapshots(folder)
    times = {s.nimg for s in snapshots}
    nimg = max(times) if nimg is None else nimg
    nearest = min(times, key=lambda t: abs(t - nimg))
    require(nimg in times, f"no snapshot in {folder} is of time {nimg}: the nearest is of {nearest}")
    snapshots = [s for s in snapshots if s.nimg <= nimg]
    t, tracked = np.array([(s.nimg, s.sigma_rel) for s in snapshots]).T
    x = solve_posthoc_coefficients(t, tracked, nimg, sigma_rels)
    condition = np.linalg.cond(power_function_inner(t[:, None], tracked[:, None], t, tracked))
    errors = profile_errors(t, tracked, x, nimg, sigma_rels)
    return Plan(snapshots, list(sigma_rels), x, condition, *errors, require_alike(snapshots))
