"""posthoc_ema.sweep on a run of a tiny U-ViT; and in sample.py, lengths that the run has not tracked."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import posthoc_ema.sweep
from minimal_uvit.sample import load
from minimal_uvit.train import PRESETS, train
from posthoc_ema.reconstruct import read_average, reconstruct
from posthoc_ema.snapshots import read_snapshot, snapshot_path
from posthoc_ema.sweep import Options, frechet_distance, sweep


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, digits = tmp_path_factory.mktemp("run"), PRESETS["digits"]
    net = replace(digits.net, width=16, depth=2, num_heads=2)
    often = replace(digits.run, out=folder, duration=320, log_every=160, sample_every=320, snapshot_every=32,
                    checkpoint_every=320, workers=0, device="cpu")  # fmt: skip
    train(replace(digits, net=net, run=often, batch_size=16, warmup=0))
    return folder


def test_frechet_distance_closed_form():
    """Gaussians with the same eigenvectors: |mu_a - mu_b|^2 + sum (s_a - s_b)^2 of their deviations."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3))
    x = (x - x.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T  # covariance 1
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    a, b = x * [1, 2, 3] @ turn, x * [2, 2, 0.5] @ turn + [1, 0, -2]
    assert frechet_distance(a, b) == pytest.approx(5 + 1 + 0 + 2.5**2, rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    flat = a * [1, 1, 0]  # a singular covariance
    assert frechet_distance(flat, flat) == pytest.approx(0, abs=1e-6)


def test_a_length_that_was_not_tracked(run):
    D, header = load(run, 0.07)
    [(weights, expected)] = reconstruct(run, [0.07])
    assert header == expected and header["sigma_rel"] == 0.07 and header["nimg"] == 320
    for name, value in D.net.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_tracked_length_is_read_as_it_is(run):
    for sigma_rel, file in [(None, 0.05), (0.05, 0.05), (0.10, 0.10)]:
        weights, header = read_average(run, sigma_rel)
        expected, _ = read_snapshot(snapshot_path(run / "snapshots", 320, file))
        assert "reconstructed" not in header
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    path = snapshot_path(run / "snapshots", 160, 0.10)
    assert read_average(path)[1]["nimg"] == 160
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.288675\)"):
        load(run, 0.4)


def test_the_sweep(run, tmp_path, capsys):
    lengths, few = ("0.05", "0.08:0.16:0.04"), dict(samples=30, steps=2, batch_size=12, at_once=3)
    sweep(Options(run, lengths, out=tmp_path, **few))
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["sigma_rel"] for row in rows] == [0.05, 0.08, 0.12, 0.16]
    assert all(len(row["validation"]) == 9 and row["frechet"] > 0 for row in rows)
    assert rows[0]["profile_error"] < 1e-9 < rows[1]["profile_error"]
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "table.md").read_text() and printed.count("\n") == 6
    for column in zip(*(line.split(" | ")[2:] for line in printed.splitlines()[2:]), strict=True):
        assert sum("**" in cell for cell in column) == 1
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_sweep_goes_on(run, tmp_path, monkeypatch):
    options = Options(run, ("0.03:0.15:0.03",), at_once=2, out=tmp_path / "whole")
    sweep(options)
    measured, validate = [], posthoc_ema.sweep.validate

    def killed(*arguments):
        measured.append(arguments)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return validate(*arguments)

    monkeypatch.setattr(posthoc_ema.sweep, "validate", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(replace(options, out=tmp_path / "again"))
    sweep(replace(options, out=tmp_path / "again"))
    assert len(measured) == 4 + 2  # five lengths, one of them begun twice
    files = [(tmp_path / name / "sweep.json").read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1]
    sweep(replace(options, out=tmp_path / "again", nimg=160))  # another sweep: nothing of the last is kept
    assert len(measured) == 6 + 5


@pytest.mark.parametrize("change, sentence", [
    (dict(steps=0), "steps is 0"), (dict(at_once=0), "at_once is 0"), (dict(samples=-1), "samples is -1"),
])  # fmt: skip
def test_impossible_options(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Options(**change)


def test_a_folder_that_is_no_run(run, tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: its config\.json is missing"):
        sweep(Options(tmp_path))
    with pytest.raises(ValueError, match="holds no run"):
        sweep(Options(run / "snapshots"))
