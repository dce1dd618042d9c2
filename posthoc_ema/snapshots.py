"""Snapshots: safetensors files of averaged weights that describe themselves.

A snapshot's header says what network its weights are of and which average they are, so that it can be sampled
from, reconstructed with or loaded in either framework with nothing else at hand. It is one JSON object, kept
as the entry `header` of the file's metadata: equal weights make equal files.

| header          |                                                                              |
| --------------- | ---------------------------------------------------------------------------- |
| `network`       | the project that trained it                                                  |
| `config`        | its network's config                                                         |
| `nimg`          | training time, in images                                                     |
| `sigma_rel`     | relative length of the average                                               |
| `reconstructed` | the files that it is a weighted sum of; a tracked average has no such entry  |
| others          | what sampling needs: the objective, statistics of latents                    |

To reconstruct from, PyTorch state dicts of any training loop do as well, named `*-<nimg>-<sigma_rel>.pt`.

Reading order: one snapshot (`save_snapshot`, `read_snapshot`), a run's (`save_snapshots`, `find_snapshot`),
all that are in a folder (`list_snapshots`, `mapped`, `layout`, `blocks`, `require_alike`).
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from posthoc_ema.ema import SIGMA_REL_MAX, sigma_rel_to_gamma
from posthoc_ema.pickles import read_official_pickle
from shared.check import require
from shared.files import write_whole

NAME = re.compile(r"(?:[^.].*-)?(\d+)-(\d*\.\d+)\.(safetensors|pt|pkl)")  # a dot first: left by a kill
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def snapshot_path(folder: Path, nimg: int, sigma_rel: float) -> Path:
    return folder / f"{nimg:09d}-{sigma_rel:.3f}.safetensors"


def save_snapshot(path: Path, weights: dict[str, Any], header: dict, precision: str = "float32") -> None:
    """Write weights, torch's or tinygrad's, as `precision`, a key of PRECISIONS, under `header`."""
    dtype = PRECISIONS[precision]
    weights = {k: v if isinstance(v, Tensor) else torch.from_numpy(v.numpy()) for k, v in weights.items()}
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
        tensors = file.get_tensors()
    return {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, header


def require_lengths(sigma_rels: Sequence[float]) -> None:
    """Raise ValueError for lengths that no average has, none at all, or two whose files would be one."""
    sigma_rel_to_gamma(sigma_rels)
    names = {snapshot_path(Path(), 0, sigma_rel) for sigma_rel in sigma_rels}
    fits = 0 < len(names) == len(sigma_rels)
    require(fits, f"sigma_rels are {list(sigma_rels)}: one or more that differ to three decimals")


def save_snapshots(folder: Path, ema: Any, header: dict, precision: str = "float32") -> None:
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


def config_from_dict(cls: type, values: dict) -> Any:
    """The config dataclass, nested ones too, of what `dataclasses.asdict` and JSON made of it."""
    types = get_type_hints(cls)
    unknown = sorted(values.keys() - types.keys())
    require(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}")

    def restore(name: str, value: Any) -> Any:
        if is_dataclass(types[name]):
            return config_from_dict(types[name], value)
        return tuple(value) if isinstance(value, list) else value

    return cls(**{name: restore(name, value) for name, value in values.items()})


# A folder of them -------------------------------------------------------------------------------------------


def some(words: Sequence[str]) -> str:
    """The first three, and how many there are besides."""
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")


@dataclass(frozen=True)
class Snapshot:
    path: Path
    nimg: int
    sigma_rel: float
    header: dict  # of a state dict or a released pickle no more than its name tells


def list_snapshots(folder: Path) -> list[Snapshot]:
    """The tracked snapshots of a run, or in any folder, by time and length; reconstructions are left out.

    ValueError, naming the file, where one is truncated, foreign, or the same as another.
    """
    folder = folder / "snapshots" if (folder / "snapshots").is_dir() else folder
    require(folder.is_dir(), f"{folder} is not a folder")
    found: dict[tuple[int, float], Snapshot] = {}
    for path in sorted(folder.iterdir()):
        name = NAME.fullmatch(path.name)
        if name is None:
            continue
        header = {"network": None, "config": None, "nimg": int(name[1]), "sigma_rel": float(name[2])}
        if name[3] == "pkl":  # EDM2's released ones are named by thousands of images, of multiples of 1024
            header["nimg"] = -(-int(name[1]) * 1000 // 1024) * 1024
        header = read_header(path) if name[3] == "safetensors" else header
        nimg, sigma_rel = header["nimg"], header["sigma_rel"]
        fits = isinstance(nimg, int) and isinstance(sigma_rel, float) and 0 < sigma_rel < SIGMA_REL_MAX
        require(fits, f"{path} is no power-function EMA: of time {nimg!r} and sigma_rel {sigma_rel!r}")
        if nimg > 0 and "reconstructed" not in header:
            twin = found.setdefault((nimg, sigma_rel), Snapshot(path, nimg, sigma_rel, header)).path
            require(twin == path, f"{path} and {twin.name} are both the snapshot {nimg}-{sigma_rel}")
    require(len(found) > 0, f"{folder} has no snapshots, <nimg>-<sigma_rel>.safetensors or .pt or .pkl")
    return [found[key] for key in sorted(found)]


def mapped(path: Path) -> dict[str, Tensor]:
    """A file's tensors, memory-mapped: read when first used. ValueError, naming it, where it holds none."""
    if path.suffix == ".pkl":  # not mapped, but read
        return read_official_pickle(path)[1]
    try:
        if path.suffix == ".pt":
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        else:
            with safe_open(path, "pt") as file:
                tensors = file.get_tensors()
    except Exception as error:  # each reader has its own
        raise ValueError(f"{path} is missing, truncated or not a file of weights") from error
    named = isinstance(tensors, dict) and all(isinstance(value, Tensor) for value in tensors.values())
    require(named, f"{path} is not a state dict: it holds more than named tensors")
    return tensors


Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # types and shapes of tensors


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


def layout(path: Path) -> Layout:
    """Types and shapes of what `mapped` gives, in the order of the file. ValueError likewise."""
    if path.suffix != ".safetensors":
        return layout_of(mapped(path))
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            examples = {value.get_dtype(): name for name, value in slices.items()}
            dtypes = {kind: file.get_tensor(name).dtype for kind, name in examples.items()}
            return {k: (dtypes[v.get_dtype()], tuple(v.get_shape())) for k, v in slices.items()}
    except Exception as error:  # as in `mapped`
        raise ValueError(f"{path} is missing, truncated or not a file of weights") from error


def numel(tensors: Layout) -> int:
    return sum(math.prod(shape) for _, shape in tensors.values())


def blocks(tensors: Layout) -> list[Layout]:
    """Neighbours of one type, which are one array in a safetensors file."""
    return [dict(block) for _, block in groupby(tensors.items(), lambda item: item[1][0])]


def mapped_blocks(path: Path, blocks: Sequence[Layout]) -> list[Tensor]:
    """A safetensors file of these blocks, memory-mapped: each as one tensor, (L,)."""
    dtypes = [next(iter(block.values()))[0] for block in blocks]
    sizes = [dtype.itemsize * numel(block) for dtype, block in zip(dtypes, blocks, strict=True)]
    whole = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    parts = whole[len(whole) - sum(sizes) :].split(sizes)  # tensors end the file
    flat = []
    for part, dtype in zip(parts, dtypes, strict=True):
        aligned = part.storage_offset() % dtype.itemsize == 0  # as in our own files
        flat.append((part if aligned else part.clone()).view(dtype))
    return flat


def unpacked(block: Layout, values: Tensor) -> dict[str, Tensor]:
    """The tensors that a block (L,) is made of."""
    parts = values.split([math.prod(shape) for _, shape in block.values()])
    return {name: part.view(shape) for (name, (_, shape)), part in zip(block.items(), parts, strict=True)}


def require_alike(snapshots: Sequence[Snapshot]) -> set[torch.dtype]:
    """The types of the weights. ValueError, naming the file, where one is not of the last one's network."""
    last, dtypes = snapshots[-1], set()
    shapes = {name: shape for name, (_, shape) in layout(last.path).items()}
    for snapshot in snapshots:
        header, tensors = snapshot.header, layout(snapshot.path)
        own = header | {key: last.header[key] for key in ("nimg", "sigma_rel")}
        faults = [f"its {key} differs" for key in last.header | own if own.get(key) != last.header.get(key)]
        faults += [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
        for name, (_, shape) in tensors.items():
            if name not in shapes:
                faults.append(f"{name} is not of this network")
            elif shapes[name] != shape:
                faults.append(f"{name} has shape {shape}, not {shapes[name]}")
        require(not faults, f"{snapshot.path} does not fit {last.path.name}: {some(faults)}")
        dtypes |= {dtype for dtype, _ in tensors.values()}
    return dtypes
