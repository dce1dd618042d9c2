"""From results to numbers with error bars, and the table of them.

Reading order: `Group`, `group`, `stability`, `write_table`. A group is the runs of one network, scaling and
learning rate, one a seed. What compares with the unscaled network compares run by run within a seed, where
images and noise are the same, and then takes mean and standard error over seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comparison.statistics import TRAINS, WINDOW, acceleration, largest_stable, mean_and_error, oscillation
from comparison.training import Cell
from shared.files import write_whole
from shared.run import VALIDATION_SIGMAS

Estimate = tuple[float, float] | None  # mean and standard error, which is nan of one value; None of no value
LABELS = {"inv_sqrt2": "1/√2", "learnable_shared": "shared learnable"}
NOTE = f"""
Numbers are means ± standard errors over seeds. Final loss: EDM's validation loss of averaged weights, mean
over {len(VALIDATION_SIGMAS)} noise levels; against none: the change from the unscaled network, seed by seed.
Acceleration: the steps after which the unscaled network first has its final loss, over those of this one;
where that never has it, the unscaled one's steps to this one's final loss, over all. Oscillation: relative
deviation of features' magnitude and of gradients' norm from a parabola over {WINDOW} measurements, the mean
over depths. Sensitivity: change of the raw output F for a small random change of the input, over that.
"""
NOTE_OF_SWEEP = f"""
Largest stable lr: of those tried, up to which all end within {TRAINS} times the best one's final loss; the
geometric mean over seeds, and its standard error as a factor; ≥ where one seed trains at the largest tried.
"""
NAMES = {"uvit": "U-ViT", "adm": "ADM", "edm2": "EDM2"}


def label(long_skip: str) -> str:
    """How a scaling is called in a table or figure."""
    return LABELS.get(long_skip, long_skip.replace(":", " "))


def loss_curve(result: dict) -> list[float]:
    """Validation loss over training, the mean over noise levels."""
    return [float(np.mean(losses)) for losses in result["levels"]["validation"]]


def final_loss(result: dict) -> float | None:
    """Validation loss at the end, the mean over noise levels; None of a run that diverged."""
    return None if result["final"] is None else float(np.mean(result["final"]))


def oscillations(result: dict, name: str) -> list[float | None]:
    """Of `features` or `gradients`, stage by stage."""
    return [oscillation(list(curve)) for curve in zip(*result["curves"][name], strict=True)]


def mean_oscillation(result: dict, name: str) -> float | None:
    """The mean over stages, in percent."""
    known = [value for value in oscillations(result, name) if value is not None]
    return 100 * float(np.mean(known)) if known and result["diverged"] is None else None


def loss_change(run: dict, unscaled: dict) -> float:
    """By how many percent the final loss is above the unscaled network's."""
    return 100 * (final_loss(run) / final_loss(unscaled) - 1)


def accelerated(run: dict, unscaled: dict) -> float | None:
    return acceleration(run["levels"]["steps"], loss_curve(run), loss_curve(unscaled))


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, with those of the unscaled network of the same seeds."""

    network: str
    long_skip: str
    lr: float
    runs: dict[int, dict]  # results by seed
    unscaled: dict[int, dict]  # empty where `none` was not asked for

    @property
    def finished(self) -> list[dict]:
        """Runs that did not diverge."""
        return [run for run in self.runs.values() if run["diverged"] is None]

    def estimate(self, of: Callable[[dict], float | None]) -> Estimate:
        return mean_and_error([of(run) for run in self.finished])

    def paired(self, of: Callable[[dict, dict], float | None]) -> Estimate:
        """Of a run and the unscaled one of its seed, where neither diverged."""
        seeds = [seed for seed, run in self.runs.items() if seed in self.unscaled
                 and run["diverged"] is None and self.unscaled[seed]["diverged"] is None]
        return mean_and_error([of(self.runs[seed], self.unscaled[seed]) for seed in seeds])

    def columns(self) -> dict[str, Estimate]:
        """The numbers of the table, by name."""
        return {
            "final loss": self.estimate(final_loss),
            "against none, %": self.paired(loss_change),
            "acceleration": self.paired(accelerated),
            "feature oscillation, %": self.estimate(lambda run: mean_oscillation(run, "features")),
            "gradient oscillation, %": self.estimate(lambda run: mean_oscillation(run, "gradients")),
            "sensitivity": self.estimate(lambda run: run["levels"]["robustness"][-1]),
        }


def group(found: dict[Cell, dict]) -> list[Group]:
    """Groups in the order in which their cells come."""
    runs: dict[tuple[str, str, float], dict[int, dict]] = {}
    for cell, result in found.items():
        runs.setdefault((cell.network, cell.long_skip, cell.lr), {})[cell.seed] = result
    return [Group(*key, of_key, runs.get((key[0], "none", key[2]), {})) for key, of_key in runs.items()]


def choose_lr(groups: list[Group]) -> dict[str, float]:
    """Of each network the learning rate that table and curves show: that at which the unscaled network, or
    else the first scaling, ends best."""
    chosen = {}
    for network in dict.fromkeys(g.network for g in groups):
        ours = [g for g in groups if g.network == network]
        kind = "none" if any(g.long_skip == "none" for g in ours) else ours[0].long_skip
        first = [g for g in ours if g.long_skip == kind]
        chosen[network] = min(first, key=lambda g: (g.estimate(final_loss) or (np.inf,))[0]).lr
    return chosen


def stability(groups: list[Group], network: str, long_skip: str) -> tuple[float, float, bool] | None:
    """The largest stable learning rate: the geometric mean over seeds, its standard error as a factor, nan of
    one seed, and whether the sweep ended there for one of them, so that it may be larger. None where a seed
    trains at no learning rate."""
    ours = [g for g in groups if (g.network, g.long_skip) == (network, long_skip)]
    lrs = [g.lr for g in ours]
    seeds = set.intersection(*(set(g.runs) for g in ours))
    found = [largest_stable(lrs, [final_loss(g.runs[seed]) for g in ours]) for seed in sorted(seeds)]
    if not found or None in found:
        return None
    mean, error = mean_and_error(np.log(found).tolist())
    return float(np.exp(mean)), float(np.exp(error)), max(found) == max(lrs)


def show(estimate: Estimate) -> str:
    """`mean ± standard error`, to as many digits as the error allows."""
    if estimate is None:
        return "–"
    mean, error = estimate
    if not np.isfinite(error) or error == 0:
        return f"{mean:.4g}"
    digits = max(0, 1 - int(np.floor(np.log10(error))))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def show_stability(found: tuple[float, float, bool] | None) -> str:
    """As `stability` gives it: `mean ×/÷ factor`, of two digits each."""
    if found is None:
        return "–"
    mean, factor, open_ended = found
    error = f" ×/÷ {factor:.2g}" if np.isfinite(factor) and factor > 1.005 else ""
    return f"{'≥ ' * open_ended}{mean:.2g}{error}"


def write_table(path: Path, groups: list[Group], steps: int) -> str:
    """Write and return a Markdown table, a row a network and scaling, and what its columns are."""
    chosen, swept = choose_lr(groups), len({g.lr for g in groups if g.network == groups[0].network}) > 1
    shown = [g for g in groups if g.lr == chosen[g.network]]
    head = ["network", "long skips", *shown[0].columns(), "diverged", *["largest stable lr"] * swept]
    rows = [head, ["---"] * len(head)]
    for g in shown:
        row = [NAMES[g.network], label(g.long_skip), *map(show, g.columns().values())]
        row.append(f"{len(g.runs) - len(g.finished)} of {len(g.runs)}")
        if swept:
            row.append(show_stability(stability(groups, g.network, g.long_skip)))
        rows.append(row)
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    lrs = ", ".join(f"{NAMES[network]} {lr:g}" for network, lr in chosen.items())
    text += f"\nLearning rate: {lrs}. Steps: {steps}. Seeds: {len(shown[0].runs)}.\n{NOTE}"
    text += NOTE_OF_SWEEP * swept
    write_whole(path, lambda file: file.write(text.encode()))
    return text
