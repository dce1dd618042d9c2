"""train_tinygrad.py beside train.py: the same losses, one format of files, resuming, sampling, refusals."""

import json
from dataclasses import asdict, replace
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from tinygrad_cases import Context, error

from posthoc_ema.snapshots import read_snapshot
from shared.long_skip import LongSkipConfig

STEPS, B = 20, 8
LONG_SKIP = LongSkipConfig("learnable", reduction=4)
NETS = {
    "minimal_uvit": dict(patch_size=4, width=16, depth=2, num_heads=2, mlp_ratio=2.0, long_skip=LONG_SKIP),
    "adm_unet": dict(channel_mult=(1,), attn_resolutions=(), long_skip=LONG_SKIP),
    "edm2_mp_unet": dict(
        channels=8, channel_mult=(1,), num_blocks=1, attn_resolutions=(), channels_per_head=8,
        long_skip=LONG_SKIP,
    ),
}  # fmt: skip
SLOW = pytest.mark.slow
CASES = [  # project, preset, objective
    ("minimal_uvit", "digits", "edm"), ("adm_unet", "digits", "edm"),
    ("edm2_mp_unet", "digits", "uncertainty"),
    pytest.param(("minimal_uvit", "digits", "vp"), marks=SLOW),
    pytest.param(("adm_unet", "digits", "iddpm"), marks=SLOW),
    pytest.param(("adm_unet", "classifier", "edm"), marks=SLOW),
    pytest.param(("adm_unet", "superres", "edm"), marks=SLOW),
    pytest.param(("edm2_mp_unet", "digits", "edm"), marks=SLOW),
]  # fmt: skip


def trainer(project: str, framework: str = "") -> ModuleType:
    return import_module(f"{project}.train{framework}")


def config(out, case=CASES[0], steps: int = STEPS):
    """Every step in the log; a checkpoint half-way and at the end."""
    project, preset, objective = case
    base = trainer(project).PRESETS[preset]
    run = replace(
        base.run, out=out, duration=steps * B, log_every=B, sample_every=1_000_000,
        snapshot_every=STEPS * B, checkpoint_every=STEPS * B // 2, device="cpu",
    )  # fmt: skip
    net = replace(base.net, **NETS[project])
    options = dict(batch_size=B, accumulate=2 if project == "minimal_uvit" else 1, warmup=5 * B)
    return replace(base, net=net, run=run, objective=objective, **options)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def runs(request, tmp_path_factory):
    """A case, and the folders of its run in each framework."""
    case, folder = request.param, tmp_path_factory.mktemp("runs")
    trainer(case[0]).train(config(folder / "torch", case))
    with Context(NOOPT=1):
        trainer(case[0], "_tinygrad").train(config(folder / "tinygrad", case))
    return case, folder / "torch", folder / "tinygrad"


def log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_twenty_steps(runs):
    """The same losses within 1e-3, and gradient norms within 1 %, in all 20 steps; then validation losses."""
    theirs, ours = map(log, runs[1:])
    assert [line["nimg"] for line in ours] == [line["nimg"] for line in theirs]
    assert ours[-1]["nimg"] == B * len(ours) == B * STEPS
    for key, tolerance in (("loss", 1e-3), ("grad_norm", 1e-2)):
        expected = [line[key] for line in theirs]
        assert [line[key] for line in ours] == pytest.approx(expected, rel=tolerance)
        assert np.ptp(expected) > 0.05
    assert ours[-1]["validation"] == pytest.approx(theirs[-1]["validation"], rel=1e-3)


@pytest.mark.parametrize("sigma_rel", ["0.050", "0.100"])
def test_snapshots_hold_the_same_averages(runs, sigma_rel):
    _, *folders = runs
    name = f"snapshots/{STEPS * B:09d}-{sigma_rel}.safetensors"
    (theirs, their_header), (ours, our_header) = (read_snapshot(folder / name) for folder in folders)
    assert our_header == their_header
    assert our_header["config"]["long_skip"] == json.loads(json.dumps(asdict(LONG_SKIP)))
    assert ours.keys() == theirs.keys()
    ours, theirs = (np.concatenate([w[key].numpy().ravel() for key in theirs]) for w in (ours, theirs))
    assert np.linalg.norm(ours - theirs) < 5e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize("writer", [1, 2], ids=["torch's", "tinygrad's"])
def test_either_framework_draws_from_either_snapshot(runs, writer):
    """Two batches, the second of fewer images, guided; the first ends as the whole would."""
    (project, preset, _), *_ = runs
    if preset == "classifier":
        pytest.skip("a classifier draws nothing")
    file = import_module(f"{project}.sample")
    options = file.SampleConfig(steps=3, guidance=2.0)
    low_res = {"low_res": np.float32(np.zeros((4, 1, 4, 4)))} if preset == "superres" else {}
    images = []
    for backend in ("torch", "tinygrad"):
        D, header = file.load(runs[writer], backend=backend)
        assert header["network"] == project
        with Context(NOOPT=1):
            for part in (slice(0, 4), slice(0, 2)):
                small = {key: file.torch.from_numpy(value[part]) for key, value in low_res.items()}
                images.append(file.draw(D, options, range(4)[part], [0, 1, 2, 3][part], **small))
    assert error(images[2], images[0]) <= 1e-4 and error(images[3], images[1]) <= 1e-4


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=SLOW) for case in CASES[1:3])])
def test_resumed_run_is_bit_for_bit_the_same(case, tmp_path):
    """Half of it, then the same command for the rest, against a run in one go."""
    train = trainer(case[0], "_tinygrad").train
    with Context(NOOPT=1):
        train(config(tmp_path / "whole", case))
        train(config(tmp_path / "halves", case, STEPS // 2))
        train(config(tmp_path / "halves", case))
    whole, halves = log(tmp_path / "whole"), log(tmp_path / "halves")
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
    name = f"snapshots/{STEPS * B:09d}-0.050.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()


@pytest.mark.parametrize("project", NETS)
def test_refusals(project, tmp_path):
    whole = config(tmp_path / "run", (project, "digits", "edm"), steps=1)
    train = trainer(project, "_tinygrad").train
    with pytest.raises(ValueError, match="tinygrad trains in float32"):
        train(replace(whole, precision="bfloat16"))
    with pytest.raises(ValueError, match="set DEV to choose tinygrad's"):
        train(replace(whole, run=replace(whole.run, device="meta")))
    with pytest.raises(ValueError, match="compile is PyTorch's"):
        train(replace(whole, run=replace(whole.run, compile=True)))
    trainer(project).train(whole)
    with pytest.raises(ValueError, match="framework None, not tinygrad"):
        train(whole)
