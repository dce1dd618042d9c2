"""Drawing from a tiny trained U-ViT: seeds, labels, guidance, formats, released files, refusals."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_cases import load_case
from PIL import Image

import minimal_uvit.sample as uvit
from minimal_uvit.model import UViT, UViTConfig
from minimal_uvit.official import StableDiffusionPrecond, load_official
from minimal_uvit.sample import SampleConfig, choose_labels, draw, load, sample
from minimal_uvit.train import TrainConfig, train
from posthoc_ema.samples import save_images
from posthoc_ema.snapshots import save_snapshot
from shared.diffusion import EDMPrecond, VPPrecond
from shared.figures import save_grid, to_uint8
from shared.run import RunConfig
from shared.samplers import heun, seed_noise, sigma_steps

NET = UViTConfig(8, 4, 1, 16, 2, 2, num_classes=11, null_class=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "tiny"
    run = RunConfig(out, 128, 64, 128, 64, 128, workers=0)
    train(TrainConfig(NET, run, batch_size=64, lr=1e-3, warmup=0, label_dropout=0.1))
    return out


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file["arr_0"], file["arr_1"]


def test_load_finds_the_last_and_shortest_average(folder):
    D, header = load(folder)
    assert isinstance(D, EDMPrecond) and D.net.config == NET and not D.net.training
    assert (header["nimg"], header["sigma_rel"]) == (128, 0.05)
    assert load(folder, 0.1)[1]["sigma_rel"] == 0.1
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for name, average in zip(dict(D.net.named_parameters()), state["ema"]["averages"][0], strict=True):
        assert torch.equal(D.net.state_dict()[name], average)


def test_an_image_depends_on_its_seed_alone(folder, tmp_path):
    """Images 3..6 of a larger call are those of a smaller one, whatever the batch size, to rounding."""
    D = load(folder)[0]
    config = SampleConfig(steps=4)
    labels = [k % 10 for k in range(8)]
    whole = draw(D, config, range(8), labels)
    part = draw(D, config, range(3, 7), labels[3:7])
    np.testing.assert_allclose(whole[3:7], part, atol=1e-5)
    for size, name in ((3, "a"), (64, "b")):
        sample(SampleConfig(folder, tmp_path / f"{name}.npz", num=8, seed=5, steps=4, batch_size=size))
    (a, labels_a), (b, labels_b) = (arrays(tmp_path / f"{name}.npz") for name in "ab")
    assert np.abs(a.astype(int) - b).max() <= 1 and a.shape == (8, 8, 8, 1) and a.dtype == np.uint8
    assert labels_a.tolist() == labels_b.tolist() == list(range(8))


def test_what_is_drawn_is_the_sampler_of_the_average(folder):
    D = load(folder)[0]
    noise = torch.from_numpy(seed_noise([7, 8], (1, 8, 8)))
    with torch.no_grad():
        expected = heun(D, noise, torch.tensor([1, 2]), sigma_steps(5)).numpy()
    np.testing.assert_array_equal(draw(D, SampleConfig(steps=5), [7, 8], [1, 2]), expected)


def test_guidance(folder):
    """w = 1 is no guidance; guiding with itself changes nothing; classifier-free guidance does."""
    D = load(folder)[0]
    plain = draw(D, SampleConfig(steps=3), [0, 1], [3, 4])
    itself = draw(D, SampleConfig(steps=3, guidance=2.5), [0, 1], [3, 4], guide=D)
    np.testing.assert_allclose(itself, plain, atol=1e-4)
    free = draw(D, SampleConfig(steps=3, guidance=2.5), [0, 1], [3, 4])
    null = draw(D, SampleConfig(steps=3, guidance=2.5), [0, 1], [10, 10])
    assert np.abs(free - plain).max() > 1e-4
    np.testing.assert_allclose(null, draw(D, SampleConfig(steps=3), [0, 1], [10, 10]), atol=1e-4)


@pytest.mark.parametrize("options", [
    dict(sampler="dpmpp"), dict(sampler="euler"), dict(churn=4.0),
    dict(sigma_min=0.01, sigma_max=10.0, rho=5.0),
])
def test_samplers_and_schedules(folder, options):
    D = load(folder)[0]
    images = draw(D, SampleConfig(steps=6, **options), [0, 1], [3, 4])
    assert images.shape == (2, 1, 8, 8) and np.isfinite(images).all()
    assert np.abs(images - draw(D, SampleConfig(steps=6), [0, 1], [3, 4])).max() > 1e-4


def test_formats(folder, tmp_path):
    for name in ("grid.png", "folder"):
        sample(SampleConfig(folder, tmp_path / name, num=12, seed=100, steps=2, labels=(3,)))
    names = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert names == [f"{k:06d}.png" for k in range(100, 112)]
    with Image.open(tmp_path / "folder" / "000100.png") as one, Image.open(tmp_path / "grid.png") as grid:
        assert one.size == (8, 8) and one.mode == grid.mode == "L"
        assert grid.size == (5 * 90, 5 * 18)  # 10 columns and 2 rows of 8 + 1 pixels, five times
        tile = np.asarray(grid)[:40:5, :40:5]
        np.testing.assert_array_equal(tile, np.asarray(one))


@pytest.mark.parametrize("name, sentence", [
    ("x.jpg", "it must be a .png, an .npz or, without a suffix, a folder"), ("x.PNG", "it must be a .png"),
    ("folder.png", "is a file or a folder"), ("file", "is a file or a folder"),
])
def test_where_nothing_can_be_written(folder, tmp_path, name, sentence, monkeypatch):
    """Refused before anything is drawn."""
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(uvit, "draw", lambda *args: pytest.fail("drawn"))
    with pytest.raises(ValueError, match=sentence):
        sample(SampleConfig(folder, tmp_path / name, num=1, steps=1))
    assert (tmp_path / "file").read_text() == "kept"


def test_another_average_of_the_same_run_guides(folder, tmp_path):
    sample(SampleConfig(folder, tmp_path / "a.npz", num=2, steps=2, guidance=3.0, guide_sigma_rel=0.1))
    D, guide = load(folder)[0], load(folder, 0.1)[0]
    expected = draw(D, SampleConfig(steps=2, guidance=3.0), [0, 1], [0, 1], guide)
    np.testing.assert_array_equal(arrays(tmp_path / "a.npz")[0], to_uint8(expected))


def test_limits_of_sigma_are_not_defaults(folder):
    with pytest.raises(ValueError, match="sigma_min 0"):
        draw(load(folder)[0], SampleConfig(steps=2, sigma_min=0.0), [0], [0])


def test_to_uint8():
    images = np.array([-3, -1, -0.5, 0, 0.5, 1, 3], np.float32).reshape(7, 1, 1, 1)
    assert to_uint8(images).ravel().tolist() == [0, 0, 64, 128, 191, 255, 255]
    with pytest.raises(ValueError, match="not finite"):
        to_uint8(images * np.float32("nan"))


def test_rgb_grid(tmp_path):
    images = np.zeros((1, 3, 500, 500), np.float32)
    images[:, 0] = 1
    save_grid(tmp_path / "red.png", images, columns=1)
    with Image.open(tmp_path / "red.png") as picture:
        assert picture.size == (501, 501) and picture.getpixel((0, 0)) == (255, 128, 128)


def test_latents_go_back_to_their_scale(tmp_path):
    header = {"latent_mean": [1.0, -2.0], "latent_std": [4.0, 0.5]}
    latents = np.array([0.5, -0.25], np.float32).reshape(1, 2, 1, 1)
    save_images(tmp_path / "latents.npz", latents, None, 0, header)
    with np.load(tmp_path / "latents.npz") as file:
        assert list(file) == ["arr_0"] and file["arr_0"].ravel().tolist() == [5.0, -2.25]
    with pytest.raises(ValueError, match=r"a\.png: latents are no pictures"):
        save_images(tmp_path / "a.png", latents, None, 0, header)


def test_released_file(tmp_path, monkeypatch):
    """A released .pth is a noise predictor: from sigma(t=1) to sigma(t=1e-3), as the paper samples."""
    case = load_case("uvit_uncond")
    net = load_official(case.meta["config"], case.state_dict)
    torch.save(case.state_dict, tmp_path / "nnet_ema.pth")
    monkeypatch.setitem(uvit.PRESETS, "tiny", net.config)
    out = tmp_path / "out.npz"
    sample(SampleConfig(official=tmp_path / "nnet_ema.pth", preset="tiny", out=out, num=2, steps=3))
    with np.load(out) as file:
        drawn = file["arr_0"]
        assert list(file) == ["arr_0"]
    noise = torch.from_numpy(seed_noise([0, 1], (1, 8, 8)))
    with torch.no_grad():
        steps = sigma_steps(3, 0.010485992786702987, 152.1669702839464)
        expected = heun(VPPrecond(net), noise, None, steps)
    assert np.abs(drawn.astype(int) - to_uint8(expected.numpy())).max() <= 1


def test_released_latents_on_stable_diffusions_schedule(tmp_path, monkeypatch):
    """Its sigmas end at 14.6146, known of Stable Diffusion; what is drawn is divided by 0.18215 to decode."""
    case = load_case("uvit_latent")
    net = load_official(case.meta["config"], case.state_dict)
    torch.save(case.state_dict, tmp_path / "nnet_ema.pth")
    monkeypatch.setitem(uvit.PRESETS, "h2_imagenet256", net.config)
    released = SampleConfig(official=tmp_path / "nnet_ema.pth", preset="h2_imagenet256", num=2, steps=3)
    with pytest.raises(ValueError, match="latents are no pictures"):  # before the weights are read
        sample(replace(released, out=tmp_path / "out.png", official=tmp_path / "missing.pth"))
    sample(replace(released, out=tmp_path / "out.npz"))
    drawn, labels = arrays(tmp_path / "out.npz")
    c = net.config
    noise = torch.from_numpy(seed_noise([0, 1], (c.in_channels, c.img_size, c.img_size)))
    with torch.no_grad():
        steps = sigma_steps(3, 0.0291671, 14.6146412)
        expected = heun(StableDiffusionPrecond(net), noise, torch.from_numpy(labels), steps)
    np.testing.assert_allclose(drawn, expected.numpy() / 0.18215, rtol=1e-4, atol=1e-4)


def test_stable_diffusions_steps():
    """The steps that DPM-Solver's discrete schedule, run on the same betas in float32, gives the network."""
    sigma = torch.tensor([0.0292, 0.05, 0.3, 1.0, 3.0, 10.0, 14.6])
    told = []
    x = torch.ones(7, 4, 2, 2)
    D_x = StableDiffusionPrecond(lambda x, n, labels: told.append(n) or 3 * x)(x, sigma)
    steps = [1.0022, 2.9205, 81.7486, 354.8901, 674.1552, 934.5067, 999.8346]
    np.testing.assert_allclose(told[0], steps, rtol=5e-5)
    expected = 1 - sigma * 3 / (1 + sigma**2) ** 0.5
    torch.testing.assert_close(D_x[:, 0, 0, 0], expected)


def test_choose_labels():
    assert choose_labels(SampleConfig(num=4), 3) == [0, 1, 2, 0]
    assert choose_labels(SampleConfig(num=3, labels=(2, 1)), 3) == [2, 1, 2]
    assert choose_labels(SampleConfig(num=3), 0) is None
    with pytest.raises(ValueError, match=r"labels \[3\] are out of range: this network has classes 0\.\.2"):
        choose_labels(SampleConfig(labels=(0, 3)), 3)
    with pytest.raises(ValueError, match="unconditional"):
        choose_labels(SampleConfig(labels=(0,)), 0)


def test_guidance_needs_something_to_guide_with(tmp_path):
    net = UViT(replace(NET, num_classes=10, null_class=False))
    statistics = {"latent_mean": None, "latent_std": None}
    header = {"network": "minimal_uvit", "config": asdict(net.config), "objective": "edm", **statistics}
    path = tmp_path / "a.safetensors"
    save_snapshot(path, net.state_dict(), header | {"nimg": 1, "sigma_rel": 0.05})
    with pytest.raises(ValueError, match="guidance needs a guide, or a network with a null class"):
        sample(SampleConfig(path, tmp_path / "out.png", guidance=2.0))
    sample(SampleConfig(path, tmp_path / "out.png", guidance=2.0, guide=path, num=1, steps=1))


@pytest.mark.parametrize("spoil, sentence", [
    (lambda data: data[:200], "truncated or not a safetensors"),
    (lambda data: data[:-1], "truncated or not a safetensors"),
    (lambda data: b"", "truncated or not a safetensors"),
    (lambda data: data.replace(b"minimal_uvit", b"someone_else"), "the network is someone_else, not a U-ViT"),
])
def test_spoilt_snapshots_are_named(folder, tmp_path, spoil, sentence):
    source = next((folder / "snapshots").glob("000000128-0.050*"))
    path = tmp_path / "bad.safetensors"
    path.write_bytes(spoil(source.read_bytes()))
    with pytest.raises(ValueError, match=rf"bad\.safetensors.*{sentence}"):
        load(path)
