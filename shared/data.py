"""Data sets: float arrays and labels, in an order that a resumed run repeats.

`digits`: scikit-learn's 1797, a fixed random 297 for validation. `fashion-mnist`, `cifar10`: the published
files, packed or not; their test set validates. An .npz: `images` or `arr_0`, uint8 (N, H, W[, C]) or latents
(N, C, H, W), and perhaps `labels` or `arr_1`. A folder or zip, as EDM2's (arXiv:2312.02696v2): images and
.npy (C, H, W), sorted by name, and perhaps `dataset.json`, {"labels": [["00000/img00000000.png", 3], ...]}.
Floats are latents, brought to mean 0 and deviation 0.5 over the training items, all read at first unless both
statistics are given.
"""

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shared.check import require
from shared.diffusion import SIGMA_DATA

FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MD5 = {"train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
               "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
               "t10k-images-idx3-ubyte":  "bef4ecab320f06d8554ea6380940ec79",
               "t10k-labels-idx1-ubyte":  "bb300cfdad3c16e7a12a480ee83cd310"}
CIFAR_URL, CIFAR_MD5 = "https://www.cs.toronto.edu/~kriz/", "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
PIL_MODES = {"1": "L", "LA": "RGBA", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB"}  # read as these


@dataclass(frozen=True)
class DataConfig:
    source: str = "digits"  # digits, fashion-mnist, cifar10, or the path of a folder, a zip or an .npz
    cache: Path = Path("data")  # where fashion-mnist/ and cifar10/ lie; files are downloaded when absent
    image_size: int = 0  # center-crop and resize images to this size; 0 leaves them as they are
    flip: bool = False  # flip images horizontally half of the time
    holdout: int = 50  # every n-th item of a folder, zip or npz is held out for validation; 0: none
    latent_mean: tuple[float, ...] = ()  # per-channel mean that standardizes latents; empty: measured
    latent_std: tuple[float, ...] = ()  # per-channel standard deviation of latents; empty: measured

    def __post_init__(self) -> None:
        require(self.source != "", "source is empty: it must name a data set, a folder, a zip or an .npz")
        require(self.image_size >= 0, f"image_size is {self.image_size}: it must not be negative")
        require(self.holdout != 1 and self.holdout >= 0, f"holdout is {self.holdout}: it must be 0 or 2 up")


@contextmanager
def _naming(name: object) -> Iterator[None]:
    """One sentence that names the file, of whatever is raised inside: decoders raise anything."""
    try:
        yield
    except Exception as error:
        said = re.sub(r" ?<_io.*?>", "", " ".join(str(error).split()))  # a buffer's name tells nothing
        raise ValueError(f"cannot read {name}: {said or repr(error)}") from error


# The crop of ADM's released data pipeline (arXiv:2105.05233), EDM2's `center-crop-dhariwal`.
def center_crop_and_resize(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """(H, W, C) -> (size, size, C): halve while twice too large, resize the short side, crop."""
    image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    while min(image.size) >= 2 * size:
        image = image.resize([length // 2 for length in image.size], Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize([round(length * scale) for length in image.size], Image.Resampling.BICUBIC)
    left, top = ((length - size) // 2 for length in image.size)
    return np.atleast_3d(image)[top : top + size, left : left + size]


class Source(NamedTuple):
    read: Callable[[int], NDArray]  # read(i) is item i, (C, H, W), uint8 or, a latent, float
    names: list[str]  # what errors call the items
    labels: list | None
    num_train: int = 0  # the first so many are for training; 0: unsaid


def _in_memory(name: str, images: NDArray, labels: NDArray | None, num_train: int = 0) -> Source:
    return Source(images.__getitem__, [f"{name} item {i}" for i in range(len(images))], labels, num_train)


def _fetch(path: Path, url: str, md5: str) -> bytes:
    """What `path` holds, or else `path`.gz, which is downloaded from the folder `url` when absent, too."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        import pooch
        pooch.retrieve(url + packed.name, f"md5:{md5}", packed.name, packed.parent, progressbar=True)
    return path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())


def _digits(_: Path) -> Source:
    from sklearn.datasets import load_digits  # takes seconds
    digits, order = load_digits(), np.random.RandomState(0).permutation(1797)  # the same in every NumPy
    images = np.rint(digits.images[order, None] * (255 / 16)).astype(np.uint8)
    return _in_memory("digits", images, digits.target[order], 1500)


def _fashion_mnist(folder: Path) -> Source:
    arrays = []
    for name, md5 in FASHION_MD5.items():
        with _naming(folder / name):
            raw, dims = _fetch(folder / name, FASHION_URL, md5), 3 if "idx3" in name else 1
            magic, *shape = np.frombuffer(raw, ">u4", 1 + dims).tolist()
            fits = magic == 0x800 + dims and (dims == 3 or shape[0] == len(arrays[-1]))
            require(fits, f"{[magic, *shape]} is no IDX header, or not of a label for each image")
            arrays.append(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape))
    images, labels = np.concatenate(arrays[::2])[:, None], np.concatenate(arrays[1::2])
    return _in_memory("fashion-mnist", images, labels, len(arrays[0]))


def _cifar10(folder: Path) -> Source:
    files = {file.name: file.read_bytes() for file in folder.rglob("*.bin")}
    if not files:
        path = folder / "cifar-10-binary.tar"
        with _naming(path), tarfile.open(fileobj=io.BytesIO(_fetch(path, CIFAR_URL, CIFAR_MD5))) as tar:
            files = {Path(m.name).name: tar.extractfile(m).read() for m in tar if m.isfile()}
    for name in CIFAR_FILES:
        size = len(files.get(name, b""))
        require(size and size % 3073 == 0, f"{folder / name} is absent or not of whole 3073-byte records")
    records = np.frombuffer(b"".join(files[name] for name in CIFAR_FILES), np.uint8).reshape(-1, 3073)
    images, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    return _in_memory("cifar10", images, labels, len(records) - size // 3073)


def _npz(path: Path) -> Source:
    with _naming(path), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = arrays.get("images", arrays.get("arr_0")), arrays.get("labels", arrays.get("arr_1"))
        require(images is not None and images.ndim in (3, 4) and len(images), "it has no images")
        require(labels is None or len(labels) == len(images), "it has not one label an image")
        if images.dtype == np.uint8:
            images = images.reshape(*images.shape[:3], -1).transpose(0, 3, 1, 2)
        return _in_memory(str(path), images, labels)


def _files(path: Path) -> Source:
    """A folder or a zip."""
    with _naming(f"{path}, neither digits, fashion-mnist, cifar10 nor a folder, zip or .npz"):
        archive = None if path.is_dir() else zipfile.ZipFile(path)  # it locks its file: threads may share it
    files = archive.namelist() if archive else [file.relative_to(path).as_posix() for file in path.rglob("*")]
    load = archive.read if archive else lambda name: (path / name).read_bytes()
    suffixes = {".npy", *Image.registered_extensions()}
    names = sorted(name for name in files if Path(name).suffix.lower() in suffixes and "/." not in f"/{name}")

    def read(i: int) -> NDArray:
        file = io.BytesIO(load(names[i]))
        if names[i].lower().endswith(".npy"):
            return np.load(file, allow_pickle=False)
        image = Image.open(file)
        return np.atleast_3d(image.convert(PIL_MODES.get(image.mode, image.mode))).transpose(2, 0, 1)

    with _naming(path / "dataset.json"):
        labels = dict(json.loads(load("dataset.json"))["labels"] or ()) if "dataset.json" in files else {}
        for name in sorted(labels.keys() ^ set(names)) if labels else ():
            raise ValueError(f"{name} has no label" if name in names else f"{name} has a label, but no file")
    return Source(read, [f"{path}/{name}" for name in names], [labels[n] for n in names] if labels else None)


class Dataset:
    """Some items of a source. `shape` is (C, H, W); `labels` int64 (N,), or None with `num_classes` 0;
    `latent_mean` and `latent_std` (C,) lists, None for images."""

    def __init__(self, source: Source, index: NDArray, image_size: int):
        self.source, self.index, self.image_size = source, index, image_size
        self.labels = None if source.labels is None else np.array(source.labels, np.int64)[index]
        self.num_classes = 0 if source.labels is None else int(max(source.labels)) + 1
        self.latent_mean = self.latent_std = self.form = None
        self.form = (self.item(0).dtype, self.item(0).shape)  # that all items must have
        self.shape = self.form[1]

    def __len__(self) -> int:
        return len(self.index)

    def item(self, i: int) -> NDArray:
        """Item i of the source, (C, H, W), uint8 or float32."""
        with _naming(self.source.names[i]):
            item = self.source.read(i)
            if item.dtype.kind == "f":
                item = item.astype(np.float32)
                require(np.isfinite(item).all(), "not all of its values are finite")
            elif self.image_size:
                item = center_crop_and_resize(item.transpose(1, 2, 0), self.image_size).transpose(2, 0, 1)
            form = (item.dtype, item.shape)
            if form != self.form:
                ours, first = (f and f"{f[0]} {f[1]}" for f in (form, self.form))
                told = f"it is {ours}, but the first item is {first}"
                require(self.form is None, f"{told}: image_size makes sizes equal, not channels")
                require(item.ndim == 3 and form[0] in (np.uint8, np.float32), f"{form} is no image or latent")
            return item

    def images(self, indices: NDArray) -> NDArray[np.float32]:
        """(B,) -> (B, C, H, W): images in [-1, 1], latents of mean 0 and deviation SIGMA_DATA."""
        items = np.array([self.item(i) for i in self.index[indices]], np.float32).reshape(-1, *self.shape)
        if self.latent_mean is None:
            return items / 127.5 - 1
        mean, std = np.array([self.latent_mean, self.latent_std], np.float32)[..., None, None]
        return (items - mean) / std * SIGMA_DATA


def load_data(config: DataConfig) -> tuple[Dataset, Dataset]:
    """(training, validation) of a source; validation may be empty. ValueError names what is wrong."""
    known = {"digits": _digits, "fashion-mnist": _fashion_mnist, "cifar10": _cifar10}
    if config.source in known:
        source = known[config.source](config.cache / config.source)
    else:
        source = (_npz if config.source.endswith(".npz") else _files)(Path(config.source))
    for name, y in zip(source.names, () if source.labels is None else source.labels, strict=False):
        fits = isinstance(y, int | np.integer) and not isinstance(y, bool) and 0 <= y < 1 << 31
        require(fits, f"{name} has label {y}, not an integer from 0")
    N = len(source.names)
    nth = np.arange(1, N + 1)
    held = nth > source.num_train if source.num_train else nth % (config.holdout or N + 1) == 0
    require(not held.all(), f"{config.source} holds {N} images: too few with holdout {config.holdout}")
    train, validation = (Dataset(source, nth[part] - 1, config.image_size) for part in (~held, held))
    if train.form[0] == np.float32:
        mean, std = config.latent_mean, config.latent_std
        if not (mean and std):
            moments = [(x.mean((1, 2), float), x.var((1, 2), float)) for x in map(train.item, train.index)]
            mu, var = np.swapaxes(moments, 0, 1)  # of each item: (N, C)
            mean, std = mean or mu.mean(0).tolist(), std or np.sqrt(var.mean(0) + mu.var(0)).tolist()
        fits = len(mean) == len(std) == train.shape[0] and np.isfinite([mean, std]).all() and min(std) > 0
        told = f"{config.source} has {train.shape[0]} channels, to which mean {mean} and deviation {std}"
        require(fits, f"{told} do not fit: they must be finite, and the deviation positive")
        train.latent_mean, train.latent_std = list(mean), list(std)
        validation.latent_mean, validation.latent_std = list(mean), list(std)
    return train, validation


def batches(
    dataset: Dataset, batch_size: int, seed: int, start: int,
    part: slice = slice(None), workers: int = 2, flip: bool = False,
) -> Iterator[tuple[NDArray, NDArray | None]]:
    """Endless (images, labels) from image `start` on, a pure function of all arguments but `workers`: threads
    that read as many batches ahead. Every epoch has its permutation; `part` of each batch is a rank's."""

    @lru_cache(maxsize=4)
    def epoch(number: int) -> tuple[NDArray, NDArray]:
        rng = np.random.default_rng([seed, number])
        return rng.permutation(len(dataset)), rng.random(len(dataset)) < 0.5

    def batch(position: int) -> tuple[NDArray, NDArray | None]:
        places = [divmod(p, len(dataset)) for p in range(position, position + batch_size)[part]]
        index = np.array([epoch(e)[0][i] for e, i in places], np.int64)
        mirror = np.array([flip and epoch(e)[1][i] for e, i in places], bool)
        images = dataset.images(index)
        images[mirror] = images[mirror][..., ::-1]
        return images, None if dataset.labels is None else dataset.labels[index]

    with ThreadPoolExecutor(workers or 1) as pool:  # no threads before the first is needed
        ahead = []
        for position in range(start, 1 << 62, batch_size):
            ahead.append(pool.submit(batch, position).result if workers else partial(batch, position))
            if len(ahead) > workers:
                yield ahead.pop(0)()
