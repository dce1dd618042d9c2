"""Pictures of a run: sample grids and loss curves."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from shared.check import require
from shared.files import write_whole


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images (B, C, H, W) in [-1, 1] -> uint8 (B, H, W, C). ValueError where one is not finite."""
    require(bool(np.isfinite(images).all()), "an image to write is not finite: the network diverged")
    return (np.asarray(images) * 127.5 + 128).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)


def to_picture(image: np.ndarray) -> Image.Image:
    """uint8 (H, W, C): one channel is gray, three or more show their first three as RGB."""
    return Image.fromarray(image[..., 0] if image.shape[-1] < 3 else image[..., :3].copy())


def save_grid(path: Path, images: np.ndarray, columns: int, least: int = 480) -> None:
    """Images (B, C, H, W) in [-1, 1] row by row in a PNG with thin gaps, enlarged to `least` pixels width."""
    tiles = to_uint8(images)
    rows, (H, W, C) = -(-len(tiles) // columns), tiles.shape[1:]
    sheet = np.full((rows, H + 1, columns, W + 1, C), 255, np.uint8)
    for k, tile in enumerate(tiles):
        sheet[k // columns, :H, k % columns, :W] = tile
    picture = to_picture(sheet.reshape(rows * (H + 1), columns * (W + 1), C))
    factor = max(1, round(least / picture.width))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    write_whole(path, lambda file: picture.save(file, "PNG"))


def save_images(
    path: Path, images: np.ndarray, labels: Sequence[int] | None, seed: int, header: dict
) -> None:
    """Write images (B, C, H, W) as `path` asks: .png, one grid; .npz, `arr_0` uint8 (B, H, W, C) and labels
    `arr_1`; else a folder of PNGs named by seed. Latents, whose statistics are in `header`, go back to their
    own scale and need an .npz: `arr_0` float32 (B, C, H, W)."""
    latent = header["latent_mean"] is not None
    require(not latent or path.suffix == ".npz", f"{path}: latents are no pictures, they need an .npz")
    if path.suffix == ".npz":
        if latent:
            mean, std = (np.reshape(header[key], (-1, 1, 1)) for key in ("latent_mean", "latent_std"))
            arrays = {"arr_0": (images * std + mean).astype(np.float32)}
        else:
            arrays = {"arr_0": to_uint8(images)}
        if labels is not None:
            arrays["arr_1"] = np.asarray(labels, np.int64)
        with io.BytesIO() as buffer:
            np.savez(buffer, **arrays)
            content = buffer.getvalue()
        write_whole(path, lambda file: file.write_bytes(content))
    elif path.suffix == ".png":
        save_grid(path, images, columns=min(len(images), 10))
    else:
        for k, image in enumerate(to_uint8(images)):
            picture = to_picture(image)
            write_whole(path / f"{seed + k:06d}.png", lambda file, picture=picture: picture.save(file, "PNG"))


def plot_losses(folder: Path) -> None:
    """Draw `folder/log.jsonl` as `folder/loss.png`: training loss and, per sigma, validation loss."""
    from matplotlib.figure import Figure  # slow to import, and not needed to sample

    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([line["nimg"] for line in lines], [line["loss"] for line in lines], label="training")
    tested = [line for line in lines if line.get("validation")]
    if tested:
        means = [np.mean(list(line["validation"].values())) for line in tested]
        left.plot([line["nimg"] for line in tested], means, "o-", label="validation, mean over sigma")
        for line, shade in zip(tested, np.linspace(0.8, 0, len(tested)), strict=True):
            sigmas = [float(sigma) for sigma in line["validation"]]
            right.loglog(sigmas, list(line["validation"].values()), color=str(shade))
        right.set(xlabel="sigma", ylabel="weighted loss", title="validation, later runs darker")
    left.set(xlabel="images", ylabel="loss", yscale="log", title="loss")
    left.legend()
    write_whole(folder / "loss.png", lambda file: figure.savefig(file, format="png", dpi=120))
