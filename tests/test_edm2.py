"""edm2_mp_unet against the released EDM2, arXiv:2312.02696v2, and against the paper's equations."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden_cases import SIZES, array, assert_close, assert_grad_norms, cases, load_case
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn.parallel import DistributedDataParallel

from edm2_mp_unet.model import (
    PRESETS,
    Block,
    Clip,
    Denoiser,
    EDM2Config,
    MPConv,
    MPFourier,
    clip,
    mp_cat,
    mp_silu,
    mp_sum,
    normalize,
    resample,
)
from edm2_mp_unet.official import load_official, official_name
from shared.long_skip import LongSkipConfig, LongSkipScaling

TINY = EDM2Config(
    in_channels=3, num_classes=5, channels=8, num_blocks=1, channels_per_head=8, logvar_channels=16
)
KINDS = ("none", "inv_sqrt2", "constant", "learnable", "learnable_shared")


def inputs(B: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(B, 3, 8, 8, generator=generator)
    return x, torch.tensor([0.1, 1.0, 20.0])[:B], torch.tensor([0, 4, 2])[:B]


def awake(config: EDM2Config) -> Denoiser:
    """A network whose gains are not 0, so that every weight matters."""
    torch.manual_seed(0)
    net = Denoiser(config)
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, MPConv) and layer.gain is not None:
                layer.gain.fill_(0.7)
    return net


def magnitude(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


# Released networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", cases("edm2"))
def test_golden(name, checkpointing):
    case = load_case(name)
    net = load_official(case.meta["config"], case.state_dict).eval()
    net.unet.config = replace(net.config, checkpointing=checkpointing)
    x, sigma, labels = (case.inputs("x", "sigma", "labels").get(k) for k in ("x", "sigma", "labels"))
    D_x, logvar = net(x, sigma, labels, return_logvar=True)
    assert_close(D_x, case.arrays["denoised"])
    assert_close(logvar, case.arrays["logvar"])
    if labels is not None:
        assert_close(net(x, sigma), case.arrays["denoised_unlabelled"])
        one_hot = F.one_hot(labels, net.config.num_classes)
        assert torch.equal(net(x, sigma, one_hot), D_x)
        assert torch.equal(net(x, sigma, torch.zeros(len(x), net.config.num_classes)), net(x, sigma))
    loss = (D_x * case.probe(D_x.shape)).sum() + logvar.sum()
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    loss.backward()
    ours = {name: official_name(name, net.config) for name in case.meta["state_dict"]}
    assert_grad_norms(net, case.meta["grad_norm"], ours)


@pytest.mark.parametrize("name", cases("edm2"))
def test_golden_training(name):
    """The released training steps, forced weight normalization on: losses, weights, and D after them."""
    case = load_case(name)
    recipe = case.meta["train"]
    net = load_official(case.meta["config"], case.state_dict).train()
    params = dict(net.named_parameters())
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe["lr"], betas=tuple(recipe["betas"]))
    x, sigma, labels = (case.inputs("x", "sigma", "labels").get(k) for k in ("x", "sigma", "labels"))

    def normal(what: str, *shape: int) -> Tensor:
        return torch.from_numpy(array(f"{name}:{what}", shape))

    def assert_norms(golden: dict[str, float]) -> None:
        for theirs, norm in golden.items():
            assert params[official_name(theirs, net.config)].norm().item() == pytest.approx(norm, rel=1e-4)

    images = 0.5 * normal("images", *x.shape)
    for k in range(recipe["steps"]):
        levels = torch.exp(normal(f"rnd{k}", len(x), 1, 1, 1) * recipe["P_std"] + recipe["P_mean"])
        noisy = images + levels * normal(f"noise{k}", *x.shape)
        D_x, logvar = net(noisy, levels.flatten(), labels, return_logvar=True)
        weight = (levels**2 + 0.25) / (levels * 0.5) ** 2
        logvar = logvar[:, None, None, None]
        loss = weight / logvar.exp() * (D_x - images) ** 2 + logvar
        assert loss.mean().item() == pytest.approx(case.arrays["train_losses"][k], rel=2e-4)
        optimizer.zero_grad()
        (loss.sum() / len(x)).backward()
        optimizer.step()
        if k == 0:
            assert_norms(case.meta["weight_norm_after_1"])
    assert_norms(case.meta["weight_norm_after"])
    assert_close(net.eval()(x, sigma, labels), case.arrays["denoised_after"])


# Of a size that was never released there is a row too.
EXTRA = {"edm2_img64_xxl": replace(PRESETS["edm2_img64_xl"], channels=448)}


@pytest.mark.parametrize("row", [row for row in SIZES if row.startswith("edm2")])
def test_released_sizes(row):
    with torch.device("meta"):
        net = Denoiser((PRESETS | EXTRA)[row.replace("-", "_")])
    assert sum(p.numel() for p in net.parameters()) == SIZES[row]["parameters"]


def test_official_weights_must_fit():
    case = load_case("edm2_uncond")
    state = case.state_dict
    state["unet.extra"] = state.pop("unet.out_gain")
    state["logvar_linear.weight"] = torch.zeros(3)
    faults = r"logvar_linear.weight has shape \(3,\).*conv_out.gain is missing.*extra is not of "
    with pytest.raises(ValueError, match=faults):
        load_official(case.meta["config"], state)
    with pytest.raises(ValueError, match="no argument depth"):
        load_official(case.meta["config"] | {"depth": 1}, state)


# Closed forms of the primitives -----------------------------------------------------------------------------


def test_eq_47_weight_normalization():
    layer = MPConv(4, 6, kernel=3, scale=0.4)
    w = layer.weight.detach().numpy().astype(np.float64)
    norm = np.sqrt((w**2).sum((1, 2, 3), keepdims=True))
    expected = 0.4 * w / (norm / 6 + 1e-4) / 6  # fan-in 36
    np.testing.assert_allclose(layer.filters(torch.float32).detach().numpy(), expected, rtol=1e-6)
    linear = MPConv(3, 2, gain=2.5)
    w = linear.weight.detach().numpy().astype(np.float64)
    w = 2.5 * w / (np.linalg.norm(w, axis=1, keepdims=True) + 1e-4 * 3**0.5)
    x = np.array([[1.0, -2.0, 0.5]])
    np.testing.assert_allclose(linear(torch.tensor(x).float()).detach().numpy(), x @ w.T, rtol=1e-5)


def test_eq_66_forced_weight_normalization():
    net = awake(TINY)
    before = {name: p.detach().clone().double().numpy() for name, p in net.named_parameters()}
    net.train()(*inputs())
    for name, p in net.named_parameters():
        w = before[name]
        if name.endswith("weight"):
            axes = tuple(range(1, w.ndim))
            w = w / (1e-4 + np.sqrt((w**2).mean(axes, keepdims=True)))
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5)


def test_eq_75_fourier():
    net = MPFourier(1000)
    out = net(torch.tensor([0.3, -2.0])).numpy()
    x = np.array([0.3, -2.0])
    expected = np.sqrt(2) * np.cos(np.outer(x, net.freqs.double().numpy()) + net.phases.double().numpy())
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert 0.95 < np.sqrt((out**2).mean()) < 1.05
    assert net.freqs.std().item() == pytest.approx(2 * math.pi, rel=0.1)
    assert net.phases.max().item() == pytest.approx(2 * math.pi, rel=0.01)


def test_eq_81_silu():
    x = np.linspace(-4, 4, 9)
    expected = x / (1 + np.exp(-x)) / 0.596
    np.testing.assert_allclose(mp_silu(torch.tensor(x)).numpy(), expected, rtol=1e-12)
    x = np.linspace(-12, 12, 100001)  # its magnitude over a standard normal
    power = (x / (1 + np.exp(-x)) / 0.596) ** 2 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    assert np.sqrt(power.sum() * (x[1] - x[0])) == pytest.approx(1, abs=1e-3)


def test_eq_88_sum():
    a, b, t = np.array([1.0, -2.0]), np.array([0.5, 3.0]), 0.3
    expected = ((1 - t) * a + t * b) / np.sqrt((1 - t) ** 2 + t**2)
    np.testing.assert_allclose(mp_sum(torch.tensor(a), torch.tensor(b), t).numpy(), expected, rtol=1e-12)


def test_eq_103_cat():
    rng = np.random.default_rng(0)
    a, b, t = rng.standard_normal((2, 3, 4, 4)), rng.standard_normal((2, 5, 4, 4)), 0.4
    C = np.sqrt((3 + 5) / ((1 - t) ** 2 + t**2))
    expected = C * np.concatenate([(1 - t) / np.sqrt(3) * a, t / np.sqrt(5) * b], axis=1)
    a, b = torch.tensor(a), torch.tensor(b)
    np.testing.assert_allclose(mp_cat(a, b, t).numpy(), expected, rtol=1e-12)
    assert torch.equal(mp_cat(a, b, t), mp_cat(a, b, t, kappa=1.0))  # what `none` gives
    ones = torch.ones(2, 5, 1, 1)
    torch.testing.assert_close(mp_cat(a, b, t, ones), mp_cat(a, b, t), rtol=1e-6, atol=1e-6)


def test_cat_with_kappa():
    """C [(1-t)/sqrt(Na) a, t kappa/sqrt(Nb) b], C from the mean of kappa^2 over each sample."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 4, 4)), rng.standard_normal((2, 5, 4, 4))
    kappa, t = rng.random((2, 5, 1, 1)), 0.4
    power = (kappa**2).mean((1, 2, 3), keepdims=True)
    C = np.sqrt(8 / ((1 - t) ** 2 + t**2 * power))
    expected = np.concatenate([C * (1 - t) / np.sqrt(3) * a, C * t * kappa / np.sqrt(5) * b], axis=1)
    out = mp_cat(*map(torch.tensor, (a, b)), t, torch.tensor(kappa))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)


def test_pixel_norm_and_resampling():
    x = torch.randn(2, 6, 4, 4)
    expected = x.numpy() / (1e-4 + np.sqrt((x.numpy() ** 2).mean(1, keepdims=True)))
    np.testing.assert_allclose(normalize(x, 1).numpy(), expected, rtol=1e-5)
    halved = x.numpy().reshape(2, 6, 2, 2, 2, 2).mean((3, 5))
    np.testing.assert_allclose(resample(x, (1, 1), "down").numpy(), halved, rtol=1e-5, atol=1e-6)
    assert torch.equal(resample(x, (3, 3), "up"), x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    # Any other filter is a convolution; (0, 1, 1, 0) is (1, 1) by that path.
    for mode in ("down", "up"):
        torch.testing.assert_close(resample(x, (0, 1, 1, 0), mode), resample(x, (1, 1), mode))
    flat = resample(torch.ones(1, 2, 8, 8), (1, 3, 3, 1), "up")
    assert flat.shape == (1, 2, 16, 16)
    torch.testing.assert_close(flat[:, :, 2:-2, 2:-2], torch.ones(1, 2, 12, 12))


def test_a_block_clips_what_it_gives():
    """Values at the bounds keep no gradient, others the gradient of no clipping."""
    torch.manual_seed(0)
    x, emb, direction = torch.randn(2, 8, 4, 4), torch.randn(2, 16), torch.randn(2, 12, 4, 4)
    free = Block(replace(TINY, clip_act=None), 16, "enc", 8, 12)
    clipped = Block(replace(TINY, clip_act=0.5), 16, "enc", 8, 12)
    clipped.load_state_dict(free.state_dict())
    out = free(x, emb)
    inside = (out.abs() < 0.5).float()
    assert 0.2 < inside.mean() < 0.8
    torch.testing.assert_close(clipped(x, emb), out.clip(-0.5, 0.5), rtol=0, atol=0)
    (direction * inside * out).sum().backward()
    (direction * clipped(x, emb)).sum().backward()
    for p, q in zip(free.parameters(), clipped.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parametrize("clipped", [clip, Clip.apply])
def test_clipping(clipped):
    """The compiled way too; at the bounds there is no gradient, and infinity is a bound."""
    x = torch.tensor([-torch.inf, -2.5, -2, -1.9, 0, 1, 2, torch.inf], requires_grad=True)
    out = clipped(1 * x, 2.0)
    assert out.tolist() == pytest.approx([-2, -2, -2, -1.9, 0, 1, 2, 2], rel=1e-6)
    out.backward(torch.arange(1.0, 9))
    assert x.grad.tolist() == [0, 0, 0, 4, 5, 6, 0, 0]


def test_clipped_values_that_were_rounded_up():
    """bfloat16's 0.3 is 0.30078, and compiled code compares it with 0.3."""
    saved = SimpleNamespace(bound=0.3, saved_tensors=[torch.tensor([-0.30078, 0.25, 0.30078])])
    assert Clip.backward(saved, torch.ones(3))[0].tolist() == [0, 1, 0]


# Magnitudes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_concatenation_keeps_unit_magnitude(kind):
    """At every long skip of a network, for features of unit magnitude; a bare kappa would not."""
    net = awake(replace(TINY, channels=64, num_blocks=2, long_skip=LongSkipConfig(kind, kappa=0.5)))
    scaling, widths = net.unet.long_skip, net.unet.long_skip.widths
    for i, width in enumerate(widths, start=1):
        a, skip = torch.randn(16, 96, 8, 8), torch.randn(16, width, 8, 8)
        a, skip = a / magnitude(a), skip / magnitude(skip)
        kappa = scaling.kappa(skip, i)
        assert magnitude(mp_cat(a, skip, 0.5, kappa)) == pytest.approx(1, abs=0.01)
        if kind != "none" and i > 1:
            assert magnitude(mp_cat(a, kappa * skip, 0.5)) < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_depth_keeps_unit_magnitude(kind):
    """Twelve skips join one after the other, each through a layer: still 1; with a bare kappa it decays."""
    torch.manual_seed(0)
    N, width = 12, 1024
    scaling = LongSkipScaling(LongSkipConfig(kind, kappa=0.8), [width] * N, (2, 3), layer=MPConv)
    kept = bare = torch.randn(64, width, 2, 2)
    for i in range(N, 0, -1):
        skip, layer = torch.randn(64, width, 2, 2), MPConv(2 * width, width, kernel=1)
        kappa = scaling.kappa(skip, i)
        kept, bare = layer(mp_cat(kept, skip, 0.5, kappa)), layer(mp_cat(bare, kappa * skip, 0.5))
    assert magnitude(kept) == pytest.approx(1, abs=0.01)
    assert kind in ("none", "constant") or magnitude(bare) < 0.75  # `constant` ends with kappa_1 = 1


@pytest.mark.parametrize("kind", KINDS)
def test_network_output_keeps_magnitude(kind):
    """The whole UNet, 18 skips deep, with random weights. Zero padding and features that are not independent
    cost it some magnitude, as they do the released one, and no scaling costs more."""
    outputs = []
    for long_skip in (LongSkipConfig(), LongSkipConfig(kind, kappa=0.8)):
        torch.manual_seed(0)
        net = Denoiser(replace(TINY, img_size=16, channels=64, num_blocks=8, long_skip=long_skip))
        net.unet.conv_out = MPConv(64, 64, kernel=3)
        with torch.no_grad():
            outputs.append(magnitude(net.unet(torch.randn(4, 3, 16, 16), torch.randn(4), torch.eye(5)[:4])))
    assert 0.8 < outputs[0] < 1.02
    assert outputs[1] / outputs[0] == pytest.approx(1, abs=0.15)


# Initialization ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_untrained_denoiser_is_c_skip_x(training):
    x, sigma, labels = inputs()
    D_x, logvar = Denoiser(TINY).train(training)(x, sigma, labels, return_logvar=True)
    c_skip = (0.25 / (sigma**2 + 0.25))[:, None, None, None]
    assert torch.equal(D_x, c_skip * x)
    assert logvar.shape == (3,) and D_x.dtype == logvar.dtype == torch.float32


@pytest.mark.parametrize("sigma", [0.002, 0.1, 1.0, 80.0])
def test_untrained_loss_is_1(sigma):
    """lambda(sigma) E|D - y|^2 = 1 for data of standard deviation sigma_data, here exactly of it."""
    y, n = torch.randn(2, 1, 3, 8, 8, dtype=torch.float64)
    y = 0.5 * y / y.square().mean().sqrt()
    n = n - (n * y).sum() / (y * y).sum() * y  # uncorrelated, not only in expectation
    n = n / n.square().mean().sqrt()
    D_x = Denoiser(TINY)((y + sigma * n).float(), torch.tensor([sigma])).double()
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    assert (weight * (D_x - y).square().mean()).item() == pytest.approx(1, rel=1e-4)


# Weights in training and evaluation -------------------------------------------------------------------------


def loss_of(net: nn.Module, scale: float = 1.0) -> Tensor:
    x, sigma, labels = inputs()
    D_x, logvar = net(scale * x, sigma, labels, return_logvar=True)
    return D_x.square().mean() + logvar.mean()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_forward_passes_before_one_backward(checkpointing):
    together = awake(replace(TINY, checkpointing=checkpointing)).train()
    (loss_of(together) + loss_of(together, 2.0)).backward()
    apart = awake(TINY).train()
    loss_of(apart).backward()
    loss_of(apart, 2.0).backward()
    for p, q in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_normalizing_again_changes_nothing():
    """The first time leaves filters within 1e-4 of their fixed point, where they then stay."""
    net, stages = awake(TINY), []
    for _ in range(3):
        net.normalize_weights()
        stages.append([p.detach().clone() for p in net.parameters()])
    for p, q, r in zip(*stages, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=0)
        torch.testing.assert_close(q, r, rtol=3e-7, atol=0)


def test_gradients_are_orthogonal_to_weights():
    net = awake(TINY).train()
    loss_of(net).backward()
    for layer in net.modules():
        if isinstance(layer, MPConv):
            w, g = layer.weight.detach().flatten(1), layer.weight.grad.flatten(1)
            along = (w * g).sum(1).abs() / (w.norm(dim=1) * g.norm(dim=1)).clamp(min=1e-12)
            assert along.max() < 1e-3


def test_evaluation_never_writes():
    net = awake(TINY).eval()
    before = copy.deepcopy(net.state_dict())
    loss_of(net).backward()
    with torch.no_grad():
        loss_of(net)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_kept_filters_notice_every_change():
    net, other = awake(TINY).eval(), awake(TINY).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.3 * torch.randn_like(p))
    with torch.no_grad(), torch.inference_mode():
        first, target = net(*inputs()), other(*inputs())
    assert torch.equal(net(*inputs()), first)  # with gradients, from the weights themselves
    state = copy.deepcopy(net.state_dict())

    def assert_is(expected: Tensor, restore: bool = True) -> None:
        with torch.no_grad():
            assert torch.equal(net(*inputs()), expected)
            assert torch.equal(net(*inputs()), expected)
            if restore:
                net.load_state_dict(state)
                assert torch.equal(net(*inputs()), first)

    net.load_state_dict(other.state_dict())
    assert_is(target)
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_is(target)
    with torch.no_grad():
        torch._foreach_copy_(list(net.parameters()), list(other.parameters()))
    assert_is(target)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        p.data = q.data.clone()  # the storage is another
    assert_is(target)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        p.data.copy_(q)  # nothing shows that, except that it ends with `eval`
    net.eval()
    assert_is(target)
    for _ in range(3):  # tensors that come and go, perhaps at one address
        params = {name: q.detach().clone() for name, q in other.named_parameters()}
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(net, params, inputs()), target)
        del params
        assert_is(first, restore=False)
    clone = copy.deepcopy(net)
    clone.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(clone(*inputs()), target)
    assert_is(first)


def test_network_made_in_inference_mode():
    with torch.inference_mode():
        net = awake(TINY).eval()
        assert torch.equal(net(*inputs()), awake(TINY).eval()(*inputs()))


def test_compiled_evaluation_is_one_graph():
    torch._dynamo.reset()
    net = awake(replace(TINY, channel_mult=(1,))).eval()
    with torch.no_grad():
        out = torch.compile(net, fullgraph=True, backend="eager")(*inputs())
        torch.testing.assert_close(out, net(*inputs()), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_training_is_one_graph(checkpointing):
    """Forced normalization is in the graph: weights and gradients are those of the network as it is. No mask
    of what is clipped is kept for the backward pass."""
    torch._dynamo.reset()
    config = replace(TINY, channel_mult=(1,), dropout=0.0, clip_act=1, long_skip=LongSkipConfig("learnable"))
    net = awake(replace(config, checkpointing=checkpointing)).train()
    plain = awake(config).train()
    kept = []

    def note(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        kept.extend(node.meta["val"] for node in graph.graph.output_node().all_input_nodes)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=note, bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition,  # Inductor's
    )
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    (loss_of(compiled) + loss_of(compiled, 2.0)).backward()
    assert not any(torch.is_tensor(value) and value.dtype == torch.bool and value.ndim == 4 for value in kept)
    (loss_of(plain) + loss_of(plain, 2.0)).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def train_a_rank(rank: int, file: str, queue) -> None:
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    net = awake(TINY).train()
    parallel = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x, sigma, labels = (value[rank : rank + 1] for value in inputs(2))
    for _ in range(2):
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            D_x, logvar = parallel(scale * x, sigma, labels, return_logvar=True)
            (D_x.square().mean() + logvar.mean()).backward()
        optimizer.step()
    queue.put((rank, [p.detach().numpy() for p in net.parameters()]))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_data_parallel(tmp_path):
    """Two ranks of one image each hold the same weights, those of one rank with both images."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = [context.Process(target=train_a_rank, args=(r, str(tmp_path / "ranks"), queue)) for r in (0, 1)]
    for process in ranks:
        process.start()
    weights = dict(queue.get() for _ in ranks)
    for process in ranks:
        process.join()
    net = awake(TINY).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x, sigma, labels = inputs(2)
    for _ in range(2):
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            D_x, logvar = net(scale * x, sigma, labels, return_logvar=True)
            (D_x.square().mean() + logvar.mean()).backward()
        optimizer.step()
    for p, a, b in zip(net.parameters(), weights[0], weights[1], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, p.detach().numpy(), rtol=1e-3, atol=1e-3)


# Precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_low_precision(dtype, bound):
    """D in float32 within `bound` of the largest value; the embedding and u exactly as in float32."""
    net, seen = awake(replace(TINY, channels=32)).eval(), []
    net.unet.emb_noise.register_forward_hook(lambda module, args, out: seen.append(out))
    net.unet.conv_in.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        D_x, logvar = net(*inputs(), return_logvar=True)
        with torch.autocast("cpu", dtype):
            low, low_logvar = net(*inputs(), return_logvar=True)
    assert [out.dtype for out in seen] == [torch.float32, torch.float32, torch.float32, dtype]
    assert torch.equal(seen[0], seen[2]) and torch.equal(logvar, low_logvar)
    assert low.dtype == torch.float32
    assert 0 < (low - D_x).abs().max() / D_x.abs().max() < bound


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, sentence", [
    (dict(img_size=7), "cannot be halved"), (dict(img_size=0), "at least 1"),
    (dict(channel_mult=()), "at least 1"),
    (dict(channel_mult=(1, 0)), "at least 1"), (dict(num_blocks=0), "at least 1"),
    (dict(resample_filter=(1, 2, 1)), "even length"),
])
def test_impossible_configs(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **change)


def test_impossible_inputs():
    x, sigma, labels = inputs()
    net, unconditional = Denoiser(TINY), Denoiser(replace(TINY, num_classes=0))
    calls = [
        (net, (x[:, :2], sigma, labels), r"\(2, 8, 8\), but this EDM2 takes \(3, H, W\)"),
        (net, (x[:, :, :7], sigma, labels), "multiples of 2"),
        (net, (x[0], sigma, labels), r"\(8, 8\)"),
        (net, (x, sigma[:2], labels), r"sigma is \(2,\), but images are \(3, "),
        (net, (x, 0 * sigma, labels), "sigma 0 is not positive"),
        (net, (x, -sigma, labels), "sigma -20 is not positive"),
        (net, (x, sigma, torch.tensor([0, 5, 1])), r"labels 0\.\.5 not in 0\.\.4"),
        (net, (x, sigma, torch.tensor([0, -1, 1])), r"labels -1\.\.1 not in 0\.\.4"),
        (net, (x, sigma, torch.zeros(3, 4)), "neither an index nor 5 weights"),
        (unconditional, (x, sigma, labels), "unconditional"),
    ]
    for network, args, sentence in calls:
        with pytest.raises(ValueError, match=sentence):
            network(*args)
    assert net(torch.randn(1, 3, 16, 4), sigma[:1]).shape == (1, 3, 16, 4)  # any size that halves
