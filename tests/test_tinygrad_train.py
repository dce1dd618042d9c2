"""train_tinygrad.py beside train.py: the same losses from the same weights, one format of files, resuming."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from tinygrad_cases import Context, copy_weights, error

import minimal_uvit.train as torch_train
import minimal_uvit.train_tinygrad as tinygrad_train
from minimal_uvit.model import UViT
from minimal_uvit.model_tinygrad import UViT as TinygradUViT
from minimal_uvit.sample import SampleConfig, draw, load
from posthoc_ema.snapshots import read_snapshot
from shared.long_skip import LongSkipConfig

STEPS, B = 20, 8
DIGITS = torch_train.PRESETS["digits"]
NET = replace(
    DIGITS.net, patch_size=4, width=16, depth=2, num_heads=2, mlp_ratio=2.0,
    long_skip=LongSkipConfig("learnable", reduction=4),
)  # fmt: skip


def config(out, steps: int = STEPS) -> torch_train.TrainConfig:
    """Every step in the log; a checkpoint half-way and at the end."""
    run = replace(
        DIGITS.run, out=out, duration=steps * B, log_every=B, sample_every=1_000_000,
        snapshot_every=STEPS * B, checkpoint_every=STEPS * B // 2, device="cpu",
    )  # fmt: skip
    return replace(DIGITS, net=NET, run=run, batch_size=B, accumulate=2, warmup=5 * B, lr=2e-3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run in each framework, from the same weights."""
    folder = tmp_path_factory.mktemp("runs")

    def same_weights(net_config):
        torch.manual_seed(config(folder).seed)
        twin = TinygradUViT(net_config)
        copy_weights(UViT(net_config), twin)
        return twin

    torch_train.train(config(folder / "torch"))
    with pytest.MonkeyPatch.context() as patch, Context(NOOPT=1):
        patch.setattr(tinygrad_train, "UViT", same_weights)
        tinygrad_train.train(config(folder / "tinygrad"))
    return folder / "torch", folder / "tinygrad"


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_twenty_steps(runs):
    """The same losses within 1e-3, and gradient norms within 1 %, in all 20 steps; then validation losses."""
    theirs, ours = map(log, runs)
    assert [line["nimg"] for line in ours] == [line["nimg"] for line in theirs]
    assert ours[-1]["nimg"] == B * len(ours) == B * STEPS
    for key, tolerance in (("loss", 1e-3), ("grad_norm", 1e-2)):
        expected = [line[key] for line in theirs]
        assert [line[key] for line in ours] == pytest.approx(expected, rel=tolerance)
        assert np.ptp(expected) > 0.05
    assert ours[-1]["validation"] == pytest.approx(theirs[-1]["validation"], rel=1e-3)


@pytest.mark.parametrize("sigma_rel", ["0.050", "0.100"])
def test_snapshots_hold_the_same_averages(runs, sigma_rel):
    name = f"snapshots/{STEPS * B:09d}-{sigma_rel}.safetensors"
    (theirs, their_header), (ours, our_header) = (read_snapshot(folder / name) for folder in runs)
    assert our_header == their_header and our_header["config"] == json.loads(json.dumps(asdict(NET)))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert error(ours[key].numpy(), value) < 1e-2, key


@pytest.mark.parametrize("run", [0, 1], ids=["torch's", "tinygrad's"])
def test_either_framework_draws_from_either_snapshot(runs, run):
    options = SampleConfig(num=4, steps=3, guidance=2.0)
    images = []
    for backend in ("torch", "tinygrad"):
        D, header = load(runs[run], backend=backend)
        assert header["network"] == "minimal_uvit"
        with Context(NOOPT=1):
            images.append(draw(D, options, range(4), [0, 1, 2, 3]))
    assert error(images[1], images[0]) <= 1e-4


def test_resumed_run_is_bit_for_bit_the_same(runs, tmp_path):
    """Half of it, then the same command for the rest, against a run in one go."""
    with Context(NOOPT=1):
        tinygrad_train.train(config(tmp_path / "whole"))
        tinygrad_train.train(config(tmp_path / "halves", STEPS // 2))
        tinygrad_train.train(config(tmp_path / "halves"))
    whole, halves = log(tmp_path / "whole"), log(tmp_path / "halves")
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
    name = f"snapshots/{STEPS * B:09d}-0.050.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()


def test_refusals(runs, tmp_path):
    with pytest.raises(ValueError, match="tinygrad trains in float32"):
        tinygrad_train.train(replace(config(tmp_path), precision="bfloat16"))
    with pytest.raises(ValueError, match="framework None, not tinygrad"):
        tinygrad_train.train(config(runs[0]))
