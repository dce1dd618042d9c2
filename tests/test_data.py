"""Data sets: every source read back value for value, every bad file, and the order of batches."""

import gc
import gzip
import io
import itertools
import json
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pooch
import pytest
import sklearn.datasets
from PIL import Image

from shared.data import DataConfig, Dataset, Source, batches, center_crop_and_resize, load_data

RNG = np.random.default_rng(0)


def scaled(images: np.ndarray) -> np.ndarray:
    """uint8 (N, H, W, C) as a Dataset gives them."""
    return images.astype(np.float32).transpose(0, 3, 1, 2) / np.float32(127.5) - np.float32(1)


def everything(dataset: Dataset) -> np.ndarray:
    return dataset.images(np.arange(len(dataset)))


def write_images(folder: Path, images: dict[str, np.ndarray], labels: object = ...) -> str:
    for name, image in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    if labels is not ...:
        (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    return str(folder)


def write_zip(path: Path, folder: Path) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    return str(path)


def write_latents(folder: Path, latents: np.ndarray) -> str:
    folder.mkdir(exist_ok=True)
    for i, latent in enumerate(latents):
        np.save(folder / f"{i:03}.npy", latent)
    return str(folder)


# The crop ---------------------------------------------------------------------------------------------------


def test_crop_of_blocks():
    blocks = np.array([[10, 20, 30, 40], [50, 60, 70, 80]], np.uint8)  # halved: these; cropped: columns 1, 2
    image = blocks.repeat(2, 0).repeat(2, 1)[..., None]
    assert center_crop_and_resize(image, 2)[..., 0].tolist() == [[20, 30], [60, 70]]
    rgb = np.concatenate([image, image + 1, image + 2], -1).transpose(1, 0, 2)
    assert center_crop_and_resize(rgb, 2)[..., 1].tolist() == [[21, 61], [31, 71]]
    assert center_crop_and_resize(image, 1).tolist() == [[[(10 + 20 + 50 + 60) // 4]]]  # the left of two


def test_crop_is_bicubic():
    """A step 0, 0, 255, 255 enlarged to 8: Keys' kernel, a = -1/2, at 1/4 and 3/4 between pixels."""
    image = np.array([0, 0, 255, 255], np.uint8)[None].repeat(4, 0)[..., None]
    kernel = lambda x: 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    before = 255 * (kernel(0.75) + kernel(1.75))  # pixel 3 lies 0.75 and 1.75 from the two white ones
    row = center_crop_and_resize(image, 8)[0, :, 0].tolist()
    assert row[3] == round(before) and row[4] == 255 - round(before) and row == [255 - v for v in row[::-1]]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_crop_without_resizing(channels):
    """The short side has the size already: of 9 rows the middle 5, of 8 columns the first of two middles."""
    image = RNG.integers(0, 256, (9, 5, channels), np.uint8)
    np.testing.assert_array_equal(center_crop_and_resize(image, 5), image[2:7])
    image = RNG.integers(0, 256, (5, 8, channels), np.uint8)
    np.testing.assert_array_equal(center_crop_and_resize(image, 5), image[:, 1:6])


@pytest.mark.parametrize("height, width, size", [(37, 23, 8), (5, 3, 7), (33, 64, 9), (1, 1, 4)])
def test_crop_of_odd_sizes(height, width, size):
    image = np.full((height, width, 3), 77, np.uint8)
    np.testing.assert_array_equal(center_crop_and_resize(image, size), np.full((size, size, 3), 77))


# Sources ----------------------------------------------------------------------------------------------------


def test_digits():
    train, validation = load_data(DataConfig())
    assert (len(train), len(validation)) == (1500, 297)
    for dataset in (train, validation):
        assert (dataset.shape, dataset.num_classes, dataset.latent_mean) == ((1, 8, 8), 10, None)
        assert dataset.labels.dtype == np.int64 and dataset.labels.shape == (len(dataset),)
        assert set(dataset.labels.tolist()) == set(range(10))
        assert everything(dataset).dtype == np.float32 and everything(dataset).shape[1:] == (1, 8, 8)
    digits = sklearn.datasets.load_digits()
    source = {
        (tuple((int(v) * 255 + 8) // 16 for v in image.ravel()), int(label))  # v * 255 / 16, rounded
        for image, label in zip(digits.images, digits.target, strict=True)
    }
    seen = []
    for dataset in (train, validation):
        values = np.rint((everything(dataset) + 1) * 127.5).astype(int).reshape(len(dataset), -1).tolist()
        seen += zip(map(tuple, values), dataset.labels.tolist(), strict=True)
    assert len(seen) == 1797 and set(seen) == source
    # The split is fixed for good: what is measured on it is compared across machines.
    assert train.labels[:8].tolist() == TRAIN_LABELS and validation.labels[:8].tolist() == VALIDATION_LABELS


TRAIN_LABELS = [2, 8, 2, 6, 6, 7, 1, 9]
VALIDATION_LABELS = [2, 2, 9, 8, 8, 3, 6, 0]


def idx_bytes(array: np.ndarray) -> bytes:
    header = (0x800 + array.ndim).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


FASHION = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (5, 28, 28), np.uint8),
    "train-labels-idx1-ubyte": np.array([3, 0, 9, 1, 1], np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (2, 28, 28), np.uint8),
    "t10k-labels-idx1-ubyte": np.array([2, 7], np.uint8),
}


@pytest.fixture
def fashion(tmp_path) -> Path:
    """A tiny Fashion-MNIST, its training images plain and the rest packed."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name, array in FASHION.items():
        if name == "train-images-idx3-ubyte":
            (folder / name).write_bytes(idx_bytes(array))
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
    return folder


def test_fashion_mnist(fashion):
    train, validation = load_data(DataConfig("fashion-mnist", cache=fashion.parent))
    images, labels, test_images, test_labels = FASHION.values()
    np.testing.assert_array_equal(everything(train), scaled(images[..., None]))
    np.testing.assert_array_equal(everything(validation), scaled(test_images[..., None]))
    assert train.labels.tolist() == labels.tolist() and validation.labels.tolist() == test_labels.tolist()
    assert train.num_classes == validation.num_classes == 10 and train.shape == (1, 28, 28)


@pytest.mark.parametrize("name, content", [
    ("train-images-idx3-ubyte", idx_bytes(FASHION["train-images-idx3-ubyte"])[:-1]),
    ("train-images-idx3-ubyte", idx_bytes(FASHION["train-images-idx3-ubyte"]) + b"x"),
    ("train-images-idx3-ubyte", b"\0\0\x08\1" + idx_bytes(FASHION["train-images-idx3-ubyte"])[4:]),
    ("train-images-idx3-ubyte", b"\0\0\x08"),
    ("train-images-idx3-ubyte", b""),
    ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(np.zeros(3, np.uint8)))),
    ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(np.zeros(2, np.uint8)))[:-4]),
    ("t10k-labels-idx1-ubyte.gz", b"not gzip"),
])
def test_bad_idx_file(fashion, name, content):
    (fashion / name).write_bytes(content)
    refuses(DataConfig("fashion-mnist", cache=fashion.parent), str(fashion / name.removesuffix(".gz")))


CIFAR = {name: RNG.integers(0, 256, (2, 3073), np.uint8) for name in
         [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]}
for number, records in enumerate(CIFAR.values()):
    records[:, 0] = (number, 9 - number)


def write_cifar(folder: Path, nested: str = "") -> None:
    (folder / nested).mkdir(parents=True)
    for name, records in CIFAR.items():
        (folder / nested / name).write_bytes(records.tobytes())


def cifar_archive() -> bytes:
    """Members in the wrong order, and others among them, as in the published archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        files = {"readme.html": b"<html>"} | {name: CIFAR[name].tobytes() for name in reversed(CIFAR)}
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("form", ["files", "nested", "archive"])
def test_cifar10(tmp_path, form):
    folder = tmp_path / "cifar10"
    if form == "archive":
        folder.mkdir()
        (folder / "cifar-10-binary.tar.gz").write_bytes(cifar_archive())
    else:
        write_cifar(folder, "cifar-10-batches-bin" if form == "nested" else "")
    before = sorted(tmp_path.rglob("*"))
    train, validation = load_data(DataConfig("cifar10", cache=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked"
    assert (len(train), len(validation), train.shape, train.num_classes) == (10, 2, (3, 32, 32), 10)
    assert train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5] and validation.labels.tolist() == [5, 4]
    record = CIFAR["data_batch_2.bin"][1]  # the fourth image; red, then green, then blue planes, row by row
    for c, y, x in [(0, 0, 0), (1, 0, 0), (2, 31, 30), (0, 3, 17)]:
        value = record[1 + 1024 * c + 32 * y + x]
        assert train.images(np.array([3]))[0, c, y, x] == np.float32(value) / np.float32(127.5) - 1


@pytest.mark.parametrize("name, content", [
    ("data_batch_3.bin", None),
    ("data_batch_3.bin", b""),
    ("test_batch.bin", CIFAR["test_batch.bin"].tobytes()[:-1]),
])
def test_bad_cifar_file(tmp_path, name, content):
    write_cifar(tmp_path / "cifar10")
    path = tmp_path / "cifar10" / name
    path.unlink() if content is None else path.write_bytes(content)
    refuses(DataConfig("cifar10", cache=tmp_path), str(path))


@pytest.mark.parametrize("content", [b"", b"junk", cifar_archive()[:-100], gzip.compress(b"no tar" * 1000)])
def test_bad_cifar_archive(tmp_path, content):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(content)
    refuses(DataConfig("cifar10", cache=tmp_path), "cifar-10-binary.tar")


DOWNLOADS = {
    "fashion-mnist": [
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/train-images-idx3-ubyte.gz",
         "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/train-labels-idx1-ubyte.gz",
         "md5:25c81989df183df01b3e8a0aad5dffbe"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/t10k-images-idx3-ubyte.gz",
         "md5:bef4ecab320f06d8554ea6380940ec79"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/t10k-labels-idx1-ubyte.gz",
         "md5:bb300cfdad3c16e7a12a480ee83cd310"),
    ],
    "cifar10": [
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    ],
}


@pytest.mark.parametrize("source", DOWNLOADS)
def test_download(source, tmp_path, monkeypatch):
    asked = []

    def retrieve(url, known_hash, fname, path, progressbar):
        asked.append((url, known_hash))
        Path(path).mkdir(parents=True, exist_ok=True)
        cifar = source == "cifar10"
        content = cifar_archive() if cifar else gzip.compress(idx_bytes(FASHION[Path(url).stem]))
        (Path(path) / fname).write_bytes(content)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    train, _ = load_data(DataConfig(source, cache=tmp_path / "cache"))
    assert asked == DOWNLOADS[source] and len(train) in (5, 10)
    assert {file.parent for file in tmp_path.rglob("*.gz")} == {tmp_path / "cache" / source}
    load_data(DataConfig(source, cache=tmp_path / "cache"))
    assert len(asked) == len(DOWNLOADS[source]), "what is there is not downloaded again"


@pytest.mark.parametrize("source, name", [("fashion-mnist", "train-images"), ("cifar10", "cifar-10-binary")])
def test_download_that_fails(source, name, tmp_path, monkeypatch):
    def retrieve(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    refuses(DataConfig(source, cache=tmp_path), name, "no route to host")


@pytest.mark.parametrize("packed", [False, True])
def test_folder_and_zip(tmp_path, packed):
    """Sorted by name, nested, any extension's case; labels by name; every third held out."""
    images = RNG.integers(0, 256, (7, 4, 6, 3), np.uint8)
    names = ["b/00.png", "a/01.png", "a/00.PNG", "c.bmp", "a/x/9.png", "z.tiff", "b/01.png"]
    folder = tmp_path / "images"
    labels = [[name, 10 + i] for i, name in enumerate(names)]
    source = write_images(folder, dict(zip(names, images, strict=True)), labels[::-1])
    (folder / "notes.txt").write_text("not an image")
    (folder / "a" / "._00.png").write_bytes(b"what macOS leaves beside a/00.png")
    source = write_zip(tmp_path / "images.zip", folder) if packed else source
    train, validation = load_data(DataConfig(source, holdout=3))
    order = np.array(sorted(range(7), key=names.__getitem__))
    held = order[[2, 5]]
    rest = order[[0, 1, 3, 4, 6]]
    assert train.shape == validation.shape == (3, 4, 6) and train.num_classes == validation.num_classes == 17
    np.testing.assert_array_equal(everything(train), scaled(images[rest]))
    np.testing.assert_array_equal(everything(validation), scaled(images[held]))
    assert train.labels.tolist() == (10 + rest).tolist()
    assert validation.labels.tolist() == (10 + held).tolist()
    np.testing.assert_array_equal(train.images(np.array([4, 0, 4])), scaled(images[rest[[4, 0, 4]]]))
    train, validation = load_data(DataConfig(source, holdout=0))
    assert (len(train), len(validation), len(validation.labels)) == (7, 0, 0)
    assert validation.images(np.arange(0)).shape == (0, 3, 4, 6)


@pytest.mark.parametrize("mode, read_as", [
    ("L", "L"), ("RGB", "RGB"), ("RGBA", "RGBA"), ("P", "RGB"), ("1", "L"), ("LA", "RGBA"), ("CMYK", "RGB"),
])
def test_modes(tmp_path, mode, read_as):
    image = Image.fromarray(RNG.integers(0, 256, (5, 4, 4), np.uint8))
    image = (image.convert("RGB") if mode == "P" else image).convert(mode)
    image.save(tmp_path / ("0.tiff" if mode == "CMYK" else "0.png"))
    train, _ = load_data(DataConfig(str(tmp_path)))
    expected = np.asarray(image.convert(read_as)).reshape(1, 5, 4, -1)
    np.testing.assert_array_equal(everything(train), scaled(expected))


@pytest.mark.parametrize("labels", [None, [], ...])
def test_no_labels(tmp_path, labels):
    source = write_images(tmp_path / "f", {"0.png": np.zeros((2, 2), np.uint8)}, labels)
    train, validation = load_data(DataConfig(source))
    assert train.labels is None and validation.labels is None and train.num_classes == 0


def test_image_size(tmp_path):
    """Images of any size are cropped to one; arrays and uint8 .npy likewise, .npy being (C, H, W)."""
    shapes = [(9, 20, 3), (16, 16, 3), (31, 8, 3)]
    images = {f"{i}.png": RNG.integers(0, 256, shape, np.uint8) for i, shape in enumerate(shapes)}
    source = write_images(tmp_path / "f", images)
    array = RNG.integers(0, 256, (12, 10, 3), np.uint8)
    np.save(tmp_path / "f" / "3.npy", array.transpose(2, 0, 1))
    train, _ = load_data(DataConfig(source, image_size=4))
    expected = np.stack([center_crop_and_resize(image, 4) for image in [*images.values(), array]])
    np.testing.assert_array_equal(everything(train), scaled(expected))
    np.savez(tmp_path / "a.npz", images=array[None].repeat(2, 0))
    train, _ = load_data(DataConfig(str(tmp_path / "a.npz"), image_size=4))
    np.testing.assert_array_equal(everything(train), scaled(expected[[3, 3]]))
    train, _ = load_data(DataConfig(image_size=4))
    assert everything(train).shape == (1500, 1, 4, 4)


@pytest.mark.parametrize("names", [("images", "labels"), ("arr_0", "arr_1")])
@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 5, 1), (6, 4, 5, 3)])
def test_npz(tmp_path, names, shape):
    images, labels = RNG.integers(0, 256, shape, np.uint8), np.array([0, 4, 1, 1, 2, 0], np.uint8)
    path = tmp_path / "a.npz"
    np.savez(path, **dict(zip(names, (images, labels), strict=True)))
    train, validation = load_data(DataConfig(str(path), holdout=4))
    images = images.reshape(6, 4, 5, -1)
    np.testing.assert_array_equal(everything(train), scaled(images[[0, 1, 2, 4, 5]]))
    np.testing.assert_array_equal(everything(validation), scaled(images[[3]]))
    assert train.labels.tolist() == [0, 4, 1, 2, 0] and train.num_classes == 5
    assert train.labels.dtype == np.int64
    np.savez_compressed(path, images)
    assert load_data(DataConfig(str(path)))[0].labels is None


# Latents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "zip", "npz"])
def test_latents_are_standardized_over_the_training_items(tmp_path, kind):
    latents = RNG.normal([[[1.0]], [[-20.0]]], [[[2.0]], [[0.5]]], (9, 2, 3, 4)).astype(np.float16)
    source = write_latents(tmp_path / "f", latents)
    if kind == "zip":
        source = write_zip(tmp_path / "f.zip", tmp_path / "f")
    elif kind == "npz":
        source = str(tmp_path / "f.npz")
        np.savez(source, images=latents)
    train, validation = load_data(DataConfig(source, holdout=4))
    held = np.array([3, 7])
    values = np.delete(latents, held, 0).astype(np.float64)
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3))
    for dataset, chosen in ((train, values), (validation, latents[held].astype(np.float64))):
        assert isinstance(dataset.latent_mean, list) and isinstance(dataset.latent_std[0], float)
        np.testing.assert_allclose(dataset.latent_mean, mean, rtol=1e-12)
        np.testing.assert_allclose(dataset.latent_std, std, rtol=1e-12)
        expected = (chosen - mean[:, None, None]) / std[:, None, None] * 0.5  # EDM's sigma_data
        np.testing.assert_allclose(everything(dataset), expected, rtol=0, atol=1e-5)
        assert everything(dataset).dtype == np.float32 and dataset.shape == (2, 3, 4)


def test_given_statistics(tmp_path):
    """Exact in binary; nothing but the first item is read to load; one of the two may still be measured."""
    latents = np.array([1.0, 3.0, -5.0, 7.0]).reshape(2, 2, 1, 1).repeat(2, 3)
    source = write_latents(tmp_path / "f", latents)
    config = DataConfig(source, latent_mean=(1.0, -1.0), latent_std=(2.0, 0.5))
    train, _ = load_data(config)
    assert (train.latent_mean, train.latent_std) == ([1.0, -1.0], [2.0, 0.5])
    assert everything(train)[:, :, 0, 0].tolist() == [[0.0, 4.0], [-1.5, 8.0]]
    train, _ = load_data(DataConfig(source, latent_mean=(1.0, -1.0)))
    assert (train.latent_mean, train.latent_std) == ([1.0, -1.0], [3.0, 2.0])
    (tmp_path / "f" / "001.npy").write_bytes(b"")
    load_data(config)


# What is wrong, in one sentence that names the file ---------------------------------------------------------


def refuses(config: DataConfig, *parts: str) -> None:
    """Loading, or else reading everything, raises one ValueError of one line with these parts."""
    with pytest.raises(ValueError) as error:
        everything(load_data(config)[0])
    message = str(error.value)
    assert type(error.value) is ValueError and "\n" not in message
    assert all(part in message for part in parts), message


def test_no_source(tmp_path):
    refuses(DataConfig("cifar11"), "cifar11", "digits, fashion-mnist, cifar10")
    refuses(DataConfig(str(tmp_path / "nothing")), "nothing")
    refuses(DataConfig(str(tmp_path / "nothing.zip")), "nothing.zip")
    refuses(DataConfig(str(tmp_path / "nothing.npz")), "nothing.npz")
    (tmp_path / "notes.txt").write_text("text")
    refuses(DataConfig(str(tmp_path / "notes.txt")), "notes.txt")
    refuses(DataConfig(str(tmp_path)), str(tmp_path), "0 images")
    for change, sentence in ((dict(image_size=-1), "image_size is -1"), (dict(holdout=1), "holdout is 1")):
        with pytest.raises(ValueError, match=sentence):
            DataConfig(**change)


def test_truncated_zip(tmp_path):
    write_images(tmp_path / "f", {"0.png": np.zeros((2, 2), np.uint8)})
    path = Path(write_zip(tmp_path / "f.zip", tmp_path / "f"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    refuses(DataConfig(str(path)), "f.zip")
    path.write_bytes(whole[:60] + bytes([whole[60] ^ 255]) + whole[61:])
    refuses(DataConfig(str(path)), "f.zip/0.png", "CRC")


@pytest.mark.parametrize("content", [b"", b"no image", "truncated"])
def test_broken_image(tmp_path, content):
    images = {f"{i}.png": RNG.integers(0, 256, (9, 9), np.uint8) for i in range(3)}
    source = write_images(tmp_path / "f", images)
    path = tmp_path / "f" / "1.png"
    path.write_bytes(path.read_bytes()[:70] if content == "truncated" else content)
    train, _ = load_data(DataConfig(source))
    train.images(np.array([0, 2]))
    with pytest.raises(ValueError, match=r"f/1\.png"):
        train.images(np.array([1]))
    with pytest.raises(ValueError, match=r"f/1\.png"):
        next(batches(train, 3, 0, 0))


def test_different_sizes(tmp_path):
    images = {"0.png": np.zeros((4, 6, 3), np.uint8), "1.png": np.zeros((4, 6), np.uint8)}
    refuses(DataConfig(write_images(tmp_path / "f", images)), "f/1.png", "(1, 4, 6)", "(3, 4, 6)")
    images = {"0.png": np.zeros((4, 6, 3), np.uint8), "1.png": np.zeros((4, 7, 3), np.uint8)}
    refuses(DataConfig(write_images(tmp_path / "g", images)), "g/1.png", "(3, 4, 7)", "(3, 4, 6)")
    images = {"0.png": np.zeros((4, 6, 3), np.uint8)}
    source = write_images(tmp_path / "h", images)
    np.save(tmp_path / "h" / "1.npy", np.zeros((3, 4, 6), np.float32))
    refuses(DataConfig(source), "h/1.npy", "float32", "uint8")


def test_items_that_are_neither_images_nor_latents(tmp_path):
    write_images(tmp_path / "deep", {"0.png": np.zeros((2, 2), np.uint16)})
    refuses(DataConfig(str(tmp_path / "deep")), "deep/0.png", "uint16")
    write_latents(tmp_path / "ints", np.zeros((2, 3, 4, 4), np.int64))
    refuses(DataConfig(str(tmp_path / "ints")), "ints/000.npy", "int64")
    write_latents(tmp_path / "flat", np.zeros((2, 4, 4)))
    refuses(DataConfig(str(tmp_path / "flat")), "flat/000.npy", "(4, 4)")
    np.save(tmp_path / "flat" / "000.npy", np.array([{}]), allow_pickle=True)
    refuses(DataConfig(str(tmp_path / "flat")), "flat/000.npy", "allow_pickle=False")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_latents_that_are_not_finite(tmp_path, bad):
    latents = RNG.normal(size=(4, 2, 3, 3))
    latents[2, 1, 0, 0] = bad
    refuses(DataConfig(write_latents(tmp_path / "f", latents)), "f/002.npy", "finite")
    np.savez(tmp_path / "a.npz", images=latents)
    source = str(tmp_path / "a.npz")
    refuses(DataConfig(source, latent_mean=(0, 0), latent_std=(1, 1)), "a.npz item 2", "finite")


def test_statistics_that_do_not_fit(tmp_path):
    latents = RNG.normal(size=(4, 20, 2, 2))
    source = write_latents(tmp_path / "f", latents)
    refuses(DataConfig(source, latent_mean=(0.0,)), source, "20 channels")
    refuses(DataConfig(source, latent_std=(1.0,) * 21), source, "20 channels")
    refuses(DataConfig(source, latent_std=(1.0,) * 19 + (0.0,)), source, "0.0")
    latents[:, 3] = 0.1
    write_latents(tmp_path / "f", latents.astype(np.float32))
    refuses(DataConfig(source), source, "20 channels", "0.0")


@pytest.mark.parametrize("labels, parts", [
    ([["0.png", 0]], ["1.png has no label"]),
    ([["0.png", 0], ["1.png", 1], ["2.png", 0]], ["2.png has a label, but no file"]),
    ([["0.png", 0], ["1.png", -1]], ["1.png", "label -1"]),
    ([["0.png", 0], ["1.png", 0.5]], ["1.png", "label 0.5"]),
    ([["0.png", 0], ["1.png", "cat"]], ["1.png", "label cat"]),
    ([["0.png", 0], ["1.png", None]], ["1.png", "label None"]),
    ([["0.png", 0], ["1.png", [0, 1]]], ["1.png", "label [0, 1]"]),
    ([["0.png", 0], ["1.png"]], ["dataset.json"]),
    ("cats", ["dataset.json"]),
    (3, ["dataset.json"]),
])
@pytest.mark.parametrize("packed", [False, True])
def test_bad_labels(tmp_path, labels, parts, packed):
    folder = tmp_path / "f"
    source = write_images(folder, {f"{i}.png": np.zeros((2, 2), np.uint8) for i in range(2)}, labels)
    refuses(DataConfig(write_zip(tmp_path / "f.zip", folder) if packed else source), "/f", *parts)


def test_bad_dataset_json(tmp_path):
    source = write_images(tmp_path / "f", {"0.png": np.zeros((2, 2), np.uint8)})
    for text in ("{", "[]", "{}"):
        (tmp_path / "f" / "dataset.json").write_text(text)
        refuses(DataConfig(source), "f/dataset.json")


@pytest.mark.parametrize("arrays, part", [
    (dict(pictures=np.zeros((2, 2, 2), np.uint8)), "no images"),
    (dict(images=np.zeros((0, 2, 2), np.uint8)), "no images"),
    (dict(images=np.zeros((2, 2), np.uint8)), "no images"),
    (dict(images=np.zeros((2, 2, 2, 2, 2))), "no images"),
    (dict(images=np.zeros((2, 2, 2), np.int32)), "int32"),
    (dict(images=np.zeros((2, 2, 2))), "item 0"),
    (dict(images=np.zeros((2, 2, 2), np.uint8), labels=np.zeros(3, int)), "label"),
    (dict(images=np.zeros((2, 2, 2), np.uint8), labels=np.array([0, -1])), "item 1 has label -1"),
    (dict(images=np.zeros((2, 2, 2), np.uint8), labels=np.array([0.0, 1.0])), "item 0 has label 0.0"),
    (dict(images=np.zeros((2, 2, 2), np.uint8), labels=np.eye(2)), "item 0 has label"),
    (dict(images=np.zeros((2, 2, 2), np.uint8), labels=np.array(3)), "a.npz"),
    (dict(images=np.array([{}, {}])), "allow_pickle=False"),
])
def test_bad_npz(tmp_path, arrays, part):
    np.savez(tmp_path / "a.npz", **arrays)
    refuses(DataConfig(str(tmp_path / "a.npz")), "a.npz", part)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4 and no more"])
def test_a_file_that_is_no_npz(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    refuses(DataConfig(str(tmp_path / "a.npz")), "a.npz")


# Batches ----------------------------------------------------------------------------------------------------


def numbered(size: int, labels: bool = True, width: int = 2) -> Dataset:
    """Image i is i in its left column and 0 elsewhere, and its label is i."""
    images = np.zeros((size, 1, 1, width), np.uint8)
    images[..., 0] = np.arange(size)[:, None, None]
    names = [str(i) for i in range(size)]
    source = Source(images.__getitem__, names, list(range(size)) if labels else None)
    return Dataset(source, np.arange(size), image_size=0)


def take(stream, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The first batches, one after the other."""
    images, labels = zip(*itertools.islice(stream, number), strict=True)
    return np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("size, batch_size", [(10, 5), (10, 3), (7, 7), (7, 20), (1, 4), (13, 1)])
def test_epochs_cover_every_index_once(size, batch_size):
    images, labels = take(batches(numbered(size), batch_size, 1, 0), -(-4 * size // batch_size))
    assert images.dtype == np.float32 and labels.dtype == np.int64
    np.testing.assert_array_equal(np.rint((images[:, 0, 0, 0] + 1) * 127.5), labels)
    epochs = labels[: 4 * size].reshape(4, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())
    if size >= 10:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4, "every epoch has its own order"
        assert sorted(labels[:size].tolist()) != labels[:size].tolist()


def test_every_batch_is_whole():
    stream = batches(numbered(10), 4, 0, 0)
    assert [len(labels) for _, labels in itertools.islice(stream, 6)] == [4] * 6


@pytest.mark.parametrize("batch_size", [3, 8, 25])
def test_a_resumed_run_sees_the_same_batches(batch_size):
    whole = take(batches(numbered(10), batch_size, 5, 0, flip=True), 9)
    for done in (1, 4, 7):
        resumed = take(batches(numbered(10), batch_size, 5, done * batch_size, flip=True), 9 - done)
        for expected, actual in zip(whole, resumed, strict=True):
            np.testing.assert_array_equal(expected[done * batch_size :], actual)


def test_seed_and_epoch_decide_the_order():
    order = [tuple(take(batches(numbered(20), 20, seed, 0), 2)[1].tolist()) for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2]
    assert order[2][:20] != order[0][20:], "epoch 1 of seed 0 is not epoch 0 of seed 1"


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_each_batch(world):
    """Their union, flips too, is what one process reads; no rank reads more than its share."""
    images, labels = take(batches(numbered(10), 4, 2, 8, flip=True), 6)
    for rank in range(world):
        read = []
        dataset = numbered(10)
        original = dataset.source.read
        spy = lambda i, original=original, read=read: (read.append(i), original(i))[1]
        dataset.source = dataset.source._replace(read=spy)
        part = slice(rank, None, world)
        own_images, own_labels = take(batches(dataset, 4, 2, 8, part, workers=0, flip=True), 6)
        share = np.concatenate([np.arange(4 * b, 4 * b + 4)[part] for b in range(6)])
        np.testing.assert_array_equal(own_images, images[share])
        np.testing.assert_array_equal(own_labels, labels[share])
        assert len(read) == len(share)


def test_an_empty_part():
    images, labels = next(batches(numbered(10), 2, 0, 0, slice(3, None, 4), flip=True))
    assert images.shape == (0, 1, 1, 2) and labels.shape == (0,) and labels.dtype == np.int64


def test_flips():
    """Half of the images, whole rows reversed, drawn anew in every epoch, however they are batched."""
    images, labels = take(batches(numbered(200, width=3), 100, 3, 0, flip=True), 4)
    plain, same = take(batches(numbered(200, width=3), 100, 3, 0), 4)
    np.testing.assert_array_equal(labels, same)
    mirrored = (images != plain).any((1, 2, 3))
    expected = np.where(mirrored[:, None, None, None], plain[..., ::-1], plain)
    np.testing.assert_array_equal(images, expected)
    assert 160 < mirrored.sum() < 240
    by_image = mirrored[:200][np.argsort(labels[:200])], mirrored[200:][np.argsort(labels[200:])]
    assert 60 < (by_image[0] != by_image[1]).sum() < 140
    np.testing.assert_array_equal(take(batches(numbered(200, width=3), 50, 3, 0, flip=True), 8)[0], images)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_workers_change_nothing(workers):
    expected = take(batches(numbered(10), 3, 0, 6, workers=0, flip=True), 12)
    actual = take(batches(numbered(10), 3, 0, 6, workers=workers, flip=True), 12)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


def test_threads_may_share_a_zip(tmp_path):
    images = RNG.integers(0, 256, (40, 16, 16, 3), np.uint8)
    write_images(tmp_path / "f", {f"{i:02}.png": image for i, image in enumerate(images)})
    train, _ = load_data(DataConfig(write_zip(tmp_path / "f.zip", tmp_path / "f"), holdout=0))
    stream = batches(train, 8, 0, 0, workers=8)
    order = take(batches(numbered(40), 8, 0, 0), 50)[1]
    actual = np.concatenate([next(stream)[0] for _ in range(50)])
    np.testing.assert_array_equal(actual, scaled(images[order]))


def test_no_labels_in_batches():
    assert next(batches(numbered(4, labels=False), 2, 0, 0))[1] is None


def test_workers_read_ahead_and_no_further():
    read, dataset = [], numbered(100)
    original = dataset.source.read
    dataset.source = dataset.source._replace(read=lambda i: (read.append(i), original(i))[1])
    stream = batches(dataset, 10, 0, 0, workers=3)
    next(stream)
    deadline = time.monotonic() + 10
    while len(read) < 40 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(read) == 40
    read.clear()
    stream = batches(dataset, 10, 0, 0, workers=0)
    next(stream)
    assert len(read) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_surface_as_they_are(workers):
    class Unlucky(Exception):
        pass

    class Broken:
        labels = None

        def __len__(self):
            return 4

        def images(self, indices):
            raise Unlucky(threading.current_thread() is threading.main_thread())

    with pytest.raises(Unlucky) as error:
        next(batches(Broken(), 2, 0, 0, workers=workers))
    assert error.value.args == (workers == 0,)


@pytest.mark.parametrize("end", ["close", "collect", "error"])
def test_threads_end(end):
    before = threading.active_count()
    stream = batches(numbered(10), 2, 0, 0, workers=3)
    next(stream)
    assert threading.active_count() > before
    if end == "close":
        stream.close()
    elif end == "collect":
        del stream
        gc.collect()
    else:
        with pytest.raises(KeyError):
            stream.throw(KeyError())
    assert threading.active_count() == before
