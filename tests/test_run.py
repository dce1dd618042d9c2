"""The mechanics of a run, on a tiny U-ViT: resuming, ranks, signals, non-finite steps, refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import minimal_uvit.train as uvit
from minimal_uvit.model import UViTConfig
from minimal_uvit.train import PRESETS, TrainConfig, learning_rate, train
from shared.data import DataConfig
from shared.run import DivergedError, Run, RunConfig, differences

ROOT = Path(__file__).parents[1]
NET = UViTConfig(8, 4, 1, 16, 2, 2, num_classes=11, null_class=True)
TINY = [
    "--net.patch-size", "4", "--net.width", "16", "--net.depth", "2", "--net.num-heads", "2",
    "--batch-size", "32", "--log-every", "96", "--snapshot-every", "640", "--checkpoint-every", "320",
]


def tiny(out: Path, duration: int = 320, **changes) -> TrainConfig:
    run = RunConfig(out, duration, 32, 10**9, 160, 96, workers=0)
    changes = {"label_dropout": 0.1, "batch_size": 32, "lr": 1e-3, "warmup": 64} | changes
    return TrainConfig(**{"net": NET} | changes, run=run)


def state(out: Path) -> dict:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, optimizer, averages, log and snapshots."""
    assert (a / "log.jsonl").read_bytes() == (b / "log.jsonl").read_bytes()
    flat_a, flat_b = ([*torch.utils._pytree.tree_leaves(state(x))] for x in (a, b))
    assert len(flat_a) == len(flat_b)
    for x, y in zip(flat_a, flat_b, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
    names = sorted(path.name for path in (a / "snapshots").iterdir())
    assert names == sorted(path.name for path in (b / "snapshots").iterdir())
    for name in names:
        assert (a / "snapshots" / name).read_bytes() == (b / "snapshots" / name).read_bytes()


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    train(tiny(tmp_path / "whole"))
    reduce = Run.reduce

    def interrupt(run, net, loss):
        if run.nimg == 160:
            os.kill(os.getpid(), signal.SIGTERM)
        return reduce(run, net, loss)

    monkeypatch.setattr(Run, "reduce", interrupt)
    with pytest.raises(SystemExit) as stop:
        train(tiny(tmp_path / "stopped"))
    assert stop.value.code == 128 + signal.SIGTERM
    assert state(tmp_path / "stopped")["run"][0] == 160  # the step was finished and saved
    monkeypatch.setattr(Run, "reduce", reduce)
    train(tiny(tmp_path / "stopped"))
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_crashed_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    train(tiny(tmp_path / "whole"))
    save = Run.save

    def crash(run, **kept):
        save(run, **kept)
        if run.nimg == 192:  # after the checkpoint, with a log that goes on a little
            run.log()
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path / "crashed"))
    monkeypatch.setattr(Run, "save", save)
    train(tiny(tmp_path / "crashed"))
    assert_same_run(tmp_path / "whole", tmp_path / "crashed")


def run_command(*args: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([sys.executable, *args], env=env, **pipes)


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    assert process.returncode == 0, output


@pytest.mark.slow
def test_kill_9_at_five_random_moments(tmp_path):
    script = str(ROOT / "minimal_uvit/train.py")
    arguments = [script, *TINY, "--duration", "25600", "--sample-every", "6400", "--out"]
    finish(run_command(*arguments, str(tmp_path / "whole")))
    killed = tmp_path / "killed"
    rng = random.Random(0)
    for kill in range(5):
        process = run_command(*arguments, str(killed))
        target = (kill + rng.random()) * 25600 / 5  # wait until training is about here
        while process.poll() is None and position(killed) < target:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.communicate()
    finish(run_command(*arguments, str(killed)))
    assert_same_run(tmp_path / "whole", killed)
    assert (killed / "samples" / "000025600.png").exists()


def position(out: Path) -> int:
    lines = log(out) if (out / "log.jsonl").exists() else []
    return lines[-1]["nimg"] if lines else 0


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    script = str(ROOT / "minimal_uvit/train.py")
    arguments = [script, *TINY, "--duration", "640", "--sample-every", "640", "--out"]
    finish(run_command(*arguments, str(tmp_path / "one")))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finish(run_command(*torchrun, *arguments, str(tmp_path / "two")))
    ours, theirs = state(tmp_path / "one"), state(tmp_path / "two")
    for name, weight in ours["net"].items():
        torch.testing.assert_close(theirs["net"][name], weight, rtol=1e-4, atol=2e-6)
    losses = [[line["loss"] for line in log(tmp_path / x)] for x in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_accumulation_and_workers_change_nothing(tmp_path):
    train(tiny(tmp_path / "one"))
    parts = tiny(tmp_path / "parts", accumulate=4)
    train(replace(parts, run=replace(parts.run, workers=3)))
    ours, theirs = state(tmp_path / "one")["net"], state(tmp_path / "parts")["net"]
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=2e-6)


def test_non_finite_steps_are_skipped(tmp_path, monkeypatch):
    """Steps 3 and 4 have NaN in loss and gradient: weights, moments and averages are those after step 2."""
    kept, reduce = {}, Run.reduce

    def spoil(run, net, loss):
        kept[run.nimg // 32] = [p.detach().clone() for p in net.parameters()]  # before this step
        if run.nimg // 32 in (3, 4):
            loss = loss * float("nan")
            next(net.parameters()).grad[0] = float("nan" if run.nimg // 32 == 3 else "inf")
        return reduce(run, net, loss)

    monkeypatch.setattr(Run, "reduce", spoil)
    train(tiny(tmp_path, duration=160))
    assert all(torch.equal(a, b) for k in (4, 5) for a, b in zip(kept[3], kept[k], strict=True))
    end = state(tmp_path)
    assert end["optimizer"]["state"][0]["step"] == 3
    assert all(v.isfinite().all() for average in end["ema"]["averages"] for v in average)
    lines = log(tmp_path)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 0]
    assert [line["loss"] is None for line in lines] == [False, False, True, True, False]


def test_ten_non_finite_steps_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(uvit, "edm_loss", lambda *args: loss_nan(*args))
    with pytest.raises(DivergedError, match=r"10 steps in a row, to 320 images: see .*log\.jsonl"):
        train(tiny(tmp_path, duration=640))


def loss_nan(D, images, sigma, noise, labels):
    return D(images, sigma, labels).sum((1, 2, 3)) * float("nan")


@pytest.mark.parametrize("changes, field", [
    (dict(net=replace(NET, depth=4)), r"net\.depth 2, not 4"),
    (dict(data=DataConfig(flip=True)), r"data\.flip False, not True"),
    (dict(lr=5e-4), r"lr 0\.001, not 0\.0005"),
])
def test_another_recipe_is_refused(tmp_path, changes, field):
    train(tiny(tmp_path, duration=32))
    before = state(tmp_path)["run"]
    with pytest.raises(ValueError, match=f"holds a run with {field}: choose another --out"):
        train(replace(tiny(tmp_path), **changes))
    assert state(tmp_path)["run"] == before


def test_length_log_interval_and_workers_may_change(tmp_path):
    train(tiny(tmp_path, duration=32))
    longer = tiny(tmp_path, duration=96)
    train(replace(longer, run=replace(longer.run, log_every=64, workers=1)))
    assert state(tmp_path)["run"][0] == 96


def test_spoilt_files_are_named(tmp_path):
    out = tmp_path / "run"
    train(tiny(out, duration=32))
    checkpoint = out / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"checkpoint\.pt is truncated or no checkpoint of this run"):
        train(tiny(out))
    torch.save({"weights": torch.zeros(3)}, checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is truncated or no checkpoint of this run"):
        train(tiny(out))
    (out / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        train(tiny(out))


def test_a_folder_that_holds_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists and holds no run"):
        train(tiny(tmp_path))
    with pytest.raises(ValueError, match="exists and holds no run"):
        train(tiny(tmp_path / "thesis.tex"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unconditional_network_is_shown_no_labels(tmp_path):
    """On data that has labels, validation included."""
    net = replace(NET, num_classes=0, null_class=False)
    config = tiny(tmp_path, duration=64, net=net, label_dropout=0.0)
    train(replace(config, run=replace(config.run, sample_every=32)))
    assert [len(line["validation"]) for line in log(tmp_path)] == [9, 9]


def test_a_checkpoint_of_another_network_is_named(tmp_path):
    train(tiny(tmp_path / "a", duration=32))
    wide = tiny(tmp_path / "b", duration=32, net=replace(NET, width=32))
    train(wide)
    (tmp_path / "a" / "checkpoint.pt").rename(tmp_path / "b" / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is truncated or no checkpoint of this run"):
        train(wide)


def test_more_parts_than_images_are_none(tmp_path):
    train(tiny(tmp_path, duration=64, accumulate=32))
    with pytest.raises(ValueError, match=r"accumulate is 33: it must be in 1\.\.32, the batch_size"):
        tiny(tmp_path, accumulate=33)


def test_vp_objective_trains(tmp_path):
    train(tiny(tmp_path, duration=96, objective="vp", precision="bfloat16"))
    # an untrained network leaves the noise's variance, 1
    assert all(0.5 < line["loss"] < 2 for line in log(tmp_path))


def test_differences():
    saved, ours = {"a": {"b": 1, "c": [1, 2]}, "d": 3}, {"a": {"b": 2, "c": [1, 2]}, "e": 4}
    assert list(differences(saved, ours)) == [("a.b", 1, 2), ("d", 3, None), ("e", None, 4)]


def test_warm_up():
    config = replace(PRESETS["s2_cifar10"], lr=2.0)  # 2,500 steps of 128
    assert [learning_rate(config, n) for n in (0, 160_000, 320_000, 10**9)] == [0, 1, 2, 2]
