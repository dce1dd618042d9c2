"""Training and sampling with ADM: the three networks, both objectives, guidance, super-resolution."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import load_case

from adm_unet.iddpm import ddim
from adm_unet.model import ADMConfig
from adm_unet.sample import Model, SampleConfig, draw, load, sample
from adm_unet.tasks import classifier_gradient, make_process, noise_predictor, shrink
from adm_unet.train import PRESETS, TrainConfig, learning_rate, train
from shared.run import RunConfig

NET = ADMConfig(channel_mult=(1, 1), attn_resolutions=(), num_classes=11, null_class=True)


def tiny(out: Path, net: ADMConfig = NET, **changes) -> TrainConfig:
    run = RunConfig(out, 16, 8, 16, 16, 8, workers=0)
    return TrainConfig(net, run, **({"batch_size": 8, "lr": 1e-3} | changes))


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two steps of each network and objective."""
    folder = tmp_path_factory.mktemp("runs")
    classifier = replace(NET, num_classes=10, null_class=False, pool="attention")
    train(tiny(folder / "edm", label_dropout=0.5))
    train(tiny(folder / "iddpm", objective="iddpm", label_dropout=0.5))
    train(tiny(folder / "superres", replace(NET, low_res=4)))
    train(tiny(folder / "classifier", classifier))
    return {path.name: path for path in folder.iterdir()}


def test_every_network_trains(runs):
    for name, run in runs.items():
        *_, last = lines(run)
        assert last["nimg"] == 16 and 0 < last["loss"] < 10 and len(last["validation"]) == 9
        assert (run / "samples" / "000000016.png").exists() == (name != "classifier")
        assert (run / "loss.png").exists()
        assert len(list((run / "snapshots").iterdir())) == 2
    assert load(runs["iddpm"])[0].net.config.learn_sigma  # as the objective needs
    assert not load(runs["edm"])[0].net.config.learn_sigma


def test_a_run_goes_on_with_its_importance(tmp_path):
    """Stopped after one step and resumed, the drawn steps' losses are those of an uninterrupted run."""
    vlb = dict(objective="iddpm", loss="vlb", importance=True, num_steps=30, accumulate=2)
    train(tiny(tmp_path / "whole", **vlb))
    config = tiny(tmp_path / "stopped", **vlb)
    train(replace(config, run=replace(config.run, duration=8)))
    train(config)
    whole, stopped = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "stopped")
    )
    ours, theirs = (np.array(run["sampler"]["losses"]) for run in (stopped, whole))
    np.testing.assert_array_equal(ours, theirs)
    assert np.isfinite(theirs).sum() == 16
    assert all(torch.equal(whole["net"][k], stopped["net"][k]) for k in whole["net"])


@pytest.mark.parametrize("run, options", [
    ("edm", dict(sampler="heun", guidance=2.0)),
    ("edm", dict(sampler="ddim", eta=0.5, guidance=2.0)),
    ("iddpm", dict(sampler="dpmpp", labels=(3,))),
    ("iddpm", dict(sampler="ancestral", clip=False)),
    ("iddpm", dict(sampler="ancestral", guidance=2.0)),
])  # fmt: skip
def test_samplers(runs, tmp_path, run, options):
    """An image depends on its seed and label alone, whatever its batch."""
    config = SampleConfig(runs[run], tmp_path / "a.npz", num=5, steps=3, respacing="3", **options)
    sample(config)
    sample(replace(config, out=tmp_path / "b.npz", batch_size=2))
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        assert a["arr_0"].shape == (5, 8, 8, 1) and a["arr_0"].dtype == np.uint8
        assert a["arr_1"].tolist() == ([3] * 5 if "labels" in options else [0, 1, 2, 3, 4])
        assert np.abs(a["arr_0"].astype(int) - b["arr_0"]).max() <= 1


@pytest.mark.parametrize("options", [
    dict(sampler="heun"), dict(sampler="ddim"),
    dict(sampler="ancestral"), dict(sampler="ancestral", at_mean=True),
])  # fmt: skip
def test_classifier_guides(runs, options):
    """A linear classifier, of images with or without noise, gives what it guided a larger probability."""
    model, _ = load(runs["iddpm"])
    weights = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)) / 8
    classifier = Model(lambda x, timesteps: x.flatten(1) @ weights, "classifier", "linear")
    labels = list(range(10))
    config = SampleConfig(steps=8, respacing="20", **options)
    log_p = []
    for scale in (0.0, 3.0):
        config = replace(config, classifier_scale=scale)
        images = draw(model, config, range(10), labels, classifier=classifier)
        out = classifier.net(torch.from_numpy(images), None).log_softmax(1)
        log_p.append(out.diagonal().mean().item())
    assert log_p[1] > log_p[0] + 0.1


def test_superres_enlarges_files(runs, tmp_path):
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (3, 4, 4, 1), np.uint8)
    np.savez(tmp_path / "small.npz", arr_0=small, arr_1=np.array([7, 1, 2]))
    options = dict(num=4, steps=2, low_res=tmp_path / "small.npz")
    config = SampleConfig(runs["superres"], tmp_path / "large.npz", **options)
    sample(config)
    with np.load(tmp_path / "large.npz") as large:
        assert large["arr_0"].shape == (4, 8, 8, 1)
        assert large["arr_1"].tolist() == [7, 1, 2, 7]  # the small images' labels, repeated
    sample(replace(config, out=tmp_path / "folder", sampler="ancestral", respacing="2"))
    assert len(list((tmp_path / "folder").iterdir())) == 4


def test_released_file(tmp_path, monkeypatch):
    """A released .pt of a learned variance, drawn by the papers' own sampler."""
    case = load_case("adm_updown")
    torch.save(case.state_dict, tmp_path / "model.pt")
    from adm_unet import model
    from adm_unet.official import official_config

    monkeypatch.setitem(model.PRESETS, "golden", official_config(case.meta["config"]))
    options = dict(official=tmp_path / "model.pt", preset="golden", out=tmp_path / "x.npz", num=2)
    sample(SampleConfig(sampler="ancestral", respacing="ddim5", **options))
    with np.load(tmp_path / "x.npz") as file:
        assert file["arr_0"].shape == (2, 16, 16, 3)


def test_shrinking_is_a_mean():
    images = torch.arange(64.0).reshape(1, 1, 8, 8)
    assert shrink(images, replace(NET, low_res=4))[0, 0, 0].tolist() == [4.5, 6.5, 8.5, 10.5]
    assert shrink(images, NET) is None


def test_noise_predictor_undoes_the_denoiser():
    process = make_process("cosine", 40, "small", "8")
    net = lambda x, timesteps, labels: 0.3 * x.sin() + timesteps[:, None, None, None] / 1000
    again = noise_predictor(process.denoiser(net), process)
    x, t = torch.randn(8, 1, 2, 2, dtype=torch.float64), torch.from_numpy(process.times)
    torch.testing.assert_close(again(x, t), net(x, t, None))
    torch.testing.assert_close(ddim(process, again, x), ddim(process, net, x))


def test_classifier_gradient_closed_form():
    """Two logits, 0 and x: log p(1 | x) = -log(1 + exp(-x)), whose slope is 1 / (1 + exp(x))."""
    classifier = lambda x, t: torch.stack([x[:, 0, 0, 0] * 0, x[:, 0, 0, 0]], dim=1)
    x = torch.tensor([-1.0, 0.5])[:, None, None, None]
    gradient = classifier_gradient(classifier, torch.tensor([1, 0]), scale=2.0)(x, torch.zeros(2))
    expected = [2 / (1 + np.exp(-1)), -2 * (1 - 1 / (1 + np.exp(0.5)))]
    np.testing.assert_allclose(gradient[:, 0, 0, 0], expected, rtol=1e-6)


def test_learning_rate():
    config = tiny(Path("x"), warmup=4, anneal=True, lr=2.0)
    assert [learning_rate(config, nimg) for nimg in (2, 4, 8, 16)] == [2 * 0.5 * 0.875, 1.5, 1.0, 0.0]
    assert learning_rate(replace(config, anneal=False), 16) == 2.0


@pytest.mark.parametrize("options, sentence", [
    (dict(eta=0.5), "heun takes no eta"), (dict(churn=1.0, sampler="ddim"), "ddim takes no churn"),
    (dict(at_mean=True, sampler="ddim"), "at_mean"), (dict(preset="adm"), "preset 'adm' is unknown"),
])  # fmt: skip
def test_impossible_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        SampleConfig(**options)


@pytest.mark.parametrize("run, options, sentence", [
    ("classifier", {}, "this is a classifier"), ("superres", {}, "--low-res says which"),
    ("edm", dict(low_res=Path("x")), "enlarges no images"), ("edm", dict(labels=(11,)), r"labels \[11\]"),
    ("edm", dict(classifier="edm"), "edm is no classifier"),
    ("edm", dict(respacing="x", sampler="ddim"), "'x'"),
    ("superres", dict(low_res="digits"), r"\(1, 8, 8\), the network takes \(1, 4, 4\)"),
])  # fmt: skip
def test_what_cannot_be_drawn(runs, tmp_path, run, options, sentence):
    options = options | ({"classifier": runs[options["classifier"]]} if "classifier" in options else {})
    with pytest.raises(ValueError, match=sentence):
        sample(SampleConfig(runs[run], tmp_path / "x.png", **options))


def test_presets_describe_their_networks():
    for name, config in PRESETS.items():
        assert (config.net.pool != "") == name.startswith("classifier")
        assert (config.net.low_res > 0) == name.startswith("superres")
