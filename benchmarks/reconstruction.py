"""How close is a reconstructed average to the same average tracked during training?

    python minimal_uvit/train.py --out runs/tracked --snapshot-every 12000 \\
        --sigma-rels 0.05 0.1 0.03 0.075 0.15 0.2
    python benchmarks/reconstruction.py runs/tracked

The two lengths of `--source` are reconstructed from, at every first, second and fourth time; the others,
which the run has tracked too, are what the outcome is held against: the norm of the difference over the norm
of the weights.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from posthoc_ema.ema import solve_posthoc_coefficients
from posthoc_ema.plan import profile_errors
from posthoc_ema.reconstruct import weighted_sums
from posthoc_ema.snapshots import list_snapshots, read_snapshot
from shared.check import require
from shared.run import cli


@dataclass(frozen=True)
class Options:
    run: tyro.conf.Positional[Path]  # a run that has tracked more lengths than --source
    source: tuple[float, ...] = (0.05, 0.10)  # lengths to reconstruct from


def main(options: Options) -> None:
    snapshots = list_snapshots(options.run)
    times = sorted({s.nimg for s in snapshots})
    held_out = [s for s in snapshots if s.nimg == times[-1] and s.sigma_rel not in options.source]
    require(len(held_out) > 0, f"{options.run} has tracked no length besides {options.source}")
    print("| times | snapshots | sigma_rel | profile, L2 error | weights, L2 error |")
    print("| ---: " * 5 + "|")
    every = len(times) // 8
    while every:
        used = times[::-1][::every][::-1]  # always with the last
        source = [s for s in snapshots if s.nimg in used and s.sigma_rel in options.source]
        t, sigma_rel = np.array([(s.nimg, s.sigma_rel) for s in source]).T
        lengths = [s.sigma_rel for s in held_out]
        x = solve_posthoc_coefficients(t, sigma_rel, times[-1], lengths)
        L2 = profile_errors(t, sigma_rel, x, times[-1], lengths)[1]
        for m, weights in enumerate(weighted_sums(source, x)):
            tracked = read_snapshot(held_out[m].path)[0]
            squares = [((weights[name] - value).double().square().sum(), value.double().square().sum())
                       for name, value in tracked.items() if value.is_floating_point()]
            error = np.sqrt(np.divide(*np.sum(squares, axis=0)))
            print(f"| {len(used)} | {len(source)} | {lengths[m]:.3f} | {L2[m]:.2%} | {error:.4%} |")
        every //= 2


if __name__ == "__main__":
    cli(main, Options, "Hold reconstructed averages against tracked ones.")
