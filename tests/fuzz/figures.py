"""How much was tried and how close it came: ``python -m fuzz.figures EXAMPLES``.

Runs the tests of this folder with so many examples of each family and prints a table. The largest
share is the error over what is allowed, 1 being where a test fails.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile


def table(figures: dict[str, dict]) -> str:
    """Markdown of what `engine.write_figures` wrote."""
    lines = [
        "| family | calls | tensors compared | largest share of what is allowed | within rounding "
        "of the operands only |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family, each in sorted(figures.items()):
        shares = ", ".join(
            f"{dtype} {share:.2f}" for dtype, share in sorted(each["worst_share"].items())
        )
        lines.append(
            f"| {family} | {each['inputs']} | {each['results']} | {shares} "
            f"| {each['within_sensitivity']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run, print, and pass on whether all was well."""
    examples = sys.argv[1] if len(sys.argv) > 1 else "1000"
    folder = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "figures.json"
        environment = {
            **os.environ,
            "GREYHOUND_FUZZ_EXAMPLES": examples,
            "GREYHOUND_FUZZ_FIGURES": str(path),
        }
        command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:xdist"]
        code = subprocess.run(command, env=environment, cwd=folder.parent.parent).returncode
        sys.stdout.write(table(json.loads(path.read_text())) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
