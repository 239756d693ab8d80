"""Times the products of one chunk over chunk sizes: ``python -m benchmarks.sweep``.

How many rows a chunk should hold is a trade between its logits' bytes and how well its three
products use the GPU. The sweep measures the second half of that trade.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.records import RESULTS, cell_text, this_machine

SHAPES = ((4096, 128256), (2048, 151936), (2048, 256000))
CHUNK_ROWS = (256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192)
SCALED_ROWS = 8192

PRODUCTS = {
    "logits": "logits[rows, V] = input @ weight.T, bf16",
    "grad_input": "grad_input[rows, D] = grad_logits @ weight, bf16",
    "accum_weight": "grad_weight[V, D] += grad_logits.T @ input, in place in bf16",
    "first_fp32": "grad_weight[V, D] = grad_logits.T @ input, bf16 operands, fp32 result",
    "accum_fp32": "grad_weight[V, D] += grad_logits.T @ input, in place in fp32",
}


@dataclass
class Point:
    """One product at one chunk size.

    Attributes:
        D: Hidden size.
        V: Vocabulary size.
        rows: Rows of the chunk.
        product: A key of ``PRODUCTS``.
        median_ms: Time of one product.
        tflops: ``2 * rows * D * V`` over that time.
        scaled_ms: That time for 8192 rows in chunks of this size.
        error: Why there is no time.
    """

    D: int
    V: int
    rows: int
    product: str
    median_ms: float | None = None
    tflops: float | None = None
    scaled_ms: float | None = None
    error: str = ""


class Buffers:
    """Random tensors of one (D, V) at the largest chunk; smaller chunks are their first rows."""

    def __init__(self, D: int, V: int, max_rows: int, device: torch.device) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.input = normal(max_rows, D)
        self.weight = normal(V, D).mul_(D**-0.5)
        self.grad_logits = normal(max_rows, V).mul_(1e-3)
        self.logits = torch.empty_like(self.grad_logits)
        self.grad_input = torch.empty_like(self.input)
        self.accum_weight = normal(V, D)
        self.accum_fp32 = self.accum_weight.float()

    def products(self, rows: int) -> dict[str, Callable[[], object]]:
        """The calls to time at a chunk size, by their names in ``PRODUCTS``."""
        x, weight = self.input[:rows], self.weight
        logits, grad_logits = self.logits[:rows], self.grad_logits[:rows]
        grad_input, accum = self.grad_input[:rows], self.accum_fp32
        fp32 = torch.float32
        return {
            "logits": lambda: torch.mm(x, weight.t(), out=logits),
            "grad_input": lambda: torch.mm(grad_logits, weight, out=grad_input),
            "accum_weight": lambda: self.accum_weight.addmm_(grad_logits.t(), x),
            "first_fp32": lambda: torch.mm(grad_logits.t(), x, out_dtype=fp32, out=accum),
            "accum_fp32": lambda: torch.addmm(accum, grad_logits.t(), x, out_dtype=fp32, out=accum),
        }


def sweep(
    shapes: tuple[tuple[int, int], ...],
    chunk_rows: tuple[int, ...],
    device: torch.device,
    rep_ms: float,
) -> Iterator[Point]:
    """Times every product at every chunk size.

    Args:
        shapes: Pairs of D and V.
        chunk_rows: Chunk sizes.
        device: A CUDA device.
        rep_ms: Time filled with samples per point.

    Yields:
        Points, in the order they are measured.
    """
    import triton.testing

    for D, V in shapes:
        buffers = Buffers(D, V, max(chunk_rows), device)
        for rows in chunk_rows:
            for product, call in buffers.products(rows).items():
                point = Point(D, V, rows, product)
                try:
                    point.median_ms = triton.testing.do_bench(
                        call, warmup=rep_ms / 3, rep=rep_ms, return_mode="median"
                    )
                except (RuntimeError, TypeError) as error:  # an overload this torch lacks
                    point.error = " ".join(str(error).split())[:200]
                else:
                    point.tflops = 2 * rows * D * V / point.median_ms / 1e9
                    point.scaled_ms = point.median_ms * SCALED_ROWS / rows
                yield point


def table(points: list[Point]) -> str:
    """Renders a compact table: TFLOP/s and scaled ms of each product, a line per chunk size."""
    lines = []
    cells: dict[tuple[int, int, int], dict[str, Point]] = {}
    for point in points:
        cells.setdefault((point.D, point.V, point.rows), {})[point.product] = point
    shape = None
    for (D, V, rows), by_product in cells.items():
        if shape != (D, V):
            shape = (D, V)
            lines.append(f"D={D} V={V}: TFLOP/s (ms for {SCALED_ROWS} rows)")
            lines.append("  rows" + "".join(f"{product:>18}" for product in PRODUCTS))
        found = [by_product.get(product) for product in PRODUCTS]
        lines.append(f"{rows:6}" + "".join(f"{_cell(point):>18}" for point in found))
    errors = sorted({f"{point.product}: {point.error}" for point in points if point.error})
    return "\n".join(lines + errors)


def _cell(point: Point | None) -> str:
    if point is None or point.median_ms is None:
        return "error"
    return f"{point.tflops:.0f} ({point.scaled_ms:.2f})"


def write(points: list[Point], path: Path, device_type: str) -> None:
    """Writes the points, with the machine they were measured on, over an older file."""
    machine = asdict(this_machine(device_type))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        names = [f.name for f in fields(Point)] + list(machine)
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for point in points:
            values = {**asdict(point), **machine}
            writer.writerow({name: cell_text(value) for name, value in values.items()})


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _shape(text: str) -> tuple[int, int]:
    D, V = text.split("x")
    return int(D), int(V)


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, sweeps, prints the table and writes the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--shape", type=_shape, action="append", help="DxV, may be repeated")
    parser.add_argument("--rows", type=_numbers, default=CHUNK_ROWS, help="comma-separated")
    parser.add_argument("--rep-ms", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the sweep needs a CUDA GPU")
    device = torch.device("cuda")
    points = list(sweep(tuple(options.shape or SHAPES), options.rows, device, options.rep_ms))
    path = options.out / f"sweep-{this_machine('cuda').slug}.csv"
    write(points, path, "cuda")
    print(table(points))
    print(f"-> {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
