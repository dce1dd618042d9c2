"""posthoc_ema.reconstruct: EDM2's Algorithm 3, arXiv:2312.02696v2, on files."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import MATH
from safetensors.torch import save_file
from torch import nn

import posthoc_ema.reconstruct
import posthoc_ema.snapshots
from posthoc_ema.ema import PowerFunctionEMA, power_function_inner, solve_posthoc_coefficients
from posthoc_ema.plan import make_plan, profile_errors
from posthoc_ema.reconstruct import Options, main, parse_lengths, reconstruct, weighted_sums
from posthoc_ema.snapshots import (
    blocks,
    layout,
    list_snapshots,
    mapped,
    mapped_blocks,
    read_header,
    read_snapshot,
    save_snapshot,
    save_snapshots,
    snapshot_path,
    unpacked,
)
from shared.run import cli

HEADER = {"network": "test", "config": {"width": 7, "long_skip": {"kind": "none"}}, "objective": "edm"}


def train(folder, times=range(100, 1601, 100), lengths=(), save=save_snapshots, **options):
    """A random walk with a buffer, its snapshots in `folder`; averages of `lengths` tracked beside."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    nn.init.normal_(net[0].weight, std=2.0)
    ema, direct = PowerFunctionEMA(net), PowerFunctionEMA(net, lengths)
    for t in range(5, max(times) + 1, 5):
        with torch.no_grad():
            for p in net.parameters():
                p += 0.02 * torch.randn_like(p)
            net[1].running_var += 0.001 * t % 0.01
            net[1].num_batches_tracked += 1
        ema.update(t)
        direct.update(t)
        if t in times:
            save(folder, ema, HEADER, **options)
    return net, direct


def run(*arguments):
    """(exit status, stdout, stderr) of the command."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["reconstruct.py", *map(str, arguments)])
        try:
            cli(main, Options, "A command.")
            status = 0
        except SystemExit as end:
            status = end.code
    return status, stdout.getvalue(), stderr.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# What it computes -------------------------------------------------------------------------------------------


def test_golden_algorithm_3(tmp_path):
    trajectory, golden = MATH["ema_trajectory"], MATH["reconstruct"]
    for k, averages in enumerate(trajectory["snapshots"], start=1):
        for sigma_rel, theta in zip(trajectory["stds"], averages, strict=True):
            nimg = k * trajectory["every"] * trajectory["batch"]
            header = HEADER | {"nimg": nimg, "sigma_rel": sigma_rel}
            save_snapshot(snapshot_path(tmp_path, nimg, sigma_rel), {"theta": torch.tensor(theta)}, header)
    outputs = reconstruct(tmp_path, golden["target_std"], dtype=torch.float64)
    np.testing.assert_allclose([weights["theta"] for weights, _ in outputs], golden["values"], rtol=1e-9)
    tracked = np.array(golden["tracked_directly"])
    error = np.linalg.norm(np.array([weights["theta"] for weights, _ in outputs]) - tracked)
    assert error / np.linalg.norm(tracked) < 0.01


def test_close_to_an_average_that_was_tracked(tmp_path):
    _, direct = train(tmp_path, lengths=[0.07, 0.15])
    for weights, header in reconstruct(tmp_path, direct.lengths):
        tracked = direct.weights(header["sigma_rel"])
        assert weights.keys() == tracked.keys()
        for name, weight in weights.items():
            assert (weight - tracked[name]).float().norm() <= 0.01 * tracked[name].float().norm(), name


def test_numpy_oracle(tmp_path):
    train(tmp_path)
    snapshots = list_snapshots(tmp_path)
    t, sigma_rel = np.array([(s.nimg, s.sigma_rel) for s in snapshots]).T
    for nimg in (1600, 700):
        x = solve_posthoc_coefficients(t, sigma_rel, nimg, [0.03, 0.2])
        outputs = reconstruct(tmp_path, [0.03, 0.2], nimg)
        exact = reconstruct(tmp_path, [0.03, 0.2], nimg, torch.float64)
        for m in range(2):
            for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
                values = np.stack([read_snapshot(s.path)[0][name].double().numpy() for s in snapshots])
                expected = np.tensordot(x[:, m], values, 1)
                np.testing.assert_allclose(exact[m][0][name], expected, rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(outputs[m][0][name], expected, rtol=1e-5, atol=1e-6)
                assert outputs[m][0][name].dtype == torch.float32


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_buffers_are_the_targets_own(tmp_path, precision):
    net, _ = train(tmp_path, precision=precision)
    (weights, _), (other, _) = reconstruct(tmp_path, [0.02, 0.2])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(weights[name], net.state_dict()[name], rtol=2**-9, atol=0)
        assert torch.equal(other[name], weights[name])
    weights["1.running_var"] += 1
    torch.testing.assert_close(other["1.running_var"], net[1].running_var, rtol=2**-9, atol=0)  # not shared
    nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).load_state_dict(weights)


def test_a_constant_weight_reconstructs_to_itself(tmp_path):
    for t in range(10, 81, 10):  # one length, so that nothing tells constants from averages
        header = HEADER | {"nimg": t, "sigma_rel": 0.05}
        save_snapshot(snapshot_path(tmp_path, t, 0.05), {"w": torch.full((3,), 7.0)}, header)
    for weights, _ in reconstruct(tmp_path, [0.03, 0.05, 0.2]):
        torch.testing.assert_close(weights["w"], torch.full((3,), 7.0), rtol=1e-6, atol=0)


def test_a_tracked_length_is_its_snapshot(tmp_path):
    train(tmp_path)
    [(weights, _)] = reconstruct(tmp_path, [0.10], 900)
    for name, tracked in read_snapshot(snapshot_path(tmp_path, 900, 0.10))[0].items():
        torch.testing.assert_close(weights[name], tracked, rtol=1e-5, atol=1e-6)


def test_profile_errors_eq_151(tmp_path):
    """Their L2 norm has a closed form in the inner products; the quadrature gives L1 too."""
    t, sigma_rel = np.repeat(np.arange(1, 9), 2) * 1000.0, np.tile([0.05, 0.10], 8)
    targets = np.array([0.02, 0.05, 0.075, 0.2])
    x = solve_posthoc_coefficients(t, sigma_rel, 8000, targets)
    L1, L2 = profile_errors(t, sigma_rel, x, 8000, targets)
    A = power_function_inner(t[:, None], sigma_rel[:, None], t, sigma_rel)
    b = power_function_inner(t[:, None], sigma_rel[:, None], 8000, targets)
    norm = power_function_inner(8000, targets, 8000, targets)
    squared = ((x * (A @ x)).sum(0) - 2 * (x * b).sum(0) + norm) / norm
    np.testing.assert_allclose(L2**2, squared, rtol=1e-6, atol=1e-12)
    assert L2[1] < 1e-12 and L1[1] < 1e-12 and (L1[[0, 2, 3]] > 0.01).all()


def test_a_folder_of_state_dicts(tmp_path):
    def save_pt(folder, ema, header):
        for sigma_rel in ema.lengths:
            torch.save(ema.weights(sigma_rel), folder / f"my-net-{ema.t}-{sigma_rel:.3f}.pt")

    (tmp_path / "pt").mkdir()
    train(tmp_path / "pt", save=save_pt)
    train(tmp_path / "snapshots")
    [(theirs, header)], [(ours, _)] = (reconstruct(tmp_path / name, [0.07]) for name in ("pt", ""))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert run(tmp_path / "pt", "--sigma-rel", 0.07)[0] == 0
    written, header = read_snapshot(tmp_path / "pt" / "reconstructed" / "000001600-0.070.safetensors")
    assert header["nimg"] == 1600 and all(torch.equal(written[name], ours[name]) for name in ours)


# Streaming --------------------------------------------------------------------------------------------------


def test_each_file_is_read_once(tmp_path, monkeypatch):
    """Files laid out alike as a whole, others tensor by tensor; the target's own are looked at before."""
    train(tmp_path)
    read = {"mapped": [], "mapped_blocks": []}

    def watch(name):
        function = getattr(posthoc_ema.snapshots, name)
        watched = lambda path, *parts: read[name].append(path) or function(path, *parts)
        monkeypatch.setattr(posthoc_ema.reconstruct, name, watched)

    watch("mapped")
    watch("mapped_blocks")
    paths = sorted(path for path in tmp_path.iterdir() if int(path.name[:9]) <= 1200)
    first = reconstruct(tmp_path, [0.02, 0.07, 0.15, 0.2], 1200)
    assert sorted(read.pop("mapped_blocks")) == paths and sorted(read["mapped"]) == paths[-2:]
    read |= {"mapped": [], "mapped_blocks": []}
    weights, header = read_snapshot(paths[0])
    save_snapshot(paths[0], weights, header, "bfloat16")
    second = reconstruct(tmp_path, [0.02, 0.07, 0.15, 0.2], 1200)
    assert sorted(read["mapped"]) == paths and not read["mapped_blocks"]
    for (tensors, _), (others, _) in zip(first, second, strict=True):
        assert tensors.keys() == others.keys()
        for name, value in tensors.items():  # of which bfloat16 rounds the earliest, least share
            torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-4)


def test_sums_in_chunks(tmp_path, monkeypatch):
    """Wherever chunks end, and however many lengths there are: no bit differs."""
    train(tmp_path)
    lengths = [0.02, 0.05, 0.07, 0.12, 0.15, 0.2]
    expected = reconstruct(tmp_path, lengths)
    for chunk in (24, 30, 1 << 20):
        monkeypatch.setattr(posthoc_ema.reconstruct, "CHUNK", chunk)
        outputs = [reconstruct(tmp_path, [length])[0] for length in lengths], reconstruct(tmp_path, lengths)
        for found in outputs:
            for (tensors, _), (others, _) in zip(found, expected, strict=True):
                assert all(torch.equal(tensors[name], value) for name, value in others.items())


def test_one_length_holds_no_other(tmp_path):
    train(tmp_path)
    [(weights, _), *_] = reconstruct(tmp_path, [0.02, 0.07, 0.2])
    size = sum(value.nbytes for value in weights.values())
    assert max(value.untyped_storage().nbytes() for value in weights.values()) <= size


def test_files_whose_data_begin_anywhere(tmp_path):
    """The format lets a header be of any length, ours are multiples of 8 bytes."""
    train(tmp_path, precision="float16")
    [(expected, _)] = reconstruct(tmp_path, [0.07])
    for path in tmp_path.iterdir():
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes((end - 7).to_bytes(8, "little") + data[8:end] + b" " + data[end:])
    [(tensors, _)] = reconstruct(tmp_path, [0.07])
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


MEASURE = """
import re, sys
from pathlib import Path
from posthoc_ema.plan import make_plan
from posthoc_ema.reconstruct import weighted_sums
def resident(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
plan = make_plan(Path(sys.argv[1]), [0.07, 0.15])
before = resident("VmRSS")
sums = weighted_sums(plan.snapshots, plan.x)
print(len(plan.snapshots), resident("VmHWM") - before)
"""


def test_a_layout_is_that_of_the_tensors(tmp_path):
    weights = {
        "half": torch.ones(2, 3).half(), "brain": torch.ones(4).bfloat16(), "full": torch.ones(1, 2, 1),
        "count": torch.tensor(7), "mask": torch.tensor([True]), "none": torch.zeros(0, 5),
    }  # fmt: skip
    save_file(weights, file := tmp_path / "1-0.050.safetensors")
    torch.save(weights, pt := tmp_path / "1-0.050.pt")
    found = mapped_blocks(file, blocks(layout(file)))
    assert sum(len(block) for block in found) == 6 + 4 + 2 + 1 + 1
    tensors = {}
    for block, values in zip(blocks(layout(file)), found, strict=True):
        tensors |= unpacked(block, values)
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], value) for name, value in weights.items())
    assert all(tensors[name].dtype == value.dtype for name, value in weights.items())
    for path in (file, pt):
        expected = {name: (value.dtype, tuple(value.shape)) for name, value in weights.items()}
        assert layout(path) == expected
        assert {name: (value.dtype, tuple(value.shape)) for name, value in mapped(path).items()} == expected
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(ValueError, match=f"{path.name} is missing, truncated or not a file of weights"):
            layout(path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_outputs(tmp_path):
    """32 snapshots of 8 MiB, two outputs: four files at a time are mapped."""
    for nimg in range(1, 17):
        for sigma_rel in (0.05, 0.10):
            weights = {f"w{k}": torch.full((1 << 18,), nimg + sigma_rel) for k in range(8)}
            header = HEADER | {"nimg": nimg, "sigma_rel": sigma_rel}
            save_snapshot(snapshot_path(tmp_path, nimg, sigma_rel), weights, header)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
    )
    count, peak = map(int, result.stdout.split())
    assert count == 32 and 2 * 2**23 < peak < (2 + 4 + 2) * 2**23  # outputs, files, and some to spare


# The command ------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    train(tmp_path / "snapshots")
    status, stdout, stderr = run(tmp_path, "--sigma-rel", 0.03, "0.1:0.2:0.05", "--nimg", 1200)
    assert status == 0, stderr
    out = tmp_path / "reconstructed"
    assert [path.name[10:15] for path in sorted(out.iterdir())] == ["0.030", "0.100", "0.150", "0.200"]
    assert "24 snapshots of sigma_rel 0.05, 0.1, up to 1200 images" in stdout and "condition number" in stdout
    assert re.search(r"0\.030 +\d+\.\d+% +\d+\.\d+% +\d+\.\d+% +\d+\.\d+%", stdout)
    weights, header = read_snapshot(out / "000001200-0.150.safetensors")
    [(expected, _)] = reconstruct(tmp_path, [0.15], 1200)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert header | HEADER | {"nimg": 1200, "sigma_rel": 0.15} == header
    assert len(header["reconstructed"]) == 24 and sum(header["coefficients"]) == pytest.approx(1)
    assert "reconstructed" not in read_header(snapshot_path(tmp_path / "snapshots", 1200, 0.1))


def test_half_precision_output(tmp_path):
    train(tmp_path / "snapshots")
    assert run(tmp_path, "--sigma-rel", 0.07)[0] == 0
    full = read_snapshot(tmp_path / "reconstructed" / "000001600-0.070.safetensors")[0]
    assert run(tmp_path, "--sigma-rel", 0.07, "--precision", "float16")[0] == 0
    half = read_snapshot(tmp_path / "reconstructed" / "000001600-0.070.safetensors")[0]
    assert torch.equal(half["0.weight"], full["0.weight"].half().float())


def test_outputs_that_are_there_are_left(tmp_path):
    train(tmp_path / "snapshots")
    out = tmp_path / "reconstructed"
    run(tmp_path, "--sigma-rel", 0.03, 0.15)
    first = contents(out)
    stamps = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    truncated = out / "000001600-0.150.safetensors"
    truncated.write_bytes(first[truncated.name][:-100])
    status, stdout, _ = run(tmp_path, "--sigma-rel", 0.03, 0.15, 0.2)
    assert status == 0 and stdout.count("was there already") == 1
    again = contents(out)
    assert again.keys() - first.keys() == {"000001600-0.200.safetensors"}
    assert all(again[name] == first[name] for name in first)  # also the one that was made again with another
    assert (out / "000001600-0.030.safetensors").stat().st_mtime_ns == stamps["000001600-0.030.safetensors"]
    snapshot_path(tmp_path / "snapshots", 100, 0.05).unlink()  # other snapshots, another sum
    assert "was there already" not in run(tmp_path, "--sigma-rel", 0.03)[1]


def test_tracked_snapshots_are_never_written_over_nor_mixed_with_reconstructions(tmp_path):
    train(tmp_path)
    before = contents(tmp_path)
    for _ in range(2):
        status, stdout, _ = run(tmp_path, "--sigma-rel", 0.05, 0.07, "--out", tmp_path)
        assert status == 0 and "000001600-0.050.safetensors was there already" in stdout
    after = contents(tmp_path)
    assert after.keys() - before.keys() == {"000001600-0.070.safetensors"}
    assert all(after[name] == before[name] for name in before)
    assert len(list_snapshots(tmp_path)) == len(before)


def test_a_killed_command_leaves_whole_files_and_goes_on(tmp_path, monkeypatch):
    train(tmp_path / "snapshots")
    run(tmp_path, "--sigma-rel", 0.03, 0.15, "--out", tmp_path / "whole")
    calls = []

    def killed(tensors, file, metadata):
        calls.append(file)
        save_file(tensors, file, metadata)
        if len(calls) == 2:
            Path(file).write_bytes(Path(file).read_bytes()[:500])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(posthoc_ema.snapshots, "save_file", killed)
        status, _, stderr = run(tmp_path, "--sigma-rel", 0.03, 0.15, "--out", tmp_path / "out")
    assert status == 130 and stderr.endswith("interrupted\n")
    assert [path.name for path in (tmp_path / "out").glob("[!.]*")] == ["000001600-0.030.safetensors"]
    status, stdout, _ = run(tmp_path, "--sigma-rel", 0.03, 0.15, "--out", tmp_path / "out")
    assert status == 0 and stdout.count("was there already") == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("words, lengths", [
    (["0.02"], [0.02]), (["0.15", "0.02", "0.15"], [0.02, 0.15]), (["0.1:0.1:0.05"], [0.1]),
    (["0.01:0.25:0.08"], [0.01, 0.09, 0.17, 0.25]), (["0.1:0.2:0.05", "0.15"], [0.1, 0.15, 0.2]),
])
def test_lengths(words, lengths):
    assert parse_lengths(words) == lengths
    assert len(parse_lengths(["0.010:0.250:0.005"])) == 49


@pytest.mark.parametrize("words, sentence", [
    (["x"], "--sigma-rel x is neither a number nor first:last:step"), (["0.1:0.2"], "neither"),
    (["0.1:0.2:0.03:0.1"], "neither"), (["0.1:0.2:0"], "neither"), (["nan"], "neither"),
    (["0.1:0.2:0.03"], "no whole number of steps"), (["0.2:0.1:0.05"], "no whole number"),
    (["0.2:0.1:-0.05"], "no whole number"), (["0.3"], r"must be in \(0, 0\.288675\)"),
    (["0:0.2:0.1"], "must be in"), (["0.0501", "0.0502"], "three decimals"),
])
def test_other_lengths_are_refused(words, sentence, tmp_path):
    train(tmp_path / "snapshots")
    status, _, stderr = run(tmp_path, "--sigma-rel", *words)
    assert status == 2 and stderr.count("\n") == 1, stderr
    assert re.search(sentence, stderr) and not (tmp_path / "reconstructed").exists()


# What is said beforehand ------------------------------------------------------------------------------------


def test_warnings(tmp_path):
    train(tmp_path, times=range(25, 1601, 25))
    assert make_plan(tmp_path, [0.03, 0.05, 0.15]).warnings() == []
    assert run(tmp_path, "--sigma-rel", 0.07)[2] == ""
    said = "\n".join(make_plan(tmp_path, [0.01, 0.28]).warnings())
    assert "sigma_rel 0.01 is shorter than the snapshots support: its profile is 6% off" in said
    assert "sigma_rel 0.28 is longer than the snapshots support: its profile is 8% off" in said
    assert "sigma_rel 0.01: float16 snapshots would add an error of 1.4%" in said
    assert run(tmp_path, "--sigma-rel", 0.01)[2].startswith("warning: sigma_rel 0.01 is shorter")


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_rounding_of_half_precision_is_foreseen(tmp_path, precision):
    times = range(25, 1601, 25)
    train(tmp_path / "half", times=times, precision=precision)
    train(tmp_path / "full", times=times)
    plan = make_plan(tmp_path / "half", [0.01])
    assert any(f"sigma_rel 0.01: {precision} snapshots add" in sentence for sentence in plan.warnings())
    (half, _), (full, _) = (reconstruct(tmp_path / name, [0.01])[0] for name in ("half", "full"))
    error = (half["0.weight"] - full["0.weight"]).norm() / full["0.weight"].norm()
    assert 0.5 < error / plan.rounding(precision)[0] < 2


def test_missing_and_foreign_names_are_said(tmp_path):
    train(tmp_path)
    snapshot_path(tmp_path, 700, 0.05).unlink()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".000000700-0.050.safetensors.part").touch()
    assert make_plan(tmp_path, [0.07]).warnings() == [
        "snapshots are missing: 000000700-0.050", "not named as snapshots, and left out: notes.txt",
    ]


# Bad files --------------------------------------------------------------------------------------------------


def truncate(folder):
    path = snapshot_path(folder, 30, 0.05)
    path.write_bytes(path.read_bytes()[:-10])


def truncate_pt(folder):
    torch.save({"w": torch.zeros(1000)}, folder / "x-50-0.050.pt")
    (folder / "x-50-0.050.pt").write_bytes((folder / "x-50-0.050.pt").read_bytes()[:-1500])


def execute(folder):
    torch.save({"w": Path("x")}, folder / "x-50-0.050.pt")


def duplicate(folder):
    (folder / "copy-30-0.050.safetensors").write_bytes(snapshot_path(folder, 30, 0.05).read_bytes())


def rewrite(folder, change_weights=lambda weights: None, **change_header):
    path = snapshot_path(folder, 30, 0.05)
    weights, header = read_snapshot(path)
    change_weights(weights)
    save_snapshot(path, weights, header | change_header)


def foreign(folder):
    save_file({"w": torch.zeros(3)}, snapshot_path(folder, 30, 0.05))


def reshape(folder):
    rewrite(folder, lambda weights: weights.update({"0.bias": torch.zeros(6)}))


def extend(folder):
    rewrite(folder, lambda weights: weights.update(extra=torch.zeros(1)))


def omit(folder):
    rewrite(folder, lambda weights: weights.pop("0.bias"))


PT = "x-50-0.050.pt"
FILE = r"000000030-0\.050\.safetensors"
MISFIT = rf"{FILE} does not fit 000000040-0\.100\.safetensors: "


@pytest.mark.parametrize("spoil, sentence", [
    (truncate, f"{FILE} is truncated"), (foreign, f"{FILE} is not a snapshot: its header has no network"),
    (duplicate, rf"copy-30-0\.050\.safetensors and {FILE} are both the snapshot 30-0\.05"),
    (truncate_pt, f"{PT} is missing, truncated or not a file of weights"), (execute, f"{PT} is missing"),
    (lambda folder: (folder / PT).write_text("?"), f"{PT} is missing, truncated"),
    (lambda folder: torch.save({"n": 3}, folder / PT), f"{PT} is not a state dict"),
    (lambda folder: (folder / "x-50-0.500.pt").touch(), r"x-50-0\.500\.pt is no power-function EMA.* 0\.5"),
    (lambda folder: rewrite(folder, nimg="soon"), f"{FILE} is no power-function EMA: of time 'soon'"),
    (lambda folder: rewrite(folder, config={}), f"{MISFIT}its config differs"),
    (lambda folder: rewrite(folder, network="adm_unet"), f"{MISFIT}its network differs"),
    (lambda folder: rewrite(folder, objective="vp"), f"{MISFIT}its objective differs"),
    (omit, rf"{MISFIT}0\.bias is missing"), (extend, f"{MISFIT}extra is not of this network"),
    (reshape, rf"{MISFIT}0\.bias has shape \(6,\), not \(5,\)"),
])
def test_bad_files_are_named(spoil, sentence, tmp_path):
    train(tmp_path / "snapshots", times=[10, 20, 30, 40])
    spoil(tmp_path / "snapshots")
    status, stdout, stderr = run(tmp_path, "--sigma-rel", 0.07)
    assert status == 2 and re.search(sentence, stderr) and stderr.count("\n") == 1, stderr
    assert stdout == "" and not (tmp_path / "reconstructed").exists()


def test_a_folder_without_snapshots(tmp_path):
    for folder, sentence in [(tmp_path / "nowhere", "is not a folder"), (tmp_path, "has no snapshots")]:
        status, _, stderr = run(folder, "--sigma-rel", 0.07)
        assert status == 2 and sentence in stderr and stderr.count("\n") == 1


def test_a_time_without_snapshot_and_an_output_that_is_no_folder(tmp_path):
    train(tmp_path, times=[10, 20, 30])
    (tmp_path / "file").touch()
    status, _, stderr = run(tmp_path, "--sigma-rel", 0.07, "--out", tmp_path / "file")
    assert status == 2 and stderr.endswith("file is not a folder\n") and stderr.count("\n") == 1
    status, _, stderr = run(tmp_path, "--sigma-rel", 0.07, "--nimg", 24)
    assert status == 2 and "is of time 24: the nearest is of 20" in stderr and stderr.count("\n") == 1


def test_headers_are_one_json_object(tmp_path):
    train(tmp_path, times=[10, 20])
    plan = make_plan(tmp_path, [0.07])
    assert json.loads(json.dumps(plan.header(0))) == plan.header(0)
    assert len(weighted_sums(plan.snapshots, plan.x)) == 1
