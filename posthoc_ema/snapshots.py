"""Snapshots: safetensors files of averaged weights that describe themselves.

A snapshot's header says what network its weights are of and which average they are, so that it can be sampled
from, reconstructed with or loaded in either framework with nothing else at hand. It is one JSON object, kept
as the entry `header` of the file's metadata: equal weights make equal files.

| header      |                                                                                  |
| ----------- | -------------------------------------------------------------------------------- |
| `network`   | the project that trained it                                                      |
| `config`    | its network's config                                                             |
| `nimg`      | training time, in images                                                         |
| `sigma_rel` | relative length of the average                                                   |
| others      | what sampling needs: the objective, statistics of latents                        |
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posthoc_ema.ema import PowerFunctionEMA
from shared.check import require
from shared.files import write_whole

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def snapshot_path(folder: Path, nimg: int, sigma_rel: float) -> Path:
    return folder / f"{nimg:09d}-{sigma_rel:.3f}.safetensors"


def save_snapshot(path: Path, weights: dict[str, Tensor], header: dict, precision: str = "float32") -> None:
    """Write weights as `precision`, a key of PRECISIONS, under `header`."""
    dtype = PRECISIONS[precision]
    cast = {k: (v.to(dtype) if v.is_floating_point() else v).cpu().contiguous() for k, v in weights.items()}
    write_whole(path, lambda file: save_file(cast, file.name, {"header": json.dumps(header)}))


def read_header(path: Path) -> dict:
    """A snapshot's header. ValueError, naming the file, where it is missing, truncated or no snapshot."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors snapshot ({error})") from error
    for key in ("network", "config", "nimg", "sigma_rel"):
        require(key in header, f"{path} is not a snapshot: its header has no {key}")
    return header


def read_snapshot(path: Path) -> tuple[dict[str, Tensor], dict]:
    """A snapshot's weights, on the CPU in float32, and its header. ValueError as `read_header`."""
    header = read_header(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, header


def save_snapshots(folder: Path, ema: PowerFunctionEMA, header: dict, precision: str = "float32") -> None:
    """Write each average of the tracker as it stands; `header` lacks only its time and length."""
    for sigma_rel in ema.lengths:
        own = {"nimg": ema.t, "sigma_rel": sigma_rel}
        path = snapshot_path(folder, ema.t, sigma_rel)
        save_snapshot(path, ema.weights(sigma_rel), header | own, precision)


def find_snapshot(path: Path, sigma_rel: float | None = None) -> Path:
    """The snapshot file itself, or the last one of a run or snapshot folder: of `sigma_rel`, or the shortest.

    ValueError where there is none.
    """
    if path.is_file():
        return path
    folder = path / "snapshots" if (path / "snapshots").is_dir() else path
    found = [(read_header(file), file) for file in sorted(folder.glob("*.safetensors"))]
    found = [(head, file) for head, file in found if sigma_rel in (None, head["sigma_rel"])]
    wanted = "" if sigma_rel is None else f" of sigma_rel {sigma_rel}"
    require(bool(found), f"{path} holds no snapshot{wanted}")
    return max(found, key=lambda item: (item[0]["nimg"], -item[0]["sigma_rel"]))[1]
