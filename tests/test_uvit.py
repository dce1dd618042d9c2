"""minimal_uvit against the released U-ViT and ScaleLong, arXiv:2209.12152 and arXiv:2310.13545."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_cases import SIZES, assert_close, assert_grad_norms, cases, load_case

from minimal_uvit.model import PRESETS, UViT, UViTConfig, timestep_embedding
from minimal_uvit.official import load_official, official_name, read_official
from shared.long_skip import LongSkipConfig

TINY = UViTConfig(img_size=8, patch_size=2, in_channels=3, width=16, depth=4, num_heads=2)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", cases("uvit") + cases("scalelong"))
def test_golden(name, checkpointing):
    case = load_case(name)
    net = load_official(case.meta["config"] | {"use_checkpoint": checkpointing}, case.state_dict)
    out = net(**case.inputs("x", "timesteps", "labels", "context"))
    assert_close(out, case.arrays["out"])
    loss = (out * case.probe(out.shape)).sum()
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    loss.backward()
    ours = {name: official_name(name, net.config) for name in case.meta["state_dict"]}
    assert_grad_norms(net, case.meta["grad_norm"], ours)


# Parameter counts as measured of the released code. The row called s/4-deep is the deep S/2 on ImageNet-256
# latents: its count and its FLOPs are those of 4 channels, patches of 2 pixels and 1,001 classes.
@pytest.mark.parametrize("preset, row", [
    ("s2_cifar10", "uvit-s/2 cifar10 32"), ("s4_celeba64", "uvit-s/4 celeba 64"),
    ("s2_deep_256", "uvit-s/4-deep"), ("m4_imagenet64", "uvit-m/4 imagenet64"),
    ("l4_imagenet64", "uvit-l/4 imagenet64"),
    ("l2_imagenet256", "uvit-l/2 imagenet256 latent"), ("h2_imagenet256", "uvit-h/2 imagenet256 latent"),
    ("l4_imagenet512", "uvit-l/4 imagenet512 latent"), ("h4_imagenet512", "uvit-h/4 imagenet512 latent"),
])
def test_released_sizes(preset, row):
    with torch.device("meta"):
        assert sum(p.numel() for p in UViT(PRESETS[preset]).parameters()) == SIZES[row]["parameters"]


def test_timestep_embedding_closed_form():
    out = timestep_embedding(torch.tensor([0.0, 2.5]), 5).numpy()
    freqs = np.array([1.0, 10000**-0.5])
    expected = np.array([[1, 1, 0, 0, 0], [*np.cos(2.5 * freqs), *np.sin(2.5 * freqs), 0]])
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_null_class_is_the_last_label():
    net = UViT(replace(TINY, num_classes=5, null_class=True))
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 500.0])
    assert torch.equal(net(x, t), net(x, t, torch.tensor([4, 4])))


def test_skips_reach_their_blocks():
    """With kappa^(i-1) the innermost skip, which meets the first decoder block, is scaled the most."""
    net = UViT(replace(TINY, long_skip=LongSkipConfig("constant", kappa=0.5)))
    seen = []
    for block in net.out_blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    features = []
    for block in net.in_blocks:
        block.register_forward_hook(lambda module, args, out: features.append(out))
    net(torch.randn(1, 3, 8, 8), torch.tensor([3.0]))
    torch.testing.assert_close(seen[0], 0.5 * features[1])
    torch.testing.assert_close(seen[1], features[0])


@pytest.mark.parametrize("change, sentence", [
    (dict(patch_size=3), "patch_size"), (dict(depth=3), "depth"), (dict(num_heads=3), "num_heads"),
    (dict(img_size=0), "at least 1"), (dict(null_class=True), "null_class"),
    (dict(context_dim=8), "together"),
])
def test_impossible_configs(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **change)


def test_impossible_inputs():
    x, t = torch.randn(2, 3, 8, 8), torch.zeros(2)
    labelled, text = UViT(replace(TINY, num_classes=5)), UViT(replace(TINY, context_dim=4, context_tokens=2))
    calls = [
        (UViT(TINY), (torch.randn(2, 3, 8, 6), t), r"\(3, 8, 6\)"),
        (UViT(TINY), (torch.randn(2, 1, 8, 8), t), r"\(1, 8, 8\)"),
        (UViT(TINY), (x, t, torch.tensor([0, 1])), "unconditional"),
        (labelled, (x, t), "needs labels"),
        (labelled, (x, t, torch.tensor([0, 5])), r"0\.\.5 not in 0\.\.4"),
        (labelled, (x, t, torch.tensor([-1, 0])), r"-1\.\.0 not in"),
        (text, (x, t), "context"),
        (text, (x, t, None, torch.zeros(2, 3, 4)), "context"),
    ]
    for net, args, sentence in calls:
        with pytest.raises(ValueError, match=sentence):
            net(*args)


def test_official_weights_must_fit():
    case = load_case("uvit_uncond")
    state = case.state_dict
    state["extra"] = state.pop("norm.bias")
    state["norm.weight"] = torch.zeros(3)
    faults = r"extra is not of .*norm.bias is missing.*norm.weight has shape \(3,\), not \(32,\)"
    with pytest.raises(ValueError, match=faults):
        load_official(case.meta["config"], state)
    with pytest.raises(ValueError, match="no argument with_dropout"):
        load_official(case.meta["config"] | {"with_dropout": 1}, state)


def test_read_official_file(tmp_path):
    case = load_case("uvit_uncond")
    net = load_official(case.meta["config"], case.state_dict)
    path = tmp_path / "nnet_ema.pth"
    torch.save(case.state_dict, path)
    assert all(torch.equal(a, b) for a, b in zip(
        read_official(path, net.config).parameters(), net.parameters(), strict=True))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"nnet_ema\.pth is not a PyTorch state dict"):
        read_official(path, net.config)
