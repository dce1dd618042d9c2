"""compare.py: statistics on made-up curves with known answers, tiny runs, and the theory's closed forms."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
import comparison.training
from comparison import results
from comparison.networks import NETWORKS, TOLERANCE, build, count, match
from comparison.statistics import (
    WINDOW,
    acceleration,
    largest_stable,
    local_quadratic,
    mean_and_error,
    oscillation,
    steps_to_reach,
)
from comparison.summary import Group, group, loss_change, show, show_stability, stability
from comparison.theory import Blocks, TheoryOptions, agreement, check, draw_blocks, forward, measure, predict
from comparison.training import (
    Cell,
    due,
    has_diverged,
    parse_long_skip,
    to_json,
    train_cell,
    training_batches,
)
from shared.data import DataConfig
from shared.long_skip import LongSkipConfig

ROOT = Path(__file__).parents[1]
DIGITS = (1, 8, 8)
TINY = compare.Options(
    networks=("uvit", "adm"), long_skips=("none", "constant:0.5"), seeds=(0,), steps=4, batch_size=4, jobs=1
)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """Seconds a run."""
    monkeypatch.setattr(comparison.training, "VALIDATED", 4)
    monkeypatch.setattr(comparison.training, "LAST", 16)


# Statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0, 1, 2])
def test_a_trend_is_no_oscillation(power):
    """exp of a parabola is removed exactly, whatever its size."""
    t = np.linspace(0, 2, 60)
    assert oscillation(list(5 * np.exp(1.3 * t**power))) == pytest.approx(0, abs=1e-12)


def test_oscillation_of_a_sine():
    """ln(curve) = a sin(2 pi t / P): the fit leaves 1 - sum w cos(2 pi k / P) of it, a root mean square of
    a / sqrt(2) over whole periods."""
    a, P = 0.03, 4
    t = np.arange(WINDOW - 1 + 10 * P)
    offsets = np.arange(WINDOW) - WINDOW // 2
    left = 1 - local_quadratic(WINDOW) @ np.cos(2 * np.pi * offsets / P)
    curve = 7 * np.exp(a * np.sin(2 * np.pi * t / P) + 0.01 * t)
    assert oscillation(list(curve)) == pytest.approx(a / 2**0.5 * left, rel=1e-9)
    assert 0.8 < left < 1.2  # nearly all of it


def test_the_fit_is_least_squares():
    values = np.random.default_rng(0).standard_normal(WINDOW)
    offsets = np.arange(WINDOW) - WINDOW // 2
    assert local_quadratic(WINDOW) @ values == pytest.approx(np.polyfit(offsets, values, 2)[-1], rel=1e-9)


def test_what_has_no_oscillation():
    assert oscillation([1.0] * WINDOW) is None
    assert oscillation([0.0, None, *[2.0] * (WINDOW + 1)]) == pytest.approx(0, abs=1e-12)


def test_steps_to_reach():
    steps, losses = [0, 10, 20, 30], [4.0, 2.0, 3.0, 1.0]
    assert steps_to_reach(steps, losses, 3.0) == 5
    assert steps_to_reach(steps, losses, 1.5) == 27.5
    assert steps_to_reach(steps, losses, 4.0) == 0
    assert steps_to_reach(steps, losses, 0.5) is None


def test_acceleration():
    """Straight lines: a loss that falls twice as fast is twice as soon where the other ends."""
    steps = [0, 50, 100]
    slow, fast = [2.0, 1.5, 1.0], [2.0, 1.0, 0.0]
    assert acceleration(steps, fast, slow) == 2
    assert acceleration(steps, slow, fast) == 0.5
    assert acceleration(steps, slow, slow) == 1
    up = [9.0, 5.0, 1.0, 3.0]  # first at its final loss at 15, not at the end
    assert acceleration([0, 10, 20, 30], [9.0, 3.0, 2.0, 2.0], up) == 1.5
    assert acceleration(steps, [9.0, 9.0, 9.0], slow) is None


def test_mean_and_error():
    """1, 2, 3, 4: mean 2.5, standard error sqrt(5 / 3 / 4)."""
    assert mean_and_error([1, 2, None, 3, 4]) == pytest.approx((2.5, (5 / 12) ** 0.5))
    mean, error = mean_and_error([3.0])
    assert mean == 3 and np.isnan(error)
    assert mean_and_error([None]) is None
    assert show((2.5, 0.6454972)) == "2.50 ± 0.65" and show((3.0, np.nan)) == "3" and show(None) == "–"


@pytest.mark.parametrize("losses, expected", [
    ([1.0, 0.9, 0.8, 0.9], 1.0),
    ([1.0, 0.9, 5.0, None], 1e-2),
    ([1.0, 0.9, 5.0, 0.9], 1e-2),  # what trains beyond one that does not is luck
    ([2.0, 1.0, 0.9, None], 1e-1),  # the first is too small to get far
    ([None] * 4, None),
])
def test_largest_stable(losses, expected):
    lrs = [1e-3, 1e-2, 1e-1, 1.0]
    assert largest_stable(lrs, losses) == expected
    assert largest_stable(lrs[::-1], losses[::-1]) == expected


# Networks and training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [4, 6, 12])
@pytest.mark.parametrize("shape", [DIGITS, (3, 32, 32)])
def test_parameters_match(depth, shape):
    counts = {name: count(name, depth, *match(name, depth, 300_000, shape), shape) for name in NETWORKS}
    for total in counts.values():
        assert abs(total / counts["adm"] - 1) <= TOLERANCE
    if shape == DIGITS:
        for name in NETWORKS:
            model = build(name, depth, 300_000, shape, LongSkipConfig(), 0)
            assert len(model.encoder) == len(model.decoder) == len(model.scaling.widths) == depth
            assert sum(p.numel() for p in model.net.parameters()) == counts[name]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_start_whatever_the_scaling(network):
    plain, learned = (build(network, 4, 300_000, DIGITS, LongSkipConfig(kind), 3).net.state_dict()
                      for kind in ("none", "learnable"))
    assert len(learned) > len(plain)
    assert all(torch.equal(learned[name], value) for name, value in plain.items())


def test_the_same_batches_in_two_networks():
    one, other = (Cell(*key, 2, 1e-3, 3, 4, 300_000, 4, 0, DataConfig())
                  for key in (("uvit", "none"), ("edm2", "learnable")))
    drawn = [list(training_batches(cell)) for cell in (one, other, replace(one, seed=3))]
    for ours, theirs, others in zip(*drawn, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def test_small_rules():
    assert [step for step in range(1, 11) if due(step, 10, 4)] == [3, 5, 8, 10]
    assert all(due(step, 3, 20) for step in (1, 2, 3))
    assert to_json({"a": [1.0, float("nan"), None, 3]}) == {"a": [1.0, None, None, 3]}
    assert has_diverged([1.0, float("inf")], True) and has_diverged([1.0], False)
    assert has_diverged([1.0] + [4.0] * 20, True) and not has_diverged([1.0] + [4.0] * 10, True)
    assert parse_long_skip("constant:0.5") == LongSkipConfig("constant", 0.5)


@pytest.mark.parametrize("network", NETWORKS)
def test_what_a_run_measures(network):
    cell = Cell(network, "learnable", 0, 1e-3, 3, 4, 300_000, 4, 0, DataConfig())
    steps = []
    result = train_cell(cell, lambda: steps.append(1))
    assert len(steps) == 3 and result["diverged"] is None and len(result["final"]) == 9
    assert result["cell"] == cell.identity() == json.loads(json.dumps(cell.identity()))
    for name in ("features", "gradients"):
        assert np.shape(result["curves"][name]) == (4, 4)
    assert np.shape(result["levels"]["validation"]) == (4, 9)
    assert np.shape(result["levels"]["kappas"]) == (4, 4)
    assert all(0 < kappa < 1 for kappa in result["levels"]["kappas"][-1])
    assert result["levels"]["robustness"][-1] > 0 and min(result["levels"]["weights"][-1]) > 0
    assert result == train_cell(cell)  # bit for bit


def test_stability_has_an_error_over_seeds():
    """Of seeds that bear 0.001, 0.001 and 0.01: 1/3 of a decade above 0.001, as is the standard error."""
    losses = {1e-3: (1.0, 1.0, 1.0), 1e-2: (None, 1.3, 1.2), 1e-1: (None, None, 1.3)}

    def runs(of_lr):
        return {s: dict(final=loss and [loss], diverged=None if loss else 1) for s, loss in enumerate(of_lr)}

    groups = [Group("uvit", "none", lr, runs(of_lr), {}) for lr, of_lr in losses.items()]
    found = stability(groups, "uvit", "none")
    assert found == (pytest.approx(10 ** (-3 + 1 / 3)), pytest.approx(10 ** (1 / 3)), False)
    assert show_stability(found) == "0.0022 ×/÷ 2.2"
    stable = stability(groups[:1], "uvit", "none")
    assert stable == (pytest.approx(1e-3), 1, True) and show_stability(stable) == "≥ 0.001"
    one = stability([replace(g, runs={0: g.runs[0]}) for g in groups], "uvit", "none")
    assert math.isnan(one[1]) and show_stability(one) == "0.001"
    two = [Group("uvit", "none", lr, runs((1.0, 1.0, loss)), {}) for lr, loss in ((1e-4, 1.0), (1e-3, 2.0))]
    assert show_stability(stability(two, "uvit", "none")) == "≥ 0.00046 ×/÷ 2.2"  # two are at the end
    assert stability([Group("uvit", "none", 1e-3, runs((None, 1.0)), {})], "uvit", "none") is None
    all_three = groups[0].runs
    apart = [Group("uvit", "none", lr, {seed: all_three[seed]}, {}) for seed, lr in enumerate((1e-3, 1e-2))]
    assert stability(apart, "uvit", "none") is None  # no seed has all learning rates
    assert show_stability(None) == "–"


# The command ------------------------------------------------------------------------------------------------


def test_a_tiny_comparison_goes_on(tmp_path, monkeypatch, capsys):
    options = replace(TINY, out=tmp_path / "whole")
    compare.main(options)
    lines = (options.out / "results.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    table = (options.out / "table.md").read_text()
    assert table.count("| U-ViT |") == table.count("| ADM |") == 2 and table in capsys.readouterr().out
    for name in ("effects", "losses", "sigmas", "features", "stages"):
        assert (options.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    again = replace(options, out=tmp_path / "again")
    again.out.mkdir()
    (again.out / "results.jsonl").write_bytes(lines[0] + lines[2] + lines[1][:77])  # as a kill may leave it
    trained = []
    train = compare.train_cell
    monkeypatch.setattr(compare, "train_cell", lambda cell, tick: trained.append(cell) or train(cell, tick))
    compare.main(again)
    assert len(trained) == 2
    assert (again.out / "results.jsonl").read_bytes() == lines[0] + lines[2] + lines[1] + lines[3]
    assert (again.out / "table.md").read_text() == table
    compare.main(again)
    assert len(trained) == 2


def test_a_cell_that_diverges_is_recorded(tmp_path, capsys):
    options = replace(TINY, networks=("uvit",), steps=6, warmup=0, lr=(1e-3, 1e12), out=tmp_path)
    compare.main(options)
    found = results.read(tmp_path / "results.jsonl")
    assert [result["diverged"] is None for result in found] == [True, True, False, False]
    assert all(1 < result["diverged"] <= 6 and result["final"] is None for result in found[2:])
    assert "diverged at step" in capsys.readouterr().err
    groups = group(results.find(found, compare.cells(options)))
    assert stability(groups, "uvit", "none")[::2] == (pytest.approx(1e-3), False)
    assert "| 0 of 1 | 0.001 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "stability.png").exists()


def test_other_runs_of_a_folder_are_left_alone(tmp_path):
    options = replace(TINY, networks=("uvit",), out=tmp_path)
    compare.main(replace(options, long_skips=("none",)))
    compare.main(replace(options, steps=5))
    found = results.read(tmp_path / "results.jsonl")
    assert [result["cell"]["steps"] for result in found] == [4, 5, 5]
    chosen = group(results.find(found, compare.cells(replace(options, steps=5))))
    assert [g.long_skip for g in chosen] == ["none", "constant:0.5"]
    change = 100 * (np.mean(found[2]["final"]) / np.mean(found[1]["final"]) - 1)
    assert chosen[1].paired(loss_change)[0] == pytest.approx(change)
    (tmp_path / "results.jsonl").write_text('{"cell": 3}\n')
    with pytest.raises(ValueError, match="line 1 is not a result"):
        compare.main(options)


COMMAND = [sys.executable, "compare.py", "--networks", "uvit", "--long-skips", "none", "learnable",
           "--steps", "20", "--batch-size", "8", "--seeds", "0", "1", "--jobs", "2", "--out"]
PIPED = dict(cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, text=True,
             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The lines of results.jsonl of `COMMAND`."""
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run([*COMMAND, str(folder)], check=True, **PIPED)
    return (folder / "results.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_and_started_again(number, uninterrupted, tmp_path):
    path = tmp_path / "results.jsonl"
    with subprocess.Popen([*COMMAND, str(tmp_path)], **PIPED) as process:
        while process.poll() is None and not path.exists():
            time.sleep(0.05)
        process.send_signal(number)
        errors = process.communicate()[1]
    assert process.returncode == (130 if number == signal.SIGINT else -number), errors
    first = path.read_bytes()
    assert 1 <= first.count(b"\n") < 4
    subprocess.run([*COMMAND, str(tmp_path)], check=True, **PIPED)
    assert path.read_bytes().startswith(first)  # what had ended is as it was
    assert sorted(path.read_text().splitlines()) == sorted(uninterrupted)


@pytest.mark.parametrize("change, sentence", [
    (dict(long_skips=("constant",)), "constant needs a kappa"),
    (dict(long_skips=("constant:x",)), "'x' is not a number"),
    (dict(long_skips=("constant:2",)), "kappa is 2.0: it must be in"),
    (dict(long_skips=("none:1",)), "only constant takes a kappa"),
    (dict(long_skips=("scaled",)), "'scaled' is unknown"),
    (dict(long_skips=("none", "none")), "one is there twice"),
    (dict(seeds=()), "seeds is empty"), (dict(seeds=(-1,)), "seeds has -1"),
    (dict(lr=(0.0,)), "lr has 0.0"), (dict(steps=0), "steps is 0"), (dict(jobs=-1), "jobs is -1"),
])
def test_impossible_options(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        compare.Options(**change)


def test_parameters_that_cannot_match():
    with pytest.raises(ValueError, match="images are"):
        match("uvit", 4, 300_000, (1, 8, 4))


# Theory -----------------------------------------------------------------------------------------------------


def test_features_of_identity_blocks():
    """All matrices 1 and x >= 0: every block is the identity, so h_i = (1 + sum_{j >= i} kappa_j) x."""
    N, m, kappas = 3, 5, [0.5, 2.0, 0.25]
    one = torch.eye(m, dtype=torch.float64).expand(2, m, m)
    x = torch.rand(m, dtype=torch.float64)
    for end in ("unit", "linear", "relu"):
        features, output = forward(Blocks([one] * N, [one] * N, one, end), kappas, x)
        for h, total in zip(features, (3.75, 3.25, 1.25), strict=True):
            torch.testing.assert_close(h, total * x)
        torch.testing.assert_close(output, features[0])


def test_without_skips_a_network_is_its_blocks_in_a_row():
    """kappa = 0: output and gain are those of b_1 .. b_N f_N a_N .. a_1."""
    blocks = draw_blocks(2, 16, 2, "relu", 0)
    x = torch.randn(16, dtype=torch.float64)
    expected = x
    for block in (*blocks.a, blocks.middle, *reversed(blocks.b)):
        for W in block:
            expected = (W @ expected).relu()
    torch.testing.assert_close(forward(blocks, [0.0, 0.0], x)[1], expected)


def test_unit_blocks_keep_lengths():
    """Theorem 3.1 with c1 = c2 / |x|^2 = 1, in expectation: the blocks are independent and symmetric."""
    kappas = [1.0, 0.5]
    drawn = [draw_blocks(2, 256, 2, "unit", seed) for seed in range(40)]
    each = [measure(blocks, kappas, seed)["features"] for seed, blocks in enumerate(drawn)]
    expected = predict(kappas, 1.0, 1.0)
    assert expected["features"] == [2.25, 1.25] and expected["gradients"] == [2.25]
    assert expected["robustness"] == [1 + 0.5 + 1]
    np.testing.assert_allclose(np.mean(each, axis=0), expected["features"], rtol=0.15)


def test_agreement():
    """measured = 3 predicted^2 at 1/2, 1, 2: a geometric mean of 3, an exponent of 2."""
    predicted = np.array([0.5, 1, 2])
    assert agreement(predicted, 3 * predicted**2) == pytest.approx((3, 0.5, 2, 2, 1))
    assert agreement(predicted, predicted, 2.0)[:3] == pytest.approx((2, 0.5, 0.5))


def test_the_theory_command(tmp_path, capsys):
    options = TheoryOptions((1, 2), ("none", "constant:0.5"), width=32, networks=2, out=tmp_path)
    compare.main(options)
    assert capsys.readouterr().out.count("\n") == 1 + 9 + 1
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
    points = check(options, "unit")
    assert points["features"].shape == (3, 2 * (1 + 2)) and points["robustness"].shape == (3, 4)


@pytest.mark.parametrize("change, sentence", [
    (dict(depths=(0,)), "depths are"), (dict(long_skips=("learnable",)), "constants only"),
    (dict(ends=()), "ends is empty"), (dict(width=0), "width is 0"),
])
def test_impossible_theory(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        TheoryOptions(**change)
