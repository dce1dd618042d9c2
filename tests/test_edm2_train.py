"""Training and sampling of edm2_mp_unet: schedule, loss, a small run, guidance."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import MATH

import edm2_mp_unet.train as edm2_train
from benchmarks.magnitudes import Options, measure, rms
from edm2_mp_unet.model import PRESETS as NETWORKS
from edm2_mp_unet.model import Denoiser, EDM2Config, MPConv
from edm2_mp_unet.sample import SampleConfig, choose_labels, draw, load, sample
from edm2_mp_unet.train import PRESETS, TrainConfig, learning_rate, train, uncertainty_loss
from shared.diffusion import edm_loss
from shared.run import Run, RunConfig
from shared.samplers import seed_noise

NET = EDM2Config(channels=8, channel_mult=(1,), num_blocks=1, channels_per_head=8, logvar_channels=16)


def tiny(out: Path, duration: int = 192, **changes) -> TrainConfig:
    run = RunConfig(out, duration, 32, 192, 96, 96, workers=0)
    changes = {"label_dropout": 0.1, "batch_size": 32, "warmup": 64} | changes
    return TrainConfig(changes.pop("net", NET), run, **changes)


@pytest.fixture
def quick(monkeypatch):
    """No validation and no samples, which take longer than training a few steps."""
    monkeypatch.setattr(edm2_train, "validate", lambda *args: {})
    monkeypatch.setattr(edm2_train, "picture", lambda *args: None)


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", MATH["edm2_lr"])
def test_learning_rate_golden(row):
    given, expected = row
    config = replace(
        PRESETS["digits"], batch_size=given["batch_size"],
        lr=given["ref_lr"], decay=given["ref_batches"],
        warmup=given["rampup_Mimg"] * 10**6,
    )
    assert learning_rate(config, given["cur_nimg"]) == pytest.approx(expected, rel=1e-9)


def test_released_presets():
    """Latents and 64x64 images differ in noise levels and decay, sizes in learning rate and length."""
    for name, config in PRESETS.items():
        assert config.net == NETWORKS[name]
        if name != "digits":
            assert config.batch_size == 2048 and config.betas == (0.9, 0.99)
            latents = name.startswith("edm2_img512")
            assert (config.P_mean, config.P_std) == ((-0.4, 1.0) if latents else (-0.8, 1.6))
            assert config.decay == (70_000 if latents else 35_000)
    s, xxl = PRESETS["edm2_img512_s"], PRESETS["edm2_img512_xxl"]
    assert (s.lr, s.run.duration, s.net.dropout) == (0.01, 2**31, 0.0)
    assert (xxl.lr, xxl.run.duration, xxl.net.dropout) == (0.0065, 939524096, 0.1)
    assert learning_rate(s, 10_000_000) == 0.01 and learning_rate(s, 5_000_000) == 0.005


def test_uncertainty_loss_closed_form():
    """Eqs. 14-16 and 21: lambda / exp(u) |D - y|^2 + u, least at u = ln E[lambda |D - y|^2]."""
    net = Denoiser(NET)
    images, noise = torch.randn(2, 4, 1, 8, 8)
    sigma, labels = torch.tensor([0.1, 0.5, 2.0, 9.0]), torch.tensor([1, 2, 3, 4])
    noisy = images + sigma[:, None, None, None] * noise
    D_x, u = (value.detach().numpy() for value in net(noisy, sigma, labels, return_logvar=True))
    s = sigma.numpy()
    error = ((D_x - images.numpy()) ** 2).mean((1, 2, 3))
    expected = (s**2 + 0.25) / (0.5 * s) ** 2 / np.exp(u) * error + u
    loss = uncertainty_loss(net, images, sigma, noise, labels)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-4)
    plain = edm_loss(net, images, sigma, noise, labels).detach()

    def known(x, sigma, labels, return_logvar):
        return net(x, sigma, labels), plain.log()

    torch.testing.assert_close(uncertainty_loss(known, images, sigma, noise, labels), 1 + plain.log())


def test_files_of_a_run(tmp_path):
    train(tiny(tmp_path, duration=64))
    lines = log(tmp_path)
    assert [line["nimg"] for line in lines] == [32, 64]
    assert len(lines[-1]["validation"]) == 9
    for name in ("config.json", "checkpoint.pt", "loss.png", "samples/000000064.png"):
        assert (tmp_path / name).exists()


def test_unconditional_run(tmp_path):
    """Data with labels, a network without: trained, validated and drawn without them."""
    train(tiny(tmp_path, duration=32, net=replace(NET, num_classes=0), label_dropout=0.0))
    assert len(log(tmp_path)[-1]["validation"]) == 9


def test_resuming_and_sampling(tmp_path, quick):
    """Stopping and going on changes no bit; snapshots are sampled."""
    train(tiny(tmp_path / "whole"))
    train(tiny(tmp_path / "halves", duration=96))
    train(tiny(tmp_path / "halves"))
    whole, halves = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "halves")
    )
    for key, weight in whole["net"].items():
        assert torch.equal(weight, halves["net"][key])
    _, header = load(tmp_path / "whole", sigma_rel=0.10)
    assert header["sigma_rel"] == 0.10 and header["nimg"] == 192 and header["label_dropout"] == 0.1
    out = tmp_path / "out.npz"
    sample(SampleConfig(tmp_path / "whole", out, num=5, labels=(3, 1), steps=2, guidance=2.0))
    with np.load(out) as file:
        assert file["arr_0"].shape == (5, 8, 8, 1) and file["arr_1"].tolist() == [3, 1, 3, 1, 3]


def test_resuming_from_another_memory_format(tmp_path, quick):
    """Adam's moments are moved to that of the weights, which its fused steps presume."""
    train(tiny(tmp_path / "whole"))
    train(tiny(tmp_path / "halves", duration=96))
    path = tmp_path / "halves" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    for moments in state["optimizer"]["state"].values():
        moments |= {name: value.contiguous() for name, value in moments.items()}
    torch.save(state, path)
    train(tiny(tmp_path / "halves"))
    whole, halves = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "halves")
    )
    assert all(torch.equal(weight, halves["net"][key]) for key, weight in whole["net"].items())


@pytest.mark.parametrize("changes", [
    dict(objective="edm"), dict(precision="bfloat16"), dict(precision="float16", loss_scale=100.0),
    dict(net=replace(NET, num_classes=0), label_dropout=0.0), dict(accumulate=4),
])
def test_options_train(tmp_path, quick, changes):
    train(tiny(tmp_path / "run", duration=96, **changes))
    lines = log(tmp_path / "run")
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)


def test_loss_scale_and_accumulation_change_nothing(tmp_path, quick):
    weights = []
    for name, changes in (("a", {}), ("b", dict(loss_scale=1024.0)), ("c", dict(accumulate=4))):
        train(tiny(tmp_path / name, duration=96, **changes))
        weights.append(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["net"])
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weights[2][key], weight, rtol=1e-2, atol=1e-2)


def test_a_bad_step_changes_nothing(tmp_path, monkeypatch, quick):
    """Gradients that are not finite are skipped: weights stay as they were, but for their normalization."""
    seen = []
    reduce = Run.reduce

    def spoil(run, net, loss):
        if run.nimg == 64:
            net.unet.conv_out.weight.grad[0] = float("nan")
        finite = reduce(run, net, loss)
        seen.append((finite, net.unet.conv_in.weight.detach().clone()))
        return finite

    monkeypatch.setattr(Run, "reduce", spoil)
    train(tiny(tmp_path / "run", duration=96))
    assert [finite for finite, _ in seen] == [True, False, True]
    torch.testing.assert_close(seen[1][1], seen[2][1], rtol=1e-6, atol=0)
    assert log(tmp_path / "run")[1]["skipped"] == 1


def test_guidance():
    """By the missing label, an unconditional network, or a worse one that gets the same labels."""
    torch.manual_seed(0)
    nets = [Denoiser(replace(NET, num_classes=k)).eval().requires_grad_(False) for k in (10, 0, 10)]
    for net in nets:
        for layer in net.modules():
            if isinstance(layer, MPConv) and layer.gain is not None:
                layer.gain.data.fill_(0.5)
    D, unconditional, worse = nets
    config = SampleConfig(steps=1, sampler="euler", sigma_max=2.0, guidance=3.0)  # one step: D at sigma 2
    x = 2 * torch.from_numpy(seed_noise([5, 6], (1, 8, 8)))
    sigma, labels = torch.tensor([2.0, 2.0]), torch.tensor([1, 7])
    for guide, of_guide in (
        (None, D(x, sigma)), (unconditional, unconditional(x, sigma)), (worse, worse(x, sigma, labels)),
    ):
        expected = of_guide + 3 * (D(x, sigma, labels) - of_guide)
        out = draw(D, config, [5, 6], [1, 7], guide)
        np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_sampling_refuses(tmp_path, quick):
    train(tiny(tmp_path / "run", duration=96, label_dropout=0.0))
    train(tiny(tmp_path / "other", duration=96, net=replace(NET, num_classes=0), label_dropout=0.0))
    run, other = tmp_path / "run", tmp_path / "other"
    for config, sentence in (
        (SampleConfig(run, guidance=2.0), "guidance needs a guide, or training with label_dropout"),
        (SampleConfig(run, labels=(10,)), r"labels \[10\] are out of range"),
        (SampleConfig(other, labels=(1,)), "unconditional"),
        (SampleConfig(other, guidance=2.0, guide=run), "has 10 classes, the network 0"),
        (SampleConfig(run, guidance=2.0, guide=tmp_path / "none"), "none holds no snapshot"),
        (SampleConfig(official=tmp_path / "x.pkl"), r"x\.pkl does not exist"),
    ):
        with pytest.raises(ValueError, match=sentence):
            sample(config)
    assert choose_labels(SampleConfig(num=3), 2) == [0, 1, 0]


def test_magnitudes_over_training():
    """What the README's figure measures: EDM2's weights keep magnitude 1, at all levels, at all times."""
    history = measure(Options(networks=("edm2",), steps=4, every=2, batch_size=8), "edm2")
    levels = {"encoder 8x8", "encoder 4x4", "decoder 4x4", "decoder 8x8"}
    for kind in ("activations", "weights", "gradients"):
        assert history[kind].keys() == levels
        assert all(len(values) == 2 for values in history[kind].values())
    for values in history["weights"].values():
        assert values == pytest.approx([1, 1], abs=1e-3)
    assert rms([torch.ones(3), 3 * torch.ones(1)]) == pytest.approx(3**0.5)
