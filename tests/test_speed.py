"""The speed benchmark's command, tiny; its times are nobody's business here."""

import re
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from test_house import run_cli

import benchmarks.data
from benchmarks.speed import (
    CONFIGS,
    OURS,
    POINTWISE,
    PRODUCTS,
    Options,
    build_ours,
    count_flops,
    main,
    measure_memory,
    profiled,
    share,
)

DIGITS = ["--sizes", "digits", "--batch-size", "2", "--pairs", "1", "--device", "cpu"]


def test_a_tiny_run(capsys):
    few = dict(batch_size=2, pairs=1, memory=False, profile=True, device="cpu")
    main(Options(("uvit", "edm2"), ("digits",), ("train", "evaluate"), **few))
    head, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert re.search(r"threads, torch .*, batch 2, eager, 1 rounds", head)
    for row, name in zip(rows, ("uvit", "uvit", "edm2", "edm2"), strict=True):
        assert row.count("|") == columns.count("|") and row.startswith(f"| {name} | digits | ")
        assert all(float(cell) > 0 for cell in row.split("|")[6:9])
        shares = [float(text.split()[-1]) for text in row.split("|")[10].split(",")]
        assert len(shares) == 8 and shares == sorted(shares, reverse=True) and 20 < sum(shares) <= 100


def test_shares_of_operations():
    profile = dict(mm=0.1, mkldnn_convolution=0.2, native_layer_norm_backward=0.05, gelu=0.1, mm_add=0.5)
    assert share(profile, PRODUCTS) == pytest.approx(0.3)
    assert share(profile, POINTWISE) == pytest.approx(0.45)
    a = torch.ones(256, 256)
    found = profiled(lambda: a @ a @ a, torch.device("cpu"))
    assert 0.5 < found["mm"] <= sum(found.values()) == pytest.approx(1) and next(iter(found)) == "mm"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_memory_has_the_weights_and_more():
    options, config = Options(batch_size=4, device="cpu"), CONFIGS["uvit", "small"]
    with get_context("spawn").Pool(1) as pool:  # as the command does: this process has had more before
        peak, rest = pool.apply(measure_memory, (options, "uvit", "train", config, None))
    assert peak - rest == pytest.approx(5 * 4 * 7.73, rel=0.01) and peak > 5 * 4 * 7.73


def test_the_data_benchmark_reads_all_kinds(capsys):
    options = benchmarks.data.Options(images=20, batch_size=2, steps=1, width=16, device="cpu")
    benchmarks.data.main(options)
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split(" | ")[0] for row in rows] == ["| folder", "| zip", "| npz"]
    assert all(0 <= float(row.split(" | ")[3].removesuffix("%")) <= 100 for row in rows)


@pytest.mark.parametrize("arguments, sentence", [
    (["--released", "{tmp}"], "has none of libs/uvit.py, guided_diffusion/unet.py, training/networks"),
    (["--pairs", "0"], "batch_size and pairs must be at least 1"),
    (["--sizes", "large"], "invalid choice"),
])
def test_bad_input_is_one_line(arguments, sentence, monkeypatch, tmp_path: Path):
    arguments = [word.format(tmp=tmp_path) for word in arguments]
    code, _, stderr = run_cli(monkeypatch, "speed.py", main, Options, *DIGITS, *arguments)
    assert code == 2 and sentence in stderr and stderr.count("\n") == 1, stderr


@pytest.mark.parametrize("name", OURS)
def test_recomputation_is_no_work(name):
    """The backward pass is two products for each of the forward one's, but for the gradient of images."""
    config = CONFIGS[name, "small"]
    assert 2.9 < count_flops(name, "train", config, 1) / count_flops(name, "evaluate", config, 1) <= 3


@pytest.mark.parametrize("name", OURS)
def test_digits_are_the_presets(name):
    official, _ = OURS[name]
    package = __import__(official.__name__.replace("official", "model"), fromlist=["PRESETS"])
    with torch.device("meta"):
        count = sum(p.numel() for p in build_ours(name, CONFIGS[name, "digits"]).parameters())
        preset = getattr(package, {"uvit": "UViT", "adm": "build", "edm2": "Denoiser"}[name])
        assert count == sum(p.numel() for p in preset(package.PRESETS["digits"]).parameters())


def test_flops_of_a_vision_transformer():
    """2 FLOPs a weight and token, and two products of L x L x D in attention: counted by hand."""
    D, L, depth, p = 256, 65, 8, 4 * 4 * 3
    blocks = (depth + 1) * (2 * L * 12 * D * D + 4 * L * L * D) + depth // 2 * 2 * L * 2 * D * D
    ends = 2 * 64 * p * D + 2 * L * p * D + 2 * 32 * 32 * 9 * 3 * 3
    assert count_flops("uvit", "evaluate", CONFIGS["uvit", "small"], 3) == 3 * (blocks + ends)
    with_guide = count_flops("uvit", "sample", CONFIGS["uvit", "small"] | dict(num_classes=11), 1)
    one_token = (depth + 1) * (2 * 12 * D * D + 4 * (2 * L + 1) * D) + depth // 2 * 4 * D * D + 2 * p * D
    assert with_guide == 70 * (blocks + ends + one_token)
