"""posthoc_ema.ema against EDM2, arXiv:2312.02696v2: section 3 and appendix C."""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from golden_cases import MATH, array
from torch import nn

from posthoc_ema.ema import (
    PowerFunctionEMA,
    TraditionalEMA,
    flatten,
    gamma_to_sigma_rel,
    power_function_beta,
    power_function_inner,
    power_function_profile,
    power_function_response,
    sigma_rel_to_gamma,
    solve_posthoc_coefficients,
)

TRAJECTORY = MATH["ema_trajectory"]


class Net(nn.Module):
    """Two parameters, one of them under two names, a floating buffer and a counter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.first(x) + self.tied(x)


class Point(nn.Module):
    """A network that is one vector, to be led along a path."""

    def __init__(self, theta):
        super().__init__()
        self.theta = nn.Parameter(torch.as_tensor(theta).clone())

    def at(self, theta):
        self.theta.data.copy_(torch.as_tensor(theta))
        return self


def track_by_hand(walk, times, beta):
    """The averages after each update: the recursion itself, in float64 numpy, beginning at the weights."""
    average, t_last, averages = np.asarray(walk[0], np.float64), 0, []
    for theta, t in zip(walk, times, strict=True):
        average = average + (1 - beta(t, t - t_last)) * (theta - average)
        averages.append(average)
        t_last = t
    return np.array(averages)


# Profiles ---------------------------------------------------------------------------------------------------


def test_gamma_to_sigma_rel_eq_123():
    gamma, sigma_rel = np.array(MATH["exp_to_std"]).T
    np.testing.assert_allclose(gamma_to_sigma_rel(gamma), sigma_rel, rtol=1e-9)
    tau = np.linspace(0, 1, 100001)  # the standard deviation of the profile itself
    p = power_function_profile(tau, 1.0, 0.1)
    mean = np.trapezoid(p * tau, tau)
    assert np.trapezoid(p * (tau - mean) ** 2, tau) ** 0.5 == pytest.approx(0.1, rel=1e-6)


def test_sigma_rel_to_gamma_eq_126_algorithm_2():
    sigma_rel, gamma = np.array(MATH["std_to_exp"]).T
    np.testing.assert_allclose(sigma_rel_to_gamma(sigma_rel), gamma, rtol=1e-9)
    assert float(sigma_rel_to_gamma(0.05)) == pytest.approx(16.972198602303447, rel=1e-12)
    assert sigma_rel_to_gamma(0.05).dtype == np.float64 and sigma_rel_to_gamma([[0.1, 0.2]]).shape == (1, 2)
    wide = np.array([1e-4, 0.001, 0.01, 0.1, 0.25, 0.2886, 0.288675])
    np.testing.assert_allclose(gamma_to_sigma_rel(sigma_rel_to_gamma(wide)), wide, rtol=1e-9)


@pytest.mark.parametrize("sigma_rel", [0, -0.1, 0.288676, 1, np.nan, np.inf, [0.05, 0.3]])
def test_lengths_without_a_profile_algorithm_2(sigma_rel):
    with pytest.raises(ValueError, match=r"sigma_rel is .*must be in \(0, 0\.288675\)"):
        sigma_rel_to_gamma(sigma_rel)


def test_profile_eq_121():
    gamma = float(sigma_rel_to_gamma(0.1))
    tau = np.array([-1.0, 0, 500, 1000, 1001])
    expected = [0, 0, (gamma + 1) / 1000 * 0.5**gamma, (gamma + 1) / 1000, 0]
    np.testing.assert_allclose(power_function_profile(tau, 1000, 0.1), expected, rtol=1e-12)
    grid = np.linspace(0, 1000, 200001)
    assert np.trapezoid(power_function_profile(grid, 1000, 0.1), grid) == pytest.approx(1, rel=1e-8)


def test_response_eq_108():
    """What the recursion makes of unit weights, one update at a time, is the response."""
    for sigma_rel in (0.05, 0.2):
        by_hand = track_by_hand(np.eye(50), range(1, 51), partial(power_function_beta, sigma_rel))
        response = power_function_response(50, sigma_rel)
        np.testing.assert_allclose(by_hand[-1], response, rtol=1e-9)
        assert response.sum() == pytest.approx(1, abs=1e-12)
        middle = np.arange(0.5, 50) / 50  # it follows the profile
        np.testing.assert_allclose(response, power_function_profile(middle, 1, sigma_rel) / 50, atol=2e-3)


def test_inner_products_eq_151():
    tau = np.linspace(0, 1000, 400001)
    for t_a, rel_a, t_b, rel_b in [(1000, 0.05, 1000, 0.1), (700, 0.1, 1000, 0.05), (1000, 0.2, 600, 0.07)]:
        p_a, p_b = power_function_profile(tau, t_a, rel_a), power_function_profile(tau, t_b, rel_b)
        expected = np.trapezoid(p_a * p_b, tau)
        inner = power_function_inner(t_a, rel_a, t_b, rel_b)
        assert inner == pytest.approx(expected, rel=1e-4)  # the grid misses half a cell at the cut
        assert inner == pytest.approx(float(power_function_inner(t_b, rel_b, t_a, rel_a)), rel=1e-12)


def test_beta_eq_127():
    for sigma_rel, t_next, t_delta, beta in MATH["beta"]:
        assert power_function_beta(sigma_rel, t_next, t_delta) == pytest.approx(beta, rel=1e-9)


# Algorithm 3 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MATH["posthoc"], ids=range(len(MATH["posthoc"])))
def test_coefficients_algorithm_3(case):
    x = solve_posthoc_coefficients(case["in_ofs"], case["in_std"], case["out_ofs"], case["out_std"])
    np.testing.assert_allclose(x, np.reshape(case["coefs"], x.shape), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(x.sum(0), 1, rtol=1e-12)


def test_coefficients_worked_example_algorithm_3():
    t, sigma_rel = [1000, 1000, 2000, 2000], [0.05, 0.10, 0.05, 0.10]
    x = solve_posthoc_coefficients(t, sigma_rel, 2000, [0.10, 0.075])
    np.testing.assert_allclose(x[:, 0], [0, 0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(x[:, 1], [1.3574828e-4, -2.4266268e-3, 0.34296904, 0.65932185], rtol=1e-7)


def test_coefficients_know_neither_unit_nor_order():
    t, sigma_rel = np.repeat(np.arange(1, 9), 2) * 1000, np.tile([0.05, 0.10], 8)
    x = solve_posthoc_coefficients(t, sigma_rel, 8000, [0.03, 0.15])
    for unit in (1e-6, 3, 2**20):
        scaled = solve_posthoc_coefficients(t * unit, sigma_rel, 8000 * unit, [0.03, 0.15])
        np.testing.assert_allclose(scaled, x, rtol=1e-9, atol=1e-12)
    order = np.random.default_rng(0).permutation(16)
    shuffled = solve_posthoc_coefficients(t[order], sigma_rel[order], 8000, [0.03, 0.15])
    assert np.array_equal(shuffled, x[order])


def test_snapshots_of_time_0_or_later_than_the_target_are_not_used():
    t, sigma_rel = [1000, 1000, 2000, 2000], [0.05, 0.10, 0.05, 0.10]
    x = solve_posthoc_coefficients(t, sigma_rel, 2000, 0.07)
    more = solve_posthoc_coefficients([0, *t, 3000], [0.05, *sigma_rel, 0.05], 2000, 0.07)
    assert np.array_equal(more[1:-1], x) and not more[[0, -1]].any()
    both = solve_posthoc_coefficients(t, sigma_rel, [1000, 2000], 0.07)  # targets of different times
    assert np.array_equal(both[:, 1:], x) and not both[2:, 0].any()


def test_many_lengths_are_solved_without_huge_coefficients():
    """Six lengths at 32 times: float64 cannot tell their profiles apart; rounding must not be magnified."""
    t, sigma_rel = np.repeat(np.arange(1, 33), 6) * 1000, np.tile([0.03, 0.05, 0.075, 0.1, 0.15, 0.2], 32)
    x = solve_posthoc_coefficients(t, sigma_rel, 32000, [0.01, 0.05, 0.06])
    norms = np.linalg.norm(x, axis=0)
    assert norms[0] < 1e4 and norms[1] == pytest.approx(1, abs=0.01) and norms[2] < 1.5
    tau = np.linspace(0, 32000, 16_001)[:, None]
    expected = power_function_profile(tau, 32000, [0.01, 0.05, 0.06])
    error = np.linalg.norm(power_function_profile(tau, t, sigma_rel) @ x - expected, axis=0)
    assert (error / np.linalg.norm(expected, axis=0) < [0.01, 1e-5, 1e-5]).all()


@pytest.mark.parametrize("t_out", [1500, 0, 3000, -1000])
def test_the_target_must_be_a_snapshot_time(t_out):
    with pytest.raises(ValueError, match=rf"target time {t_out}$"):
        solve_posthoc_coefficients([0, 1000, 2000], 0.05, t_out, 0.1)


def test_the_same_snapshot_twice():
    with pytest.raises(ValueError, match="same time and sigma_rel"):
        solve_posthoc_coefficients([1000, 2000, 2000], 0.05, 2000, 0.1)


# Trackers ---------------------------------------------------------------------------------------------------


def golden_walk():
    return np.cumsum(array("ema:walk", (64, 5)), axis=0).astype(np.float32)


def test_power_function_trajectory_eq_127():
    net = Point(np.zeros(5, np.float32))
    ema = PowerFunctionEMA(net, TRAJECTORY["stds"])
    walk, times = golden_walk(), [32 * k for k in range(1, 65)]
    snapshots = []
    for k, (theta, t) in enumerate(zip(walk, times, strict=True), start=1):
        net.at(theta)
        ema.update(t)
        if k % TRAJECTORY["every"] == 0:
            snapshots.append([ema.weights(s)["theta"].clone().numpy() for s in TRAJECTORY["stds"]])
    np.testing.assert_allclose(snapshots, TRAJECTORY["snapshots"], rtol=1e-5, atol=1e-5)
    for s, average in zip(TRAJECTORY["stds"], np.array(snapshots)[-1], strict=True):
        by_hand = track_by_hand(walk, times, partial(power_function_beta, s))
        np.testing.assert_allclose(average, by_hand[-1], rtol=1e-5)
        np.testing.assert_allclose(power_function_response(64, s) @ walk, by_hand[-1], rtol=1e-9)


def test_traditional_trajectory():
    golden = TRAJECTORY["traditional"]
    net = Point(np.zeros(5, np.float32))
    ema = TraditionalEMA(net, golden["halflife_nimg"], golden["rampup_ratio"])
    for k, theta in enumerate(golden_walk(), start=1):
        net.at(theta)
        ema.update(32 * k)
    np.testing.assert_allclose(ema.weights(500)["theta"], golden["final"], rtol=1e-5)


def test_traditional_half_life():
    """Without ramp-up the weight of the past halves in a half-life; with it, sooner early on. An endless one
    keeps the first weights."""
    cases = [(400, None, 0.25), (400, 0.5, 0.25), (400, 0.25, 2**-4), (np.inf, None, 1)]
    for halflife, rampup_ratio, kept in cases:
        net = Point(torch.ones(1, dtype=torch.float64))
        ema = TraditionalEMA(net, halflife, rampup_ratio)
        net.at([0.0])
        ema.update(800)
        assert ema.weights(halflife)["theta"].item() == pytest.approx(kept)
    with pytest.raises(ValueError, match="half-life is 0: it must be positive"):
        TraditionalEMA(Net(), 0)


def test_first_update_is_the_weights_themselves_eq_127():
    net = Point([1e30, -3.0])
    ema = PowerFunctionEMA(net)
    net.at([0.1, 0.2])
    ema.update(32)
    assert torch.equal(ema.weights(0.05)["theta"], net.theta)


def test_straight_line_eq_121():
    """w(t) = t tracked to T = 1e5 every 100 steps: close to the profile's mean (gamma+1) / (gamma+2) T."""
    net = Point(torch.zeros(1, dtype=torch.float64))
    ema = PowerFunctionEMA(net, [0.05])
    for t in range(100, 100001, 100):
        net.at([float(t)])
        ema.update(t)
    average = ema.weights(0.05)["theta"].item() / 1e5
    assert average == pytest.approx(0.94779, abs=5e-6)
    assert average == pytest.approx(power_function_response(1000, 0.05) @ np.arange(1, 1001) / 1000, rel=1e-9)


@pytest.mark.parametrize("times", [range(5, 201, 5), [1, 2, 50, 51, 130, 200]])
def test_update_every_k_steps_eq_127(times):
    """Any spacing gives the closed form: each weight the profile's integral over the interval before it."""
    path = np.random.default_rng(1).standard_normal((len(times), 3)).cumsum(0)
    net = Point(path[0])
    ema = PowerFunctionEMA(net, [0.05, 0.2])
    for theta, t in zip(path, times, strict=True):
        net.at(theta)
        ema.update(t)
    for sigma_rel in ema.lengths:
        power = (np.array([0, *times]) / 200) ** (sigma_rel_to_gamma(sigma_rel) + 1)
        np.testing.assert_allclose(ema.weights(sigma_rel)["theta"], np.diff(power) @ path, rtol=1e-9)


@pytest.mark.parametrize("shapes", [[(1, 3), (1, 1)], [(65, 64)], [(65, 64), (1, 3), (5,), (3, 3, 65, 64)]])
def test_tensors_of_all_kinds_eq_127(shapes):
    """Of all shapes, sizes and memory formats, one in float64."""
    net, rng = nn.Module(), np.random.default_rng(2)
    net.weights = nn.ParameterList([torch.zeros(s[::-1]).permute(*range(len(s))[::-1]) for s in shapes])
    net.filters = nn.Parameter(torch.zeros(60, 64, 3, 3).to(memory_format=torch.channels_last))
    net.scale = nn.Parameter(torch.zeros(()))
    net.double_weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    ema, paths = PowerFunctionEMA(net), [rng.standard_normal((4, *p.shape)) for p in net.parameters()]
    for k in range(4):
        with torch.no_grad():
            for p, path in zip(net.parameters(), paths, strict=True):
                p.copy_(torch.as_tensor(path[k]))
        ema.update(100 * (k + 1))
        state = copy.deepcopy(ema.state_dict())
        ema = PowerFunctionEMA(net)  # goes on from the state of the other
        ema.load_state_dict(state)
    for sigma_rel in ema.lengths:
        weights, response = ema.weights(sigma_rel), power_function_response(4, sigma_rel)
        for name, path in zip(dict(net.named_parameters()), paths, strict=True):
            assert weights[name].dtype == (torch.float64 if name == "double_weight" else torch.float32)
            assert weights[name].untyped_storage().nbytes() == weights[name].nbytes  # `torch.save` writes it
            error = abs(weights[name].double().numpy() - np.tensordot(response, path, 1)).max()
            assert error < (1e-12 if name == "double_weight" else 1e-6)


def memory(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_weights_lie_together():
    """In their order, values and formats kept, each aligned as if it were allocated; a second tracker moves
    nothing, and training goes on with the parameters that the optimizer has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 1, 1), nn.Linear(4, 4, dtype=torch.float64))
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    net.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    net.to(memory_format=torch.channels_last)
    params, before = list(net.parameters()), copy.deepcopy(net)
    optimizer = torch.optim.SGD(params, 0.1)
    emas = [PowerFunctionEMA(net, [0.05]), PowerFunctionEMA(net), TraditionalEMA(net, 100)]
    assert len(memory(params)) == 2 and len(memory(emas[1].averages[0] + emas[1].averages[1])) == 2
    places = [p.data_ptr() for p in params]
    for t in (1, 2):
        net[:2](torch.ones(1, 3, 4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for ema in emas:
            ema.update(t)
    assert [p.data_ptr() for p in params] == places and not any(place % 64 for place in places)
    assert [p.stride() for p in params] == [p.stride() for p in before.parameters()]
    assert torch.equal(net[2].weight, before[2].weight) and torch.equal(net[2].bias, before[2].bias)
    bias = before[1].bias.item() - 0.4 * np.arange(1, 3)  # of four pixels, each with a gradient of 1
    assert net[1].bias.item() == pytest.approx(bias[-1], rel=1e-6)
    for ema in emas[:2]:
        average = ema.weights(0.05)["1.bias"].item()
        assert average == pytest.approx(power_function_response(2, 0.05) @ bias, rel=1e-6)


@pytest.mark.parametrize("move", [
    lambda ema: ema.net.to(memory_format=torch.channels_last) and ema,
    lambda ema: ema.net.double() and ema,
    copy.deepcopy,
    lambda ema: pickle.loads(pickle.dumps(ema)),
])  # fmt: skip
def test_a_network_that_moves_eq_127(move):
    """In memory, or with its tracker into a copy: averages go on."""
    net, path = nn.Conv2d(3, 4, 3), np.random.default_rng(3).standard_normal((6, 4, 3, 3, 3))
    ema = PowerFunctionEMA(net)
    for k, theta in enumerate(path):
        ema = move(ema) if k in (2, 5) else ema
        with torch.no_grad():
            ema.net.weight.copy_(torch.as_tensor(theta))
        ema.update(k + 1)
        assert memory(ema.net.parameters()) == memory([ema.parts[0][2]])
    for sigma_rel in ema.lengths:
        expected = np.tensordot(power_function_response(6, sigma_rel), path, 1)
        np.testing.assert_allclose(ema.weights(sigma_rel)["weight"], expected, rtol=1e-5, atol=1e-6)


def test_parameters_that_share_memory_are_refused():
    net = Net()
    net.tied.weight = nn.Parameter(net.first.weight.data)
    with pytest.raises(ValueError, match="two parameters share memory"):
        PowerFunctionEMA(net)
    alone = net.first.weight  # already lies as it should
    assert flatten([alone]).data_ptr() == alone.data_ptr()


def test_time_only_rises():
    ema = PowerFunctionEMA(Net())
    for t in (0, -1):
        with pytest.raises(ValueError, match=f"time {t}, but the last was at 0"):
            ema.update(t)
    ema.update(10)
    with pytest.raises(ValueError, match="time 10, but the last was at 10"):
        ema.update(10)


def test_buffers_are_copied_and_tied_weights_averaged():
    net = Net()
    ema = PowerFunctionEMA(net)
    for t in (1, 2, 3):
        with torch.no_grad():
            net.first.weight += t
            net.mean += t
            net.count += 1
        ema.update(t)
    weights = ema.weights(0.1)
    assert list(weights) == list(net.state_dict())
    assert torch.equal(weights["mean"], torch.full((2,), 6.0)) and weights["count"] == 3
    assert torch.equal(weights["first.weight"], weights["tied.weight"])
    assert not torch.equal(weights["first.weight"], net.first.weight)
    copy.deepcopy(net).load_state_dict(weights)


def test_state_is_restored_bit_for_bit():
    net, times = Net(), range(1, 9)
    whole, first = PowerFunctionEMA(net), PowerFunctionEMA(net)
    for t in times:
        torch.nn.init.normal_(net.first.weight, generator=torch.Generator().manual_seed(t))
        whole.update(t)
        if t <= 4:
            first.update(t)
        if t == 4:
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            resumed = PowerFunctionEMA(copy.deepcopy(net))
            resumed.load_state_dict(torch.load(file, weights_only=True))
        if t > 4:
            resumed.net.load_state_dict(net.state_dict())
            resumed.update(t)
    for length in whole.lengths:
        for name, tensor in whole.weights(length).items():
            assert torch.equal(tensor, resumed.weights(length)[name]), name


def test_another_state_is_refused():
    state = PowerFunctionEMA(Net()).state_dict()
    with pytest.raises(ValueError, match=r"have lengths \[0\.05, 0\.1\], not \[0\.05\]"):
        PowerFunctionEMA(Net(), [0.05]).load_state_dict(state)
    with pytest.raises(ValueError, match="other parameters"):
        PowerFunctionEMA(Point([0.0])).load_state_dict(state)


def test_wrapped_networks(tmp_path):
    net = Net()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        compiled = torch.compile(net, backend="eager")
        parallel = nn.parallel.DistributedDataParallel(net)
        both = [torch.compile(parallel, backend="eager"), nn.parallel.DistributedDataParallel(compiled)]
        for wrapped in (compiled, parallel, *both):
            ema = PowerFunctionEMA(wrapped)
            net.zero_grad()
            wrapped(torch.ones(1, 3)).sum().backward()
            assert (net.first.weight.grad == 2).all()  # of a tied weight
            ema.update(1)
            assert ema.net is net and list(ema.weights(0.05)) == list(net.state_dict())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_weights_are_refused(dtype):
    with pytest.raises(ValueError, match=f"weights are {dtype}: averages need float32 master weights"):
        PowerFunctionEMA(Net().to(dtype))


def test_lengths_are_checked():
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.288675\)"):
        PowerFunctionEMA(Net(), [0.05, 0.3])
    with pytest.raises(ValueError, match=r"no average of length 0\.07 is tracked: only \[0\.05, 0\.1\]"):
        PowerFunctionEMA(Net()).weights(0.07)
