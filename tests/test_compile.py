"""torch.compile: each network is one graph in training and one in evaluation, for batches of every size."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from adm_unet.model import ADMConfig, ADMUNet
from edm2_mp_unet.model import Denoiser, EDM2Config
from minimal_uvit.model import UViT, UViTConfig
from shared.long_skip import LongSkipConfig
from shared.run import Run

LEARNABLE = dict(long_skip=LongSkipConfig("learnable"))
NETWORKS = {
    "uvit": lambda: UViT(UViTConfig(width=24, depth=2, num_classes=11, null_class=True, **LEARNABLE)),
    "adm": lambda: ADMUNet(ADMConfig(channel_mult=(1, 1), num_classes=11, null_class=True, **LEARNABLE)),
    "edm2": lambda: Denoiser(EDM2Config(channel_mult=(1, 1), num_blocks=1, **LEARNABLE)),
}


def asked(compile: bool) -> SimpleNamespace:
    """As much of a `Run` as `Run.compile` looks at."""
    return SimpleNamespace(config=SimpleNamespace(compile=compile))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_graph_for_every_batch(name, training, monkeypatch):
    """Over steps that change the weights, and a last batch that is smaller. 8 is an image's size, too."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter, compiler = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, **options: compiler(net, backend=counter, **options))
    net = NETWORKS[name]().train(training)
    compiled = Run.compile(asked(True), net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for size in (8, 8, 8, 3):
        x, sigma, labels = torch.randn(size, 1, 8, 8), torch.rand(size) + 0.5, torch.randint(10, (size,))
        with torch.set_grad_enabled(training), torch._dynamo.config.patch(error_on_recompile=True):
            out = compiled(x, sigma, labels)
            torch.testing.assert_close(out, net(x, sigma, labels))
            if training:
                out.square().mean().backward()
                optimizer.step()
    assert counter.frame_count == 1


def test_no_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"--compile needs a C\+\+ compiler: install g\+\+"):
        Run.compile(asked(True), torch.nn.Identity())
    assert Run.compile(asked(False), len) is len
