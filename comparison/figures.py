"""The figures of a comparison: each to be taken in at a glance, a scaling in the same colour in all of them.

Reading order: `COLOURS`, a function a figure, `FIGURES`, `draw_all`. Colours are Okabe and Ito's, which most
colour-blind readers tell apart; a band or an error bar is the standard error over seeds.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from comparison.statistics import mean_and_error
from comparison.summary import NAMES, Group, choose_lr, final_loss, label, loss_curve
from shared.files import write_whole
from shared.run import VALIDATION_SIGMAS

WIDTH = 8.3  # inches, of 100 pixels each in a README
COLOURS = {"none": "#000000", "inv_sqrt2": "#0072B2", "constant:0.7": "#D55E00", "learnable": "#009E73",
           "learnable_shared": "#CC79A7"}
CONSTANTS = ("#E69F00", "#56B4E9", "#B8A800")  # of any other constant:K, in the order asked for
FAR = 3.0  # a loss this many times the lowest of a sweep is not drawn to scale
EARLY, LATE = 0.15, 0.85  # of the colour map for depths: its ends are too pale and too dark


def colours(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each scaling, in their order."""
    kinds = list(dict.fromkeys(kinds))
    constants = [kind for kind in kinds if kind not in COLOURS]
    return {kind: COLOURS.get(kind) or CONSTANTS[constants.index(kind) % len(CONSTANTS)] for kind in kinds}


def palette_of(groups: list[Group]) -> dict[str, str]:
    return colours(g.long_skip for g in groups)


def shown(groups: list[Group]) -> list[Group]:
    """Those of the learning rate that the table shows."""
    chosen = choose_lr(groups)
    return [g for g in groups if g.lr == chosen[g.network]]


def panels(groups: list[Group], height: float, rows: int = 1) -> tuple[Figure, np.ndarray, list[str]]:
    """A figure with a column a network, and the names of these."""
    networks = list(dict.fromkeys(g.network for g in groups))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, len(networks), squeeze=False)
    for axis, network in zip(axes[0], networks, strict=True):
        axis.set_title(NAMES[network], fontsize=11, fontweight="bold")
    for axis in axes.flat:
        style(axis)
    return figure, axes, networks


def style(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8.5)
    axis.grid(alpha=0.25, linewidth=0.6)


def log_scale(axis: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with ticks that read as numbers: few over decades, more within one."""
    axis.set(**{f"{which}scale": "log"})
    low, high = axis.dataLim.intervalx if which == "x" else axis.dataLim.intervaly
    decades = np.log10(high / low) if 0 < low < high < np.inf else 1.0
    subs = (1, 1.2, 1.5, 2, 3, 5, 7) if decades < 0.9 else (1, 2, 5) if decades < 2 else (1,)
    side = axis.xaxis if which == "x" else axis.yaxis
    side.set_major_locator(LogLocator(subs=subs, numticks=8))
    side.set_minor_formatter(NullFormatter())
    if decades < 4:
        side.set_major_formatter("{x:g}")


def name_colours(figure: Figure, groups: list[Group]) -> None:
    """One line above all panels that says which colour is which scaling, each name in its colour."""
    palette = palette_of(groups)
    handles = [figure.axes[0].plot([], [], color=colour, linewidth=3)[0] for colour in palette.values()]
    names = [f"long skips: {label(kind)}" if k == 0 else label(kind) for k, kind in enumerate(palette)]
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=9.5, frameon=False,
                  labelcolor=list(palette.values()), handlelength=1.2, columnspacing=1.6)


def band(axis: Axes, x: list[float], curves: list[list[float]], colour: str) -> None:
    """Mean of curves with their standard error, as a line in a band."""
    mean, error = np.array([mean_and_error(list(values)) for values in zip(*curves, strict=True)]).T
    axis.plot(x, mean, color=colour, linewidth=1.6)
    if len(curves) > 1:
        axis.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)


def losses(groups: list[Group]) -> Figure:
    """Validation loss over training (dotted, where the unscaled network ends), and below it what differs: the
    loss against the unscaled network's, at the same step of the same seed."""
    groups = shown(groups)
    figure, axes, networks = panels(groups, 4.6, rows=2)
    for (top, bottom), network in zip(axes.T, networks, strict=True):
        for g in (g for g in groups if g.network == network and g.finished):
            steps, colour = g.finished[0]["levels"]["steps"][1:], palette_of(groups)[g.long_skip]
            curves = {seed: loss_curve(run)[1:] for seed, run in g.runs.items() if run["diverged"] is None}
            band(top, steps, list(curves.values()), colour)
            if g.long_skip == "none":
                top.axhline(np.mean([c[-1] for c in curves.values()]), color="0.5", linestyle=":", zorder=0)
            unscaled = {seed: loss_curve(run)[1:] for seed, run in g.unscaled.items() if seed in curves
                        and run["diverged"] is None}
            if unscaled:
                ratios = [np.divide(curves[seed], unscaled[seed]) for seed in unscaled]
                band(bottom, steps, [100 * (ratio - 1) for ratio in ratios], colour)
        log_scale(top, "y")
        bottom.set_xlabel("training steps")
    axes[0, 0].set_ylabel("validation loss")
    axes[1, 0].set_ylabel("loss against none, %")
    name_colours(figure, groups)
    return figure


def sigmas(groups: list[Group]) -> Figure:
    """Final validation loss at each noise level, relative to the unscaled network's of the same seed."""
    groups = shown(groups)
    figure, axes, networks = panels(groups, 3.0)
    for axis, network in zip(axes[0], networks, strict=True):
        axis.axhline(0, color="black", linewidth=1.6)
        for g in (g for g in groups if g.network == network and g.long_skip != "none"):
            points = [g.paired(lambda run, ref, k=k: 100 * (run["final"][k] / ref["final"][k] - 1))
                      for k in range(len(VALIDATION_SIGMAS))]
            if points[0] is not None:
                mean, error = np.array(points).T
                axis.errorbar(VALIDATION_SIGMAS, mean, np.nan_to_num(error), fmt="o-", markersize=3,
                              capsize=2, linewidth=1.4, color=palette_of(groups)[g.long_skip])
        axis.set_xlabel("noise level σ")
        log_scale(axis, "x")
    axes[0, 0].set_ylabel("loss against none, %")
    name_colours(figure, groups)
    return figure


def effects(groups: list[Group]) -> Figure:
    """The table's numbers, a panel each: a dot a scaling, in the networks' order."""
    groups = shown(groups)
    titles = {
        "against none, %": "final loss\nagainst none, %", "acceleration": "acceleration, ×",
        "feature oscillation, %": "oscillation of\nfeatures, %",
        "gradient oscillation, %": "oscillation of\ngradients, %",
        "sensitivity": "output change per\ninput change",
    }
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    networks, palette = list(dict.fromkeys(g.network for g in groups)), palette_of(groups)
    for axis, (name, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        style(axis)
        axis.set_title(title, fontsize=9.5)
        for g in groups:
            estimate = g.columns()[name]
            place = list(palette).index(g.long_skip) - (len(palette) - 1) / 2
            y = networks.index(g.network) + 0.7 / len(palette) * place
            if estimate is not None:
                axis.errorbar(estimate[0], y, xerr=np.nan_to_num(estimate[1]), fmt="o", markersize=5,
                              color=palette[g.long_skip], capsize=2, linewidth=1.4)
        if name in ("against none, %", "acceleration"):
            axis.axvline(name == "acceleration", color="0.6", linewidth=1, zorder=0)
        axis.set(ylim=(len(networks) - 0.5, -0.5), yticks=[])
        axis.grid(axis="y", visible=False)
    names = [NAMES[network] for network in networks]
    figure.axes[0].set_yticks(range(len(networks)), names, fontsize=10, fontweight="bold")
    name_colours(figure, groups)
    return figure


def features(groups: list[Group]) -> Figure:
    """Magnitude of the hidden features of each stage over training, the first seed: the paper's Figure 1."""
    from matplotlib import colormaps

    groups = [g for g in shown(groups) if g.finished]
    networks = list(dict.fromkeys(g.network for g in groups))
    kinds = list(dict.fromkeys(g.long_skip for g in groups))
    figure = Figure(figsize=(WIDTH, 0.6 + 1.9 * len(networks)), layout="constrained")
    axes = figure.subplots(len(networks), len(kinds), squeeze=False, sharex=True, sharey="row")
    for g in groups:
        axis, run = axes[networks.index(g.network), kinds.index(g.long_skip)], g.finished[0]
        curves = list(zip(*run["curves"]["features"], strict=True))
        for i, curve in enumerate(curves):
            steps = run["curves"]["steps"]
            shade = colormaps["viridis"](np.interp(i, [0, max(len(curves) - 1, 1)], [EARLY, LATE]))
            axis.plot(steps, curve, color=shade, linewidth=1.1)
            if g.long_skip == kinds[-1] and i in (0, len(curves) - 1):
                axis.annotate(f" i = {i + 1}", (steps[-1], curve[-1]), color=shade, fontsize=8, va="center",
                              annotation_clip=False)
    for axis in axes.flat:
        style(axis)
        log_scale(axis, "y")
    for axis, kind in zip(axes[0], kinds, strict=True):
        axis.set_title(label(kind), color=palette_of(groups)[kind], fontsize=10.5, fontweight="bold")
    for axis, network in zip(axes[:, 0], networks, strict=True):
        axis.set_ylabel(f"{NAMES[network]}\nfeature magnitude", fontsize=9)
    figure.supxlabel("training steps; i = 1 is the outermost stage", fontsize=9)
    return figure


def stages(groups: list[Group]) -> Figure:
    """At the end of training, stage by stage: activations, weights and kappa."""
    groups = shown(groups)
    figure, axes, networks = panels(groups, 5.6, rows=3)
    rows = {"skips": "encoder output\nmagnitude", "weights": "weight\nmagnitude", "kappas": "mean κ"}
    for column, network in zip(axes.T, networks, strict=True):
        for axis, name in zip(column, rows, strict=True):
            for g in (g for g in groups if g.network == network and g.finished):
                curves = [run["levels"][name][-1] for run in g.finished]
                band(axis, list(range(1, len(curves[0]) + 1)), curves, palette_of(groups)[g.long_skip])
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_ylim(0, 1.1 * axis.dataLim.ymax)
        column[-1].set_xlabel("stage i, 1 the outermost")
    for axis, name in zip(axes[:, 0], rows.values(), strict=True):
        axis.set_ylabel(name, fontsize=9)
    name_colours(figure, groups)
    return figure


def stability(groups: list[Group]) -> Figure:
    """Final loss at each learning rate of a sweep; a cross above where a run diverged or ended far above."""
    figure, axes, networks = panels(groups, 3.2)
    for axis, network in zip(axes[0], networks, strict=True):
        ours = [g for g in groups if g.network == network]
        known = [g.estimate(final_loss)[0] for g in ours if g.finished]
        limit = FAR * min(known, default=1.0)
        for k, (kind, colour) in enumerate(palette_of(groups).items()):
            points, crosses = [], []
            for g in (g for g in ours if g.long_skip == kind):
                estimate = g.estimate(final_loss)
                if estimate is not None and estimate[0] <= limit:
                    points.append((g.lr, *estimate))
                if estimate is None or estimate[0] > limit or len(g.finished) < len(g.runs):
                    crosses.append(g.lr * 1.07 ** (k - 2))  # side by side
            if points:
                lr, mean, error = np.array(sorted(points)).T
                error = np.nan_to_num(error)
                axis.errorbar(lr, mean, error, fmt="o-", markersize=3, linewidth=1.4, color=colour)
            height = [0.97 - 0.035 * k] * len(crosses)
            axis.plot(crosses, height, "x", color=colour, markersize=6, transform=axis.get_xaxis_transform())
        axis.set_xlabel("learning rate")
        log_scale(axis, "x")
        log_scale(axis, "y")
        axis.margins(y=0.25)
    axes[0, 0].set_ylabel(f"final validation loss\n×: diverged, or {FAR:g} times the lowest")
    name_colours(figure, groups)
    return figure


FIGURES: dict[str, Callable[[list[Group]], Figure]] = {
    "effects": effects, "losses": losses, "sigmas": sigmas, "features": features, "stages": stages,
}


def save(path: Path, figure: Figure) -> None:
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=160))


def draw_all(folder: Path, groups: list[Group]) -> list[Path]:
    """Draw what there is data for; the paths written."""
    functions = dict(FIGURES) if any(g.finished for g in groups) else {}
    if len({g.lr for g in groups if g.network == groups[0].network}) > 1:
        functions["stability"] = stability
    for name, function in functions.items():
        save(folder / f"{name}.png", function(groups))
    return [folder / f"{name}.png" for name in functions]
