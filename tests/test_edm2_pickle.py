"""Reading released EDM2 pickles, which carry source code, without executing anything of them."""

import copyreg
import io
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from golden_cases import assert_close, load_case
from torch import nn

from edm2_mp_unet.official import load_official, read_official_pickle
from posthoc_ema.ema import solve_posthoc_coefficients
from posthoc_ema.reconstruct import reconstruct

EVIL_SOURCE = "raise SystemExit('the source code in the pickle was executed')"


class EasyDict(dict):
    pass


def _reconstruct_persistent_obj(meta):
    raise SystemExit("the pickle's own constructor was called")


class Persistent:
    """An object of the released code, as its pickles hold it."""

    def __init__(self, class_name: str, **state):
        self.class_name, self.state = class_name, state

    def __reduce__(self):
        meta = dict(
            type="class", version=6, module_src=EVIL_SOURCE, class_name=self.class_name, state=self.state
        )
        return _reconstruct_persistent_obj, (meta,), None


def persistent_module(tensors: dict[str, torch.Tensor], **state) -> Persistent:
    """A module of the released code around tensors of these names; `enc` and `dec` are torch's."""
    params, children = {}, {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        if rest:
            children.setdefault(first, {})[rest] = tensor
        else:
            params[first] = nn.Parameter(tensor)
    modules = {}
    for name, inner in children.items():
        modules[name] = persistent_module(inner)
        if name in ("enc", "dec"):
            modules[name] = nn.ModuleDict()
            modules[name]._modules = persistent_module(inner).state["_modules"]
    state |= dict(_parameters=params, _buffers={}, _modules=modules, training=False)
    return Persistent("Precond" if "_init_kwargs" in state else "Part", **state)


def released(case, **others) -> EasyDict:
    """What a released pickle holds, with this case's network."""
    kwargs = {key: value for key, value in case.meta["config"].items() if key != "model"}
    positional = [kwargs.pop(key) for key in ("img_resolution", "img_channels")]
    network = persistent_module(
        case.state_dict, _init_args=tuple(positional), _init_kwargs=EasyDict(kwargs, use_fp16=True)
    )
    encoder = Persistent("StabilityVAEEncoder", scale=torch.ones(4).numpy())
    return EasyDict(encoder=encoder, dataset_kwargs=EasyDict(path="data.zip"), ema=network, **others)


NAMES = {"dnnlib.util": EasyDict, "torch_utils.persistence": _reconstruct_persistent_obj}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write an object to a pickle whose names are those of the released code, which is then gone."""

    def write(data, protocol: int = 4) -> Path:
        path = tmp_path / "edm2-tiny-0000123-0.050.pkl"
        with monkeypatch.context() as patch:
            for name, value in NAMES.items():
                module = ModuleType(name)
                setattr(module, value.__name__, value)
                patch.setitem(sys.modules, name.split(".")[0], ModuleType(name.split(".")[0]))
                patch.setitem(sys.modules, name, module)
                patch.setattr(value, "__module__", name)
            path.write_bytes(pickle.dumps(data, protocol))
        return path

    return write


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("name", ["edm2_class", "edm2_uncond"])
def test_read_released_form(write, name, protocol):
    case = load_case(name)
    config, state_dict = read_official_pickle(write(released(case), protocol))
    assert config == {k: v for k, v in case.meta["config"].items() if k != "model"} | {"use_fp16": True}
    assert list(state_dict) == sorted(case.state_dict, key=list(state_dict).index)
    for key, tensor in case.state_dict.items():
        assert torch.equal(state_dict[key], tensor)
    net = load_official(config, state_dict).eval()
    assert_close(net(**case.inputs("x", "sigma", "labels")), case.arrays["denoised"])


class Call:
    """Unpickling this calls a function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("protocol", [2, 4])
def test_calls_are_named_and_not_made(write, tmp_path, protocol):
    file = tmp_path / "executed"
    command = f"touch {file}"
    evil = Call(os.system, command), Call(eval, f"open({str(file)!r}, 'w')"), Call(copyreg.pickle, int, print)
    path = write(released(load_case("edm2_uncond"), loss_fn=evil), protocol)
    names = r"0\.050\.pkl asks for (__builtin__|builtins)\.eval.* copy_?reg\.pickle, posix\.system, which"
    with pytest.raises(ValueError, match=names):
        read_official_pickle(path)
    with pytest.raises(ValueError, match=r"posix\.system"):
        read_official_pickle(write(Call(os.system, command), protocol))
    # The storage of a tensor is a file of its own within the file.
    blob = pickle.dumps(Call(os.system, command), 2)
    data = released(load_case("edm2_uncond"))
    data["ema"].state["_buffers"] = {"evil": Call(torch._utils._rebuild_tensor_v2, Call(
        torch.storage._load_from_bytes, blob), 0, (1,), (1,), False, {})}  # fmt: skip
    with pytest.raises(ValueError, match="not a released EDM2 pickle"):
        read_official_pickle(write(data, protocol))
    assert not file.exists()


def test_not_a_released_pickle(write, tmp_path):
    case = load_case("edm2_uncond")
    with pytest.raises(ValueError, match=r"gone\.pkl does not exist"):
        read_official_pickle(tmp_path / "gone.pkl")
    path = write(released(case))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"0\.050\.pkl is truncated or not a pickle"):
        read_official_pickle(path)
    faults = (
        ({"weights": 3}, "no network"),
        ([1, 2], "modules are not"),
        (EasyDict(ema=Persistent("UNet")), "a UNet, not EDM2's Precond"),
        (EasyDict(ema=persistent_module({}, _init_kwargs={}, _init_args=3)), "not a released EDM2 pickle"),
        (EasyDict(ema=Persistent("Precond", _parameters={"w": 3}, _init_kwargs={})), "is not a tensor"),
    )
    for data, sentence in faults:
        with pytest.raises(ValueError, match=sentence):
            read_official_pickle(write(data))
    data = released(case)
    storage = Call(torch.storage._load_from_bytes, legacy_storage())
    outside = Call(torch._utils._rebuild_tensor_v2, storage, 0, (9,), (1,), False, {})
    data["ema"].state["_buffers"] = {"w": outside}
    with pytest.raises(ValueError, match="out of bounds"):
        read_official_pickle(write(data))


def legacy_storage() -> bytes:
    """Two numbers, as a pickled tensor holds them."""
    file = io.BytesIO()
    torch.save(torch.zeros(2)._typed_storage(), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def test_reconstruct_from_pickles(tmp_path, write):
    """A folder of released pickles, whose names tell their times and lengths: a sum of their weights."""
    case = load_case("edm2_uncond")
    names = ("0000123-0.050", "0000123-0.100", "0000246-0.050", "0000246-0.100")
    folder = tmp_path / "released"
    folder.mkdir()
    for k, name in enumerate(names, start=1):
        data = released(case)
        shift_weights(data["ema"], k)
        write(data).rename(folder / f"edm2-tiny-{name}.pkl")
    weights, header = reconstruct(folder, [0.07])[0]
    t = np.repeat([123_904, 246_784], 2)  # 121 and 241 times 1024: 123 and 246 thousand images
    x = solve_posthoc_coefficients(t, [0.05, 0.1, 0.05, 0.1], 246_784, 0.07)[:, 0]
    assert header["nimg"] == 246_784 and header["sigma_rel"] == 0.07
    expected = case.state_dict["unet.out_conv.weight"].numpy() + x @ [1, 2, 3, 4]
    np.testing.assert_allclose(weights["unet.out_conv.weight"].numpy(), expected, rtol=1e-5, atol=1e-5)


def shift_weights(module: Persistent, amount: float) -> None:
    """Add a number to the output convolution's weights."""
    params = module.state["_modules"]["unet"].state["_modules"]["out_conv"].state["_parameters"]
    params["weight"] = nn.Parameter(params["weight"].detach() + amount)
