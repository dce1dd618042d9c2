"""What a snapshot's network drew, written as its header and the file's name ask."""

from pathlib import Path

import numpy as np

from shared.check import require
from shared.diffusion import SIGMA_DATA
from shared.figures import save_grid, save_png, to_uint8
from shared.files import write_whole


def require_fits(path: Path, header: dict) -> None:
    """Raise ValueError where `save_images` could not write what a network of this header draws."""
    fits = path.name != "" and path.suffix in ("", ".png", ".npz")
    require(fits, f"out is {str(path)!r}: it must be a .png, an .npz or, without a suffix, a folder")
    require(not path.exists() or path.is_dir() == (path.suffix == ""), f"out, {path}, is a file or a folder")
    latent = bool(header.get("latent_mean")) and path.suffix != ".npz"
    require(not latent, f"out is {path}: latents are no pictures, they need an .npz")


def save_images(path: Path, images: np.ndarray, labels: list | None, seed: int, header: dict) -> None:
    """Write images (B, C, H, W) as `path` asks: .png, one grid; .npz, `arr_0` uint8 (B, H, W, C) and labels
    `arr_1`; else a folder of PNGs named by seed. Latents, of a header with statistics, go back to their own
    scale, and only into an .npz: `arr_0` float32 (B, C, H, W)."""
    if header.get("latent_mean"):
        require_fits(path, header)
        mean, std = (np.reshape(header[key], (-1, 1, 1)) for key in ("latent_mean", "latent_std"))
        array = (images / SIGMA_DATA * std + mean).astype(np.float32)
    else:
        array = to_uint8(images)
    if path.suffix == ".npz":
        arrays = {"arr_0": array} | ({} if labels is None else {"arr_1": np.asarray(labels, np.int64)})
        write_whole(path, lambda file: np.savez(file, **arrays))
    elif path.suffix == ".png":
        save_grid(path, images, columns=min(len(images), 10))
    else:
        for k, image in enumerate(array):
            save_png(path / f"{seed + k:06d}.png", image)
