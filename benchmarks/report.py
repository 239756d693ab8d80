"""Renders the results of one machine as Markdown tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "docs" / "assets"

TABLE_COLUMNS = {
    "provider": "provider",
    "accum": "grad_weight sum",
    "median_ms": "median ms",
    "p20_ms": "p20",
    "p80_ms": "p80",
    "ratio_to_floor": "x floor",
    "peak_mib": "peak MiB",
    "err_loss": "err loss",
    "err_grad_input": "err grad_input",
    "err_grad_weight": "err grad_weight",
    "error": "note",
}
MARKERS = "osD^v<>Ph*X"
FLOORS = ("floor", "floor_end")


def load(path: Path) -> pd.DataFrame:
    """Reads a results file, keeping the newest row of each case, provider and mode."""
    import pandas as pd

    frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    frame["error"] = frame["error"].fillna("")
    frame = frame.sort_values("date", kind="stable")
    return frame.drop_duplicates(["case", "provider", "mode"], keep="last")


def tables(frame: pd.DataFrame) -> str:
    """Renders one table per case and mode, fastest provider first.

    Args:
        frame: What ``load`` returns.

    Returns:
        Markdown, each table under a heading and the software it was measured with.
    """
    parts = []
    for (case, mode), group in frame.groupby(["case", "mode"], sort=False):
        first = group.iloc[0]
        group = group.sort_values("median_ms", na_position="last")
        table = group[list(TABLE_COLUMNS)].rename(columns=TABLE_COLUMNS)
        for column in table:
            table[column] = [_cell(column, value) for value in table[column]]
        table = table.loc[:, (table != "").any()]
        body = table.to_markdown(index=False, disable_numparse=True)
        where = f"{first.gpu}, driver {first.driver}" if first.gpu != "cpu" else "CPU"
        sizes = f"N={first.N} D={first.D} V={first.V} {first['dtype']}"
        parts.append(
            f"### {case}, {mode}: {sizes}\n\n{body}\n\n"
            f"{where}, torch {first.torch}, triton {first.triton}; commits "
            f"{', '.join(sorted(map(str, group.commit.unique())))}; "
            f"{group.date.min()[:10]} to {group.date.max()[:10]}\n"
        )
    return "\n".join(parts)


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if value != value:  # NaN: not measured
        return ""
    if column == "peak MiB":
        return f"{value:.0f}"
    return f"{value:.1e}" if column.startswith("err ") else f"{value:.3f}"


def plots(frame: pd.DataFrame, folder: Path, suffix: str = "svg") -> list[Path]:
    """Draws time against peak memory and the ratio to the floor, one file per case.

    Args:
        frame: What ``load`` returns.
        folder: Where the files go.
        suffix: ``svg`` or ``png``.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "greyhound"  # the same plot gives the same file
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    whole = frame[frame["mode"].isin(["full", "no_grad"]) & frame.median_ms.notna()]
    for case, group in whole.groupby("case", sort=False):
        group = group.sort_values("median_ms")
        providers = group[~group.provider.isin(FLOORS)]
        figure, (scatter, bars) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        floor_ms = group[group.provider.isin(FLOORS)].median_ms.mean()
        colors = [f"C{index % 10}" for index in range(len(providers))]
        _scatter(scatter, providers, colors, floor_ms)
        bars.bar_label(
            bars.barh(providers.provider, providers.ratio_to_floor, color=colors),
            fmt="%.2f",
            padding=3,
            fontsize=8,
        )
        bars.axvline(1.0, color="black", linestyle="--", linewidth=1)
        bars.invert_yaxis()
        bars.set_xlabel("time / floor")
        first = group.iloc[0]
        figure.suptitle(f"{case}: N={first.N} D={first.D} V={first.V}, {first.gpu}")
        path = folder / f"bench-{case}.{suffix}"
        figure.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
        plt.close(figure)
        files.append(path)
    return files


def _scatter(axes: Any, providers: pd.DataFrame, colors: list[str], floor_ms: float) -> None:
    """Time against memory; a color and a marker per provider, as neighbors often coincide."""
    for index, (row, color) in enumerate(zip(providers.itertuples(), colors, strict=True)):
        if row.peak_mib == row.peak_mib:  # NaN: not measured
            axes.scatter(
                row.median_ms,
                max(row.peak_mib, 1.0),
                color=color,
                marker=MARKERS[index % len(MARKERS)],
                label=row.provider,
            )
            axes.set_yscale("log")
    axes.axvline(floor_ms, color="black", linestyle="--", linewidth=1, label="floor")
    axes.set_xlabel("median ms")
    axes.set_ylabel("peak MiB above the inputs")
    axes.legend(fontsize=8)
