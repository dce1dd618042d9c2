"""How good are generated digits? Are they the class they were meant to be, and are they copies?

    python minimal_uvit/sample.py runs/minimal_uvit --num 2000 --out runs/minimal_uvit/digits.npz
    python benchmarks/digits.py runs/minimal_uvit/digits.npz

Class: an RBF support-vector classifier fitted on the real training digits, whose accuracy on the held-out
real ones is the yardstick. Copies: the Euclidean distance to the nearest training digit, pixels in [-1, 1],
of generated digits and of held-out real ones; copies would be much nearer than the latter.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC

from shared.check import require
from shared.data import DataConfig, load_data
from shared.run import cli


@dataclass(frozen=True)
class Options:
    samples: tyro.conf.Positional[Path]  # an .npz of sample.py: arr_0 uint8 (N, 8, 8, 1) and labels arr_1


def judge(images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Figures for images (N, 1, 8, 8) in [-1, 1] that were meant to be of the classes `labels` (N,)."""
    train, held_out = load_data(DataConfig())
    real = train.images(np.arange(len(train))).reshape(len(train), -1)
    test = held_out.images(np.arange(len(held_out))).reshape(len(held_out), -1)
    drawn = images.reshape(len(images), -1)
    classifier = SVC(kernel="rbf", gamma="scale", C=10.0).fit(real, train.labels)
    nearest = NearestNeighbors(n_neighbors=1).fit(real)
    to_train = {name: nearest.kneighbors(x)[0] for name, x in (("drawn", drawn), ("held_out", test))}
    return {
        "agreement": classifier.score(drawn, labels),
        "classifier_accuracy": classifier.score(test, held_out.labels),
        "nearest_drawn": float(np.median(to_train["drawn"])),
        "nearest_held_out": float(np.median(to_train["held_out"])),
        "nearest_drawn_1%": float(np.quantile(to_train["drawn"], 0.01)),
        "nearest_held_out_1%": float(np.quantile(to_train["held_out"], 0.01)),
    }


def main(options: Options) -> None:
    try:
        with np.load(options.samples) as file:
            images, labels = file["arr_0"], file["arr_1"]
    except Exception as error:
        raise ValueError(f"{options.samples} is no .npz of labelled samples") from error
    require(images.shape[1:] == (8, 8, 1), f"{options.samples} holds images {images.shape[1:]}, not digits")
    figures = judge(images.transpose(0, 3, 1, 2) / 127.5 - 1, labels)
    print(f"{len(images)} drawn digits")
    print(f"of their intended class:          {figures['agreement']:.1%}")
    print(f"  the classifier on real digits:  {figures['classifier_accuracy']:.1%}")
    print("distance to nearest training digit, median (1 % quantile):")
    print(f"  drawn:          {figures['nearest_drawn']:.2f} ({figures['nearest_drawn_1%']:.2f})")
    print(f"  held-out real:  {figures['nearest_held_out']:.2f} ({figures['nearest_held_out_1%']:.2f})")


if __name__ == "__main__":
    cli(main, Options, "Judge generated digits.")
