"""docs/trust.md and the marks it is made from."""

from __future__ import annotations

import re

from faults import table
from faults.kinds import KINDS

# The list as it was drawn up, so that no kind is dropped by accident.
_IDS = (
    "B01 B04 B05 B06 B07 B08 B09 B10 B11 B12 B13 B15 B16 B18 B20 B21 B22 B23 B24 B25 B26 B28 "
    "B29 B30 B32 B33 B34 B35 B36 B39 B40 B42 B43 B44 B45 B47 B48 B49 B50 B51 B53 B55 B56 B58 "
    "B59 B60 B61 B63 B64 B67 B68 B69 B70 B71 B72 B74 B75 B77 B78 B79 B81 B82 B83 B85 B86 B87 "
    "B88 B89 B90 B91 B92 B93 B94 R01 R02 R04 R07 R08 R09 R11 R12 R13 R14 R15 R16 R17 R18"
)


def test_every_kind_is_there() -> None:
    assert " ".join(KINDS) == _IDS


def test_every_kind_has_a_test_that_runs_on_the_cpu() -> None:
    """A row whose only test needs a GPU would be empty for most who run the suite."""
    assert not set(table.marked()) - set(KINDS), "a mark names a kind that is not in the list"
    assert not set(KINDS) - set(table.marked(on_cpu=True)), "no test on the CPU"


def test_page_is_current() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), (
        "run PYTHONPATH=.:lowering:tests python -m faults.table"
    )


def test_no_cell_is_empty() -> None:
    rows = [line for line in table.page().splitlines() if re.match(r"\| [BR]\d\d \|", line)]
    assert len(rows) == len(KINDS)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4
        assert all(cells), row
