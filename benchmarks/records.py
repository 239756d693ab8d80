"""One measurement as a row of ``results/<gpu>.csv``, with the machine it was made on."""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Machine:
    """What the numbers of a run depend on besides the code under test."""

    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str

    @property
    def slug(self) -> str:
        """The GPU's name as a file name, such as ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")


@dataclass
class Row:
    """One provider on one case in one mode; empty fields were not measured.

    Attributes:
        case: Name of the case.
        N: Rows.
        D: Hidden size.
        V: Vocabulary size.
        dtype: Of the tensors.
        provider: Name of the provider; ``floor_end`` is the floor timed again at the end.
        mode: ``full``, ``forward`` or ``backward`` of a training step, or ``no_grad``.
        accum: How ``grad_weight`` is accumulated over chunks.
        median_ms: Median time.
        p20_ms: 20th percentile of the time.
        p80_ms: 80th percentile of the time.
        ratio_to_floor: Median over the mean of the two floor medians.
        peak_mib: Peak memory of a pass above the inputs, gradients included.
        err_loss: Relative error of the loss.
        err_grad_input: Relative Frobenius error of the input's gradient.
        err_grad_weight: Relative Frobenius error of the weight's gradient.
        first_call_s: Wall time of building and running once: compilation and tuning.
        error: Why there is no measurement.
    """

    case: str
    N: int
    D: int
    V: int
    dtype: str
    provider: str
    mode: str
    accum: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    ratio_to_floor: float | None = None
    peak_mib: float | None = None
    err_loss: float | None = None
    err_grad_input: float | None = None
    err_grad_weight: float | None = None
    first_call_s: float | None = None
    error: str = ""


@functools.cache
def this_machine(device_type: str) -> Machine:
    """Describes the machine and the code that run this process."""
    on_gpu = device_type == "cuda"
    return Machine(
        gpu=torch.cuda.get_device_name() if on_gpu else "cpu",
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if on_gpu
        else "",
        torch=torch.__version__,
        triton=_version("triton"),
        commit=_commit(),
    )


def _output(*command: str) -> str:
    """First line a command prints, or ``unknown``."""
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=RESULTS.parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (run.stdout.splitlines() or ["unknown"])[0].strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """The code's commit: ``GREYHOUND_COMMIT`` where there is no git checkout."""
    return os.environ.get("GREYHOUND_COMMIT") or _output("git", "rev-parse", "--short=12", "HEAD")


def append(rows: Sequence[Any], machine: Machine, folder: Path, prefix: str = "") -> Path:
    """Appends rows to the machine's file, making it if needed.

    Args:
        rows: Rows to add, at least one, all of one dataclass.
        machine: Where they were measured.
        folder: Folder of the results.
        prefix: Of the file's name, in front of the GPU's.

    Returns:
        The file.

    Raises:
        ValueError: The file has other columns; move it away or convert it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}{machine.slug}.csv"
    columns = [f.name for f in (*fields(rows[0]), *fields(Machine))] + ["date"]
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"{path} has columns {found}, expected {columns}")
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            values = {**asdict(row), **asdict(machine), "date": date}
            writer.writerow({name: cell_text(value) for name, value in values.items()})
    return path


def cell_text(value: object) -> str:
    """A value as the CSV holds it: empty when missing, floats to five digits."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
