"""The tinygrad twins of minimal_uvit, posthoc_ema, shared: against the released networks, torch and numpy."""

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from golden_cases import MATH, array, assert_close, cases, load_case
from test_diffusion import SCHEDULE, SHAPE, D, name_in
from tinygrad_cases import (  # noqa: F401
    Tensor,
    arrays,
    assert_same_gradients,
    compile_quickly,
    copy_weights,
    error,
    get_state_dict,
    gradients,
    to_tinygrad,
)

import minimal_uvit.model as uvit
import posthoc_ema.ema as torch_ema
from minimal_uvit.model import UViTConfig
from minimal_uvit.model_tinygrad import UViT
from minimal_uvit.official import load_official, official_name
from minimal_uvit.train import vp_loss
from posthoc_ema.ema_tinygrad import PowerFunctionEMA, TraditionalEMA
from shared.diffusion import EDMPrecond, VPPrecond, edm_loss, log_normal_sigma, vp_uniform_sigma
from shared.long_skip import Kind, LongSkipConfig
from shared.samplers import dpmpp_2m, guided, heun, sigma_steps, unlabelled

TINY = UViTConfig(img_size=4, patch_size=2, in_channels=3, width=16, depth=4, num_heads=2)
QUICK = ("uvit_class", "scalelong_learnable")
GOLDEN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in cases("uvit") + cases("scalelong")
]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    case = load_case(name)
    released = load_official(case.meta["config"], case.state_dict)
    net = UViT(released.config)
    copy_weights(released, net)
    out = net(**arrays(case.inputs("x", "timesteps", "labels", "context")))
    loss = (out * Tensor(array(f"{name}:probe", out.shape))).sum()
    grads = gradients(loss, net, out)
    assert_close(torch.from_numpy(out.numpy()), case.arrays["out"])
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    for released_name, norm in case.meta["grad_norm"].items():
        ours = np.linalg.norm(grads[official_name(released_name, net.config)])
        assert ours == pytest.approx(norm or 0, rel=2e-4, abs=1e-7), released_name


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_random_config(kind, seed):
    """Weights by name, then outputs to 2e-5 and gradients to 2e-4 of torch's."""
    rng = random.Random(seed)
    heads, classes, text = rng.choice([1, 2]), rng.choice([0, 3]), rng.choice([0, 2])
    config = replace(
        TINY, width=8 * heads, num_heads=heads, mlp_ratio=rng.choice([1, 2.5]), qkv_bias=rng.random() < 0.5,
        mlp_time_embed=rng.random() < 0.5, num_classes=classes, null_class=classes > 0,
        context_dim=5 * (text > 0), context_tokens=text, conv=rng.random() < 0.7,
        long_skip=LongSkipConfig(kind, kappa=0.6, reduction=2),
    )  # fmt: skip
    torch.manual_seed(seed)
    net, twin = uvit.UViT(config), UViT(config)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    copy_weights(net, twin)
    inputs = {"x": torch.randn(2, 3, 4, 4), "timesteps": torch.tensor([999.0, 3.25])}
    if text:
        inputs["context"] = torch.randn(2, text, 5)
    if classes and rng.random() < 0.7:
        inputs["labels"] = torch.tensor([2, 0])
    probe = torch.randn(2, 3, 4, 4)
    expected, out = net(**inputs), twin(**arrays(inputs))
    (expected * probe).sum().backward()
    grads = gradients((out * Tensor(probe.numpy())).sum(), twin, out)
    assert error(out, expected) <= 2e-5
    assert_same_gradients(grads, net)


def test_initial_weights_are_distributed_alike():
    """Mean and standard deviation over the elements of each weight that has many, to what so many draws
    allow: five standard errors of both."""
    config = replace(TINY, depth=2, num_classes=40, mlp_time_embed=True)
    torch.manual_seed(0)
    Tensor.manual_seed(0)
    net, weights = uvit.UViT(config), get_state_dict(UViT(config))
    Tensor.realize(*weights.values())
    large = [name for name, value in weights.items() if value.numel() >= 64]
    assert {"pos_embed", "label_embed.weight", "patch_embed.weight"} <= {*large}
    for name in large:
        ours, expected = weights[name].numpy(), net.state_dict()[name].numpy()
        assert ours.std() == pytest.approx(expected.std(), rel=5 / ours.size**0.5), name
        assert abs(ours.mean() - expected.mean()) <= 7 * expected.std() / ours.size**0.5, name


def test_impossible_inputs():
    x, t = Tensor.zeros(2, 3, 4, 4), Tensor.zeros(2)
    labelled = UViT(replace(TINY, num_classes=5))
    calls = [
        (UViT(TINY), (Tensor.zeros(2, 3, 4, 6), t), r"\(3, 4, 6\)"),
        (UViT(TINY), (x, t, Tensor([0, 1])), "unconditional"),
        (labelled, (x, t), "needs labels"),
        (labelled, (x, t, Tensor([0, 5])), r"0\.\.5 not in 0\.\.4"),
        (UViT(replace(TINY, context_dim=4, context_tokens=2)), (x, t), "context"),
    ]
    for net, args, sentence in calls:
        with pytest.raises(ValueError, match=sentence):
            net(*args)


# The tracker ------------------------------------------------------------------------------------------------


class Weights:
    """A network of two weights, one a lone number, and a buffer."""

    def __init__(self, arrays: list[np.ndarray]):
        self.a, self.b = (to_tinygrad(torch.from_numpy(array)) for array in arrays)
        self.tied, self.count = self.a, Tensor([7]).is_param_(False)


class TorchWeights(torch.nn.Module):
    def __init__(self, arrays: list[np.ndarray]):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.from_numpy(a.copy())) for a in arrays)


@pytest.mark.parametrize("ema, reference, options", [
    (PowerFunctionEMA, torch_ema.PowerFunctionEMA, ([0.05, 0.1],)),
    (TraditionalEMA, torch_ema.TraditionalEMA, (50.0,)),
])  # fmt: skip
def test_tracker(ema, reference, options):
    rng = np.random.default_rng(0)
    first = [np.asarray(rng.standard_normal(shape), np.float32) for shape in ((3, 4), ())]
    net, torch_net = Weights(first), TorchWeights(first)
    ours, theirs = ema(net, *options), reference(torch_net, *options)
    for step in range(1, 9):
        for p, q in zip((net.a, net.b), torch_net.parameters(), strict=True):
            value = np.asarray(rng.standard_normal(p.shape), np.float32)
            p.assign(to_tinygrad(torch.from_numpy(value))).realize()
            q.data.copy_(torch.from_numpy(value))
        ours.update(10 * step)
        theirs.update(10 * step)
        if step == 5:  # a tracker that takes over goes on from there
            state, ours = ours.state_dict(), ema(net, *options)
            ours.load_state_dict(state)
    for length in ours.lengths:
        weights = ours.weights(length)
        assert list(weights) == list(get_state_dict(net))
        assert weights["tied"] is weights["a"] and weights["count"].item() == 7
        for name, value in theirs.weights(length).items():
            assert error(weights[name], value) <= 1e-6
    with pytest.raises(ValueError, match="EMA update at time 80, but the last was at 80"):
        ours.update(80)
    with pytest.raises(ValueError, match="is tracked: only"):
        ours.weights(0.5)
    with pytest.raises(ValueError, match="lengths"):
        ours.load_state_dict(ours.state_dict() | {"lengths": [0.2]})


# Samplers and losses: the same functions, on tinygrad's tensors ---------------------------------------------


@pytest.mark.parametrize("case", MATH["edm_sampler"][:2], ids=lambda case: name_in(case["noise"]))
def test_heun_golden(case):
    args, name = dict(case["args"]), name_in(case["noise"])
    denoiser = guided(D, unlabelled(D), args.pop("guidance", 1))
    churn = lambda k: Tensor(array(f"{name}:churn{k}", SHAPE))
    steps = [args.pop(key, default) for key, default in SCHEDULE.items()]
    out = heun(denoiser, Tensor(array(name, SHAPE)), None, sigma_steps(*steps), churn_noise=churn, **args)
    assert error(out, np.reshape(case["out"], SHAPE)) <= 1e-4


@pytest.mark.parametrize("case", MATH["dpmpp_2m"][:1], ids=lambda case: name_in(case["x0"]))
def test_dpmpp_golden(case):
    steps = [case[key] for key in SCHEDULE]
    out = dpmpp_2m(D, Tensor(array(name_in(case["x0"]), SHAPE)), None, sigma_steps(*steps))
    assert error(out, np.reshape(case["out"], SHAPE)) <= 1e-4


def test_losses():
    rng = np.random.default_rng(0)
    y, n = rng.standard_normal((2, 3, 2, 4, 4)).astype(np.float32)
    normal, uniform = rng.standard_normal(3).astype(np.float32), np.float32([0.1, 0.5, 0.9])
    for precond, loss, levels, draws in (
        (EDMPrecond, edm_loss, log_normal_sigma, normal), (VPPrecond, vp_loss, vp_uniform_sigma, uniform),
    ):  # fmt: skip
        net = lambda x, t, labels: x.tanh() * t.reshape(-1, 1, 1, 1) / 1000
        values = []
        for tensor in (Tensor, torch.from_numpy):
            sigma = levels(tensor(draws))
            values.append(loss(precond(net), tensor(y), sigma, tensor(n), None))
        assert error(*values) <= 1e-5
