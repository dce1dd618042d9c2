"""The mechanics of a run: what every training needs and no paper mentions.

`cli` makes a command of a config. `Run` is called by name from each `train.py`'s loop. A run's folder holds
`config.json`, `log.jsonl`, `checkpoint.pt`, `snapshots/`, `samples/` and `loss.png`. Files are written beside
and renamed, so a run killed at any moment leaves whole ones, and the same command resumes it. All randomness
is a function of the seed and of the position in training: steps since the last checkpoint come out the same.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from shared.check import require
from shared.data import Dataset, batches
from shared.diffusion import Denoiser, edm_loss
from shared.files import write_whole

MAX_SKIPPED = 10  # non-finite steps in a row that end a run
VALIDATION_SIGMAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)


class DivergedError(RuntimeError):
    """Ten non-finite losses or gradients in a row."""


def cli(main: Callable[[Any], None], options: Any, description: str) -> None:
    """Run `main` on options parsed from the command line: a config dataclass, or a dict of presets, the first
    the default. Bad input is one line on stderr and exit status 2; a run that diverged, status 1."""
    presets = isinstance(options, dict)
    kind = tyro.extras.subcommand_type_from_defaults(options) if presets else options
    default = next(iter(options.values())) if presets else tyro.MISSING_NONPROP
    config = (tyro.conf.CascadeSubcommandArgs,)  # a preset and its options in any order, or options alone
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parsed = tyro.cli(kind, description=description, default=default, config=config)
        main(parsed)
    except SystemExit as error:
        if error.code == 2:  # tyro's box, of which the first section says it all
            lines = [line.strip("│╭╰─╮╯ ") for line in stderr.getvalue().split("│ ───")[0].splitlines()]
            sentence = re.sub(r"^Error parsing (?!--)\S+: ", "", " ".join(filter(None, lines[1:])))
            print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        raise
    except (ValueError, OSError, DivergedError, KeyboardInterrupt) as error:
        sentence = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        sys.exit({DivergedError: 1, KeyboardInterrupt: 130}.get(type(error), 2))


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; `auto` is this rank's CUDA device where there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()  # what has no memory, as meta, has no item
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class RunConfig:
    """What may change when a run is resumed; everything else is its recipe and may not."""

    out: Path  # folder of the run; a run found there is resumed
    duration: int  # images to train on
    log_every: int  # images between lines of log.jsonl
    sample_every: int  # images between sample grids and validation losses
    snapshot_every: int  # images between snapshots of the averaged weights
    checkpoint_every: int  # images between checkpoints to resume from
    snapshot_precision: Literal["float32", "float16", "bfloat16"] = "float32"  # number format of snapshots
    workers: int = 2  # batches read ahead, each by a thread; 0 reads in the training loop
    device: str = "auto"  # torch device; auto: CUDA where there is one, else the CPU
    compile: bool = False  # torch.compile the network: a minute or more at first, then faster steps

    def __post_init__(self) -> None:
        for name in ("duration", "log_every", "sample_every", "snapshot_every", "checkpoint_every"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be positive")
        require(self.workers >= 0, f"workers is {self.workers}: it must not be negative")


class Run:
    """One process of a run, a context manager. `config` may change when it is resumed, `recipe`, JSON values,
    may not. ValueError for a folder that holds something else, or a run of another recipe."""

    def __init__(self, config: RunConfig, recipe: dict):
        self.config, self.folder = config, config.out
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.part = slice(self.rank, None, self.world)  # this rank's share of a global batch
        self.device = find_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
        self.nimg, self.losses, self.skipped = 0, [], 0
        self.caught = self.signal = 0  # the signal that this rank got, and that all ranks agreed to stop on
        recipe = json.loads(json.dumps(recipe, default=str))
        path = self.folder / "config.json"
        if path.exists():
            try:
                saved = json.loads(path.read_text())
            except ValueError as error:
                raise ValueError(f"{path} is truncated or not JSON") from error
            for name, theirs, ours in differences(saved, recipe):
                told = f"{self.folder} holds a run with {name} {theirs}, not {ours}"
                raise ValueError(f"{told}: choose another --out, or the run's own value")
        else:
            inside = list(self.folder.iterdir()) if self.folder.is_dir() else [self.folder]
            empty = not self.folder.exists() or all(path.name == ".config.json.part" for path in inside)
            require(empty, f"{self.folder} exists and holds no run: choose another --out")
        if self.world > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            dist.barrier()  # every rank has looked at the folder before one writes to it
        if self.rank == 0:
            write_whole(path, lambda file: file.write(json.dumps(recipe, indent=1).encode() + b"\n"))

    def __enter__(self) -> "Run":
        self.handlers = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}
        wait = 0.2 if sys.stderr.isatty() else 20  # seconds between updates; seldom, to a file
        total = self.config.duration
        self.bar = tqdm(total=total, unit="img", unit_scale=True, mininterval=wait, disable=self.rank > 0)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.signal and kind is None:
            print(f"stopped and saved at {self.nimg} images: the same command goes on", file=sys.stderr)
            sys.exit(128 + self.signal)
        if kind is None and self.rank == 0:
            print(f"{self.nimg} images trained on: look at {self.folder / 'samples'}", file=sys.stderr)

    def _stop(self, number: int, _: object) -> None:
        self.caught = number
        signal.signal(number, self.handlers[number])  # a second signal is not caught

    def compile(self, net: nn.Module) -> Callable:
        """`net`, compiled where asked for: one graph, for batches of every size."""
        compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
        require(compiler or not self.config.compile, "--compile needs a C++ compiler: install g++")
        compiled = torch.compile(net, fullgraph=True) if self.config.compile else net

        def call(*args: Tensor | None, **options: Any) -> Any:
            for batch in filter(torch.is_tensor, args):
                torch._dynamo.maybe_mark_dynamic(batch, 0)  # else the next size is a graph of its own
            return compiled(*args, **options)

        return call if self.config.compile else net

    def resume(self, **parts: Any) -> None:
        """Give network, optimizer, averages, ... their state back where there is a checkpoint, and cut the
        log back to that moment. ValueError, naming the file, where it is not one of this run."""
        path, size = self.folder / "checkpoint.pt", 0
        if path.exists():
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
                self.nimg, self.losses, self.skipped, size = state["run"]
                for name, part in parts.items():
                    part.load_state_dict(state[name])
            except Exception as error:
                told = f"{path} is truncated or no checkpoint of this run"
                raise ValueError(f"{told}: delete it to start anew") from error
        if self.rank == 0 and (log := self.folder / "log.jsonl").exists():
            lines = log.read_bytes()[:size]
            write_whole(log, lambda file: file.write(lines))
        self.bar.initial = self.bar.n = self.bar.last_print_n = self.nimg  # its rate counts what is to come

    def batches(self, dataset: Dataset, batch_size: int, seed: int, flip: bool = False) -> Iterator[tuple]:
        """This rank's part of each global batch, from where the run stands to its end or a signal: images
        (B / world, C, H, W) and labels (B / world,) or None, on the device. Counts `nimg`."""
        require(batch_size % self.world == 0, f"{self.world} ranks do not divide batch_size {batch_size}")
        self.batch_size = batch_size
        stream = batches(dataset, batch_size, seed, self.nimg, self.part, self.config.workers, flip)
        while self.nimg < self.config.duration and not self.signal:
            images, labels = next(stream)
            images = torch.from_numpy(images).to(self.device)
            labels = None if labels is None else torch.from_numpy(labels).to(self.device)
            self.nimg += batch_size
            yield images, labels
            self.bar.update(batch_size)

    def generator(self, seed: int) -> torch.Generator:
        """Randomness of this step, the same on every rank: draw for the global batch and take `part` of it.
        Dropout, which draws from the device's default stream, is seeded likewise, apart on each rank."""
        states = np.random.SeedSequence([seed, self.nimg]).generate_state(1 + self.world, np.uint64) >> 1
        torch.manual_seed(int(states[1 + self.rank]))
        return torch.Generator(self.device).manual_seed(int(states[0]))

    def due(self, every: int) -> bool:
        """Whether this step is the last, or reaches a multiple of `every` images."""
        return self.nimg % every < self.batch_size or self.nimg >= self.config.duration

    @torch.no_grad()
    def reduce(self, net: nn.Module, loss: Tensor) -> bool:
        """Sum the loss and `net`'s gradients over ranks, in place; record the loss; agree on stopping. False
        where they are not finite and the step must be skipped; DivergedError after MAX_SKIPPED in a row."""
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        loss = loss.detach().float().reshape(1)
        if self.world > 1:
            stop = torch.full_like(loss, float(self.caught))
            flat = torch.cat([loss, stop, *[grad.reshape(-1) for grad in grads]])
            dist.all_reduce(flat)
            loss, stop, *summed = flat.split([1, 1, *[grad.numel() for grad in grads]])
            self.signal = self.caught or (signal.SIGTERM if stop > 0 else 0)
            torch._foreach_copy_(grads, [s.view_as(grad) for s, grad in zip(summed, grads, strict=True)])
        return self.record(loss.item(), torch.nn.utils.get_total_norm(grads).item())

    def record(self, loss: float, grad_norm: float) -> bool:
        """What `reduce` does with one rank, for a framework that computes its own gradient norm."""
        self.signal = self.caught if self.world == 1 else self.signal
        self.grad_norm, finite = grad_norm, math.isfinite(loss) and math.isfinite(grad_norm)
        self.skipped = 0 if finite else self.skipped + 1
        self.losses.append(loss if finite else None)
        if self.skipped >= MAX_SKIPPED:
            told = f"loss or gradient was not finite in {MAX_SKIPPED} steps in a row, to {self.nimg} images"
            raise DivergedError(f"{told}: see {self.folder / 'log.jsonl'}, then lower lr or check the data")
        return finite

    def log(self, **values: Any) -> None:
        """Add a line to log.jsonl: position, mean loss since the last line, gradient norm, steps skipped, and
        `values`. No times: the log of a resumed run is that of an uninterrupted one."""
        losses = [loss for loss in self.losses if loss is not None]
        loss = sum(losses) / len(losses) if losses else None
        grad_norm = self.grad_norm if math.isfinite(self.grad_norm) else None
        line = {"nimg": self.nimg, "loss": loss, "grad_norm": grad_norm, "skipped": self.losses.count(None)}
        self.losses = []
        if self.rank == 0:
            with open(self.folder / "log.jsonl", "ab", buffering=0) as file:  # one write, so one whole line
                file.write((json.dumps(line | values) + "\n").encode())
            self.bar.set_postfix(loss=loss)

    def save(self, **parts: Any) -> None:
        """Write checkpoint.pt: the state of what `resume` takes, and the run's own."""
        size = log.stat().st_size if (log := self.folder / "log.jsonl").exists() else 0
        state = {name: part.state_dict() for name, part in parts.items()}
        state["run"] = (self.nimg, self.losses, self.skipped, size)
        if self.rank == 0:
            write_whole(self.folder / "checkpoint.pt", lambda file: torch.save(state, file))


def differences(saved: Any, ours: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field name, saved value, our value) of each leaf at which two JSON values differ."""
    if isinstance(saved, dict) and isinstance(ours, dict):
        for key in saved | ours:
            yield from differences(saved.get(key), ours.get(key), f"{name}.{key}".lstrip("."))
    elif saved != ours:
        yield name, saved, ours


@torch.no_grad()
def validate(D: Denoiser, dataset: Dataset, device: torch.device, most: int = 512) -> dict[str, float]:
    """EDM's weighted loss at each of VALIDATION_SIGMAS over the first `most` images, always under the same
    noise: {sigma: loss}. Empty where there are no validation images."""
    images = torch.from_numpy(dataset.images(np.arange(len(dataset))[:most])).to(device)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels[:most]).to(device)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(device)
    sigmas = [torch.full((len(images),), sigma, device=device) for sigma in VALIDATION_SIGMAS if len(images)]
    return {f"{s[0]:g}": edm_loss(D, images, s, noise, labels).mean().item() for s in sigmas}
