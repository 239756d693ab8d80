"""Command line: ``python -m benchmarks COMMAND``, see ``--help``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.records import RESULTS, Row

MODES = ("full", "forward", "backward")


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs one command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure providers and append to the results")
    run.add_argument("--case", required=True, help="comma-separated names; see list")
    run.add_argument("--providers", default="all", help="comma-separated names, or all")
    run.add_argument("--modes", default="full", help=f"comma-separated, of {', '.join(MODES)}")
    run.add_argument("--errors", action=argparse.BooleanOptionalAction, default=False)
    run.add_argument("--rounds", type=int, default=3, help="turns each provider gets")
    run.add_argument("--warmup-ms", type=float, default=50.0, help="warm-up of a turn")
    run.add_argument("--rep-ms", type=float, default=150.0, help="time sampled in a turn")
    run.add_argument("--min-reps", type=int, default=5, help="samples of a turn at least")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--device", help="cuda or cpu; cuda when there is one")
    run.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")

    commands.add_parser("list", help="cases and providers")

    report = commands.add_parser("report", help="tables and plots of a results file")
    report.add_argument("--results", type=Path, help="a CSV; the only one in --out if left out")
    report.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    report.add_argument("--markdown", type=Path, help="write the tables here, not to the screen")
    report.add_argument("--assets", type=Path, help="folder of the plots, docs/assets by default")
    report.add_argument("--format", choices=("svg", "png"), default="svg")

    curves = commands.add_parser("convergence", help="loss curves with the rewrite off and on")
    curves.add_argument("--steps", type=int, help="of each run; 500 on a GPU")
    curves.add_argument("--seeds", default="0,1,2", help="comma-separated, at least two")
    curves.add_argument("--device", help="cuda or cpu; cuda when there is one")
    curves.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    curves.add_argument("--results", type=Path, help="compare and draw this CSV, train nothing")
    curves.add_argument("--assets", type=Path, help="folder of the plot, docs/assets by default")

    times = commands.add_parser("compile-time", help="time until the first step is done")
    times.add_argument("--heads", default="ce,kd", help="comma-separated, of ce and kd")
    times.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    times.add_argument("--device", help="cuda or cpu; cuda when there is one")
    times.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")

    steps = commands.add_parser("end-to-end", help="a model's training step, rewrite off and on")
    steps.add_argument("--tiny", action="store_true", help="a model small enough for a CPU")
    steps.add_argument("--rounds", type=int, default=6, help="turns of each setting")
    steps.add_argument(
        "--largest",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for the largest batch that fits into 80 GB",
    )
    steps.add_argument("--device", help="cuda or cpu; cuda when there is one")
    steps.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")

    options = parser.parse_args(arguments)
    command = {
        "run": _run,
        "list": _list,
        "report": _report,
        "convergence": _convergence,
        "compile-time": _compile_time,
        "end-to-end": _end_to_end,
    }[options.command]
    try:
        return command(options)
    except ValueError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    import torch

    from benchmarks import records
    from benchmarks.cases import get_case
    from benchmarks.measure import Settings, device_lost, measure_case
    from benchmarks.providers import select

    modes = tuple(options.modes.split(","))
    if unknown := set(modes) - set(MODES):
        raise ValueError(f"unknown mode {', '.join(unknown)}: expected {', '.join(MODES)}")
    cases = [get_case(name) for name in options.case.split(",")]
    chosen = select(options.providers)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = records.this_machine(device.type)
    settings = Settings(
        modes,
        options.rounds,
        options.warmup_ms,
        options.rep_ms,
        options.min_reps,
        options.errors,
        options.seed,
    )
    for case in cases:
        print(f"{case.name}: N={case.N} D={case.D} V={case.V} {case.dtype_name} on {machine.gpu}")
        providers = chosen
        if options.providers == "all":  # asked for by name, a missing provider gets a row
            reasons = {p.name: p.available(case, device) for p in chosen}
            providers = [p for p in chosen if reasons[p.name] is None]
            for name, reason in reasons.items():
                if reason is not None:
                    print(f"  without {name}: {reason}")
        rows = measure_case(case, providers, device, settings, log=lambda s: print(s, flush=True))
        path = records.append(rows, machine, options.out)
        _print_rows(rows)
        print(f"  -> {path}", flush=True)
        if device_lost(device):
            print("the CUDA context is lost; the remaining cases need a new process")
            return 1
    return 0


def _print_rows(rows: list[Row]) -> None:
    columns = ("median_ms", "ratio_to_floor", "peak_mib")
    errors = ("err_loss", "err_grad_input", "err_grad_weight")
    header = "".join(f"{c:>16}" for c in (*columns, *errors))
    print(f"  {'provider':18}{'mode':9}{header}")
    for row in sorted(rows, key=lambda row: (row.mode, row.median_ms or float("inf"))):
        cells = [_cell(getattr(row, c), ".3f") for c in columns]
        cells += [_cell(getattr(row, c), ".2e") for c in errors]
        print(f"  {row.provider:18}{row.mode:9}{''.join(f'{c:>16}' for c in cells)}  {row.error}")


def _cell(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _list(options: argparse.Namespace) -> int:
    from benchmarks.cases import MAIN_CASES, SUFFIXES, get_case
    from benchmarks.providers import PROVIDERS

    print("cases (any base takes any suffix; NxDxV is a base too)")
    for case in map(get_case, MAIN_CASES):
        print(f"  {case.name:20} N={case.N} D={case.D} V={case.V} {case.dtype_name} {case.mode}")
    print("suffixes")
    for suffix, meaning in SUFFIXES.items():
        print(f"  -{suffix:19} {meaning}")
    print("providers")
    for provider in PROVIDERS.values():
        print(f"  {provider.name:20} {provider.summary}")
    return 0


def _convergence(options: argparse.Namespace) -> int:
    from benchmarks import convergence

    return convergence.main(options)


def _compile_time(options: argparse.Namespace) -> int:
    from benchmarks import compile_time

    return compile_time.main(options)


def _end_to_end(options: argparse.Namespace) -> int:
    from benchmarks import end_to_end

    return end_to_end.main(options)


def _report(options: argparse.Namespace) -> int:
    from benchmarks import report

    path = options.results
    if path is None:
        others = ("sweep-", "convergence-", "compile-", "end-to-end-")
        found = sorted(p for p in options.out.glob("*.csv") if not p.name.startswith(others))
        if len(found) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise ValueError(f"--results is needed: files in {options.out}: {names}")
        path = found[0]
    frame = report.load(path)
    text = report.tables(frame)
    if options.markdown is None:
        print(text)
    else:
        options.markdown.write_text(text)
    for file in report.plots(frame, options.assets or report.ASSETS, options.format):
        print(f"-> {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
