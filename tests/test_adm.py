"""adm_unet against the released guided-diffusion, arXiv:2105.05233."""

from dataclasses import replace

import pytest
import torch
from golden_cases import SIZES, assert_close, assert_grad_norms, cases, load_case

from adm_unet import model
from adm_unet.model import PRESETS, ADMClassifier, ADMConfig, ADMSuperRes, ADMUNet, build
from adm_unet.official import load_official, official_config, official_name, read_official
from shared.long_skip import Kind, LongSkipConfig

TINY = ADMConfig(img_size=8, in_channels=3, channels=32, channel_mult=(1, 2), attn_resolutions=(4,))


def randomized(config: ADMConfig) -> torch.nn.Module:
    """A network whose zero layers are not, so that everything has a gradient."""
    torch.manual_seed(0)
    net = build(config)
    for param in net.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return net


def inputs(net: torch.nn.Module, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    c = net.config
    x = torch.randn(batch, c.in_channels, c.img_size, c.img_size, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([3.0, 512.0])[:batch]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", cases("adm"))
def test_golden(name, checkpointing):
    case = load_case(name)
    net = load_official(case.meta["config"] | {"use_checkpoint": checkpointing}, case.state_dict)
    out = net(**case.inputs("x", "timesteps", "labels", "low_res"))
    assert_close(out, case.arrays["out"])
    loss = (out * case.probe(out.shape)).sum()
    assert loss.item() == pytest.approx(case.meta["loss"], rel=2e-4)
    loss.backward()
    ours = {name: official_name(name, net.config) for name in case.meta["state_dict"]}
    # Where a group is a single channel, its normalization undoes every shift before it: such gradients are 0,
    # and the golden ones what float32 makes of 0, at most 2e-5 beside norms of at least 1e-2.
    norms = case.meta["grad_norm"]
    assert_grad_norms(net, {name: norm for name, norm in norms.items() if norm > 2e-5}, ours)
    net.zero_grad()
    x, timesteps, *rest = case.inputs("x", "timesteps", "low_res", "labels").values()
    rest = [value.double() if value.is_floating_point() else value for value in rest]
    out = net.double()(x.double(), timesteps, *rest)
    (out * case.probe(out.shape)).sum().backward()
    params = dict(net.named_parameters())
    exact = {name: params[ours[name]].grad.norm().item() for name in norms}
    assert {name for name, norm in exact.items() if norm < 1e-10} == {n for n in norms if norms[n] <= 2e-5}


@pytest.mark.parametrize("preset, row", [
    ("imagenet64", "adm-64"), ("imagenet128", "adm-128"), ("imagenet256", "adm-256"),
    ("uncond256", "adm-256-uncond"), ("imagenet512", "adm-512"), ("superres64_256", "adm-64-256-upsampler"),
    ("classifier64", "adm-classifier-64"), ("classifier128", "adm-classifier-128"),
    ("classifier256", "adm-classifier-256"), ("classifier512", "adm-classifier-512"),
])
def test_released_sizes(preset, row):
    with torch.device("meta"):
        assert sum(p.numel() for p in build(PRESETS[preset]).parameters()) == SIZES[row]["parameters"]


def test_config_says_which_network():
    kinds = {"digits": ADMUNet, "superres": ADMSuperRes, "classifier": ADMClassifier}
    for preset, kind in kinds.items():
        assert type(build(PRESETS[preset])) is kind


@pytest.mark.parametrize("config", [
    TINY, replace(TINY, resblock_updown=False), replace(TINY, resblock_updown=False, conv_resample=False),
    replace(TINY, scale_shift_norm=False, depth=2), replace(TINY, qkv_first=True),
    replace(TINY, channels=64, channel_mult=(0.5, 1, 1.5), learn_sigma=True),
    replace(TINY, num_heads=4, num_heads_up=2, attn_resolutions=(8, 4)),
])
def test_every_parameter_learns(config):
    net = randomized(config)
    out = net(*inputs(net))
    assert out.shape == (2, 6 if config.learn_sigma else 3, 8, 8)
    (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_starts_as_zero():
    net = ADMUNet(TINY)
    assert net(*inputs(net)).count_nonzero() == 0
    net = ADMClassifier(replace(TINY, num_classes=5, pool="adaptive"))
    assert net(*inputs(net)).count_nonzero() == 0


@pytest.mark.parametrize("kind", Kind.__args__)
def test_skips_reach_their_blocks(kind):
    """The innermost skip meets the first decoder block, scaled the most by kappa^(i-1)."""
    net = randomized(replace(TINY, long_skip=LongSkipConfig(kind, kappa=0.5)))
    features, seen = [], []
    for block in [net.in_conv, *net.in_blocks]:
        block.register_forward_hook(lambda module, args, out: features.append(out))
    for block in net.out_blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    net(*inputs(net))
    assert len(seen) == len(features) == 4
    for i, (feature, skip) in enumerate(zip(features, reversed(seen), strict=True), start=1):
        if kind in ("none", "inv_sqrt2", "constant"):
            kappa = {"none": 1.0, "inv_sqrt2": 0.5**0.5, "constant": 0.5 ** (i - 1)}[kind]
        else:  # a number in (0, 1) for each channel, from its mean over space
            key = str(i if kind == "learnable" else feature.shape[1])
            kappa = net.long_skip.networks[key](feature.mean((2, 3)))[..., None, None]
            assert kappa.min() > 0 and kappa.max() < 1
        torch.testing.assert_close(skip, kappa * feature)


def test_checkpointing_recomputes_blocks_and_otherwise_first_normalizations_alone():
    calls, grads = {}, {}
    for on in (False, True):
        net = randomized(replace(TINY, checkpointing=on, dropout=0.5))
        calls[on] = []
        for module in net.modules():
            if isinstance(module, (model.Attention, model.ResBlock, model.GroupNorm)):
                module.register_forward_pre_hook(lambda module, _, seen=calls[on]: seen.append(type(module)))
        torch.manual_seed(2)
        net(*inputs(net)).square().sum().backward()
        grads[on] = [p.grad for p in net.parameters()]
    blocks = sum(isinstance(module, model.ResBlock) for module in net.modules())
    assert [calls[on].count(model.Attention) for on in (False, True)] == [4, 8]
    assert [calls[on].count(model.ResBlock) for on in (False, True)] == [blocks, 2 * blocks]
    assert calls[False].count(model.GroupNorm) == 2 * blocks + 4 + 1  # second ones are no calls; the last one
    assert all(torch.equal(a, b) for a, b in zip(grads[False], grads[True], strict=True))  # dropout's too


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adaptive_group_normalization(dtype):
    """Trained, in one kernel, and evaluated; beside the formula in float64."""
    norm, rng = model.GroupNorm(32, 64).to(dtype), torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=rng).to(dtype).requires_grad_()
               for shape in [(3, 64, 4, 6), (3, 64, 1, 1), (3, 64, 1, 1), (64,), (64,)]]
    h, y_s, y_b, norm.weight.data, norm.bias.data = (tensor.detach() for tensor in tensors)
    grouped = h.double().unflatten(1, (32, 2))
    var, mean = torch.var_mean(grouped, (2, 3, 4), correction=0, keepdim=True)
    exact = ((grouped - mean) / (var + norm.eps) ** 0.5).flatten(1, 2)
    exact = y_s.double() * (exact * norm.weight.double()[:, None, None] + norm.bias.double()[:, None, None])
    exact, grads = exact + y_b.double(), []
    for training in (True, False):
        out = norm.train(training).adaptive(*tensors[:3])
        assert out.dtype == dtype
        close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        assert (out.double() - exact).abs().max() < close * exact.abs().max()
        grads.append(torch.autograd.grad(out.double().square().sum(), [*tensors[:3], *norm.parameters()]))
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < close * b.abs().max()


def test_adaptive_group_normalization_of_a_value_a_group():
    """Nothing is left of a value that is a group of its own but the shift."""
    norm, (h, y_s, y_b) = model.GroupNorm(32, 32), torch.randn(3, 2, 32, 1, 1)
    for training in (True, False):
        torch.testing.assert_close(norm.train(training).adaptive(h, y_s, y_b), y_b, rtol=0, atol=1e-3)


def test_normalizes_in_float32():
    """In bfloat16 a mean of 1000 would leave nothing of a deviation of 1."""
    x = (1000 + torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))).bfloat16()
    norm = model.GroupNorm(32, 32)
    exact = torch.nn.functional.group_norm(x.double(), 32)
    assert (norm.bfloat16()(x).double() - exact).abs().max() < 2e-2
    assert norm(x).dtype == torch.bfloat16


def test_runs_in_half_precision():
    net = randomized(replace(TINY, num_classes=3))
    x, t = inputs(net)
    labels = torch.tensor([0, 2])
    full = net(x, t, labels)
    half = net.bfloat16()(x.bfloat16(), t, labels)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).norm() < 0.05 * full.norm()


def test_null_class_is_the_last_label():
    net = randomized(replace(TINY, num_classes=5, null_class=True))
    x, t = inputs(net)
    assert torch.equal(net(x, t), net(x, t, torch.tensor([4, 4])))
    assert not torch.equal(net(x, t), net(x, t, torch.tensor([4, 3])))


def test_low_res_is_enlarged_to_the_image():
    net = randomized(replace(TINY, low_res=4))
    x, t = inputs(net)
    constant = torch.tensor([0.5, -1.0, 2.0])[:, None, None].expand(2, 3, 8, 8)
    torch.testing.assert_close(net(x, t, constant[..., :4, :4]), net(x, t, constant))
    assert not torch.equal(net(x, t, constant), net(x, t, -constant))


def test_one_graph():
    """torch.compile takes training and evaluation whole, also of another batch size."""
    net = randomized(replace(TINY, num_classes=3, long_skip=LongSkipConfig("learnable")))
    compiled = torch.compile(net, backend="eager", fullgraph=True, dynamic=True)
    for batch in (2, 1):
        x, t = inputs(net, batch)
        labels = torch.zeros(batch, dtype=torch.long)
        torch.testing.assert_close(compiled(x, t, labels), net(x, t, labels))


@pytest.mark.parametrize("change, sentence", [
    (dict(attn_resolutions=(4, 2)), r"attn_resolutions \[2\] are never reached: .*\[8, 4\]"),
    (dict(channels=24), "a level's width is 24: it must be a multiple of 32"),
    (dict(channel_mult=(0.4, 1)), "a level's width is 12"), (dict(channel_mult=(0.0, 1)), "width is 0"),
    (dict(img_size=7), "img_size 7 cannot be halved for 2 levels"), (dict(channel_mult=()), "0 levels"),
    (dict(num_heads=5), r"\[5\] does not divide a width of 64"), (dict(num_heads_up=5), r"\[2, 5\]"),
    (dict(head_channels=48), r"head_channels \[48\] does not divide"),
    (dict(head_channels=-1), "head_channels is -1"),
    (dict(depth=0), "depth is 0: the least is 1"), (dict(in_channels=0), "in_channels is 0"),
    (dict(low_res=-4), "low_res is -4: the least is 0"),
    (dict(dropout=1.0), r"dropout is 1.0: it must be in \[0, 1\)"), (dict(null_class=True), "null_class"),
    (dict(pool="max"), "pool is 'max': it must be one of"), (dict(pool="spatial"), "a classifier need"),
])
def test_impossible_configs(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **change)


def test_heads_matter_only_where_there_is_attention():
    assert replace(TINY, head_channels=64).widths == [32, 64]


def test_impossible_inputs():
    x, t = torch.randn(2, 3, 8, 8), torch.zeros(2)
    unconditional, labelled = ADMUNet(TINY), ADMUNet(replace(TINY, num_classes=5))
    superres, classifier = ADMSuperRes(TINY), ADMClassifier(replace(TINY, num_classes=5, pool="attention"))
    calls = [
        (unconditional, (x[..., :6], t), r"images are \(3, 8, 6\), but this network takes \(3, 8, 8\)"),
        (classifier, (x[:, :1], t), r"images are \(1, 8, 8\)"),
        (unconditional, (x, t, torch.tensor([0, 1])), "unconditional"),
        (labelled, (x, t), "needs labels"),
        (labelled, (x, t, torch.tensor([0, 5])), r"0\.\.5 not in 0\.\.4"),
        (labelled, (x, t, torch.tensor([-1, 0])), r"-1\.\.0 not in"),
        (superres, (x, t, x[:1]), r"low_res is \(1, 3, 8, 8\).*\(2, 3, 8, 8\)"),
        (superres, (x, t, x[:, :1]), "low_res"), (superres, (x, t, x[0]), "low_res"),
    ]
    for net, args, sentence in calls:
        with pytest.raises(ValueError, match=sentence):
            net(*args)


def test_official_weights_must_fit():
    case = load_case("adm_updown")
    state = case.state_dict
    state["extra"] = state.pop("time_embed.0.bias")
    state["input_blocks.3.0.emb_layers.1.bias"] = torch.zeros(3)
    faults = r"extra is not of .*emb_layers.1.bias has shape \(3,\), not \(64,\).*time_embed.0.bias is mis"
    with pytest.raises(ValueError, match=faults):
        load_official(case.meta["config"], state)


@pytest.mark.parametrize("change, sentence", [
    (dict(with_dropout=1), "no argument with_dropout"), (dict(dims=3), "dims is 3"),
    (dict(out_channels=4), "out_channels is 4: it must be 3 or 6"), (dict(model="unet"), "model is 'unet'"),
])
def test_official_config_must_fit(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        official_config(load_case("adm_updown").meta["config"] | change)


@pytest.mark.parametrize("name", ["adm_updown", "adm_superres", "adm_classifier_attention"])
def test_read_official_file(tmp_path, name):
    case = load_case(name)
    net = load_official(case.meta["config"], case.state_dict)
    path = tmp_path / "model.pt"
    torch.save(case.state_dict, path)
    read = read_official(path, net.config)
    assert type(read) is type(net)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), net.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"model\.pt: weights do not fit"):
        read_official(path, TINY)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.pt is not a PyTorch state dict"):
        read_official(path, net.config)
