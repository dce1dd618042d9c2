"""Pictures of a run: samples, as grids or one by one, and loss curves."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from shared.check import require
from shared.files import write_whole


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images (B, C, H, W) in [-1, 1] -> uint8 (B, H, W, C). ValueError where one is not finite."""
    require(bool(np.isfinite(images).all()), "an image to write is not finite: the network diverged")
    return (np.asarray(images) * 127.5 + 128).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)


def save_png(path: Path, image: np.ndarray, factor: int = 1) -> None:
    """uint8 (H, W, C) as a PNG, enlarged: gray of one channel, else the first three as RGB."""
    picture = Image.fromarray(image[..., 0] if image.shape[-1] < 3 else image[..., :3].copy())
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    write_whole(path, lambda file: picture.save(file, "PNG"))


def save_grid(path: Path, images: np.ndarray, columns: int) -> None:
    """Images (B, C, H, W) in [-1, 1], row by row with thin gaps, about 480 pixels wide or more."""
    tiles = to_uint8(images)
    rows, (H, W, C) = -(-len(tiles) // columns), tiles.shape[1:]
    sheet = np.full((rows, H + 1, columns, W + 1, C), 255, np.uint8)
    for k, tile in enumerate(tiles):
        sheet[k // columns, :H, k % columns, :W] = tile
    sheet = sheet.reshape(rows * (H + 1), columns * (W + 1), C)
    save_png(path, sheet, factor=max(1, round(480 / sheet.shape[1])))


def plot_losses(folder: Path) -> None:
    """Draw `folder/log.jsonl` as `folder/loss.png`: loss over training, validation loss over sigma."""
    from matplotlib.figure import Figure  # slow to import, and not needed to sample

    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    tested = [line for line in lines if line.get("validation")]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([line["nimg"] for line in lines], [line["loss"] for line in lines], ".-", label="training")
    means = [np.mean(list(line["validation"].values())) for line in tested]
    left.plot([line["nimg"] for line in tested], means, "o-", label="validation, mean over sigma")
    for line, shade in zip(tested, np.linspace(0.8, 0, len(tested)), strict=True):
        right.plot([*map(float, line["validation"])], [*line["validation"].values()], color=str(shade))
    left.set(xlabel="images", ylabel="loss", yscale="log")
    left.legend()
    right.set(xlabel="sigma", ylabel="validation loss, later is darker", xscale="log", yscale="log")
    write_whole(folder / "loss.png", lambda file: figure.savefig(file, format="png", dpi=120))
