"""results.jsonl: a line a run, written whole as the run ends, so that nothing finished is ever lost.

A line is a JSON object; its `cell` says exactly which run it is, so that a folder may hold runs of many
options, and a run found there is not run again. Reading order: `read`, `append`, `find`.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from comparison.training import Cell
from shared.check import require


def read(path: Path) -> list[dict]:
    """All results of a file, none where there is no file. A last line that a kill has torn is cut off, so
    that the next one starts on its own. ValueError where another line is no result."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    results = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            results.append(json.loads(line))
            fits = isinstance(results[-1].get("cell"), dict)
        except (ValueError, AttributeError):
            fits = False
        require(fits, f"{path} line {number} is not a result: delete the line")
    return results


def append(path: Path, result: dict) -> None:
    """Add a result: one write, on the disk before this returns."""
    line = json.dumps(result, separators=(",", ":"), allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode())
        os.fsync(file.fileno())


def find(results: list[dict], cells: Iterable[Cell]) -> dict[Cell, dict]:
    """The result of each cell that has one; of several the last."""
    known = {json.dumps(result["cell"], sort_keys=True): result for result in results}
    keys = {cell: json.dumps(cell.identity(), sort_keys=True) for cell in cells}
    return {cell: known[key] for cell, key in keys.items() if key in known}
