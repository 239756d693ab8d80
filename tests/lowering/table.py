"""Writes docs/forms.md: every form of the corpus and what becomes of it.

    PYTHONPATH=.:lowering:tests python -m lowering.table

`test_corpus` checks each line where it compiles the form anyway.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
from collections.abc import Sequence

import torch

import greyhound_lowering
from greyhound_lowering.report import Decision
from lowering.forms import FORMS, Dims, Form, call
from lowering.rewriting import ROOT, Backend

PAGE = ROOT / "docs" / "forms.md"

_HEAD = """# Forms

Ways in which a projection and its loss are written in public training code, and what the rewrite
makes of each with torch {torch}. The modules are in `tests/lowering/forms.py`; the tests run every
one plain and rewritten and compare. This page is written by
`PYTHONPATH=.:lowering:tests python -m lowering.table`, and the tests keep it current.

Series: A spelling of the projection; B reshapes, slices and dtypes; C options of cross entropy;
D transforms of the logits; E cross entropy by hand; F preference and policy losses; G distillation;
H other losses; I several heads and wrappers; J hard cases; K library models (s: the whole step is
compiled, m: the model alone, which `returned_logits="nan"` changes); L further spellings; M near
misses.

{counts}

| form | what is written | becomes | reason |
| --- | --- | --- | --- |
"""


def row(form: Form, decisions: Sequence[Decision]) -> str:
    """A form's line of the table.

    Args:
        form: The form.
        decisions: What the account says after it was compiled.
    """
    ops = dict.fromkeys(str(each.op).split("::")[-1] for each in decisions if each.op)
    becomes = ", ".join(f"`{op}`" for op in ops) or "left"
    # Attention beside a head is not what the form is about.
    about = [each for each in decisions if each.op or not ops]
    heads = [each for each in about if each.logits_bytes is not None]
    told = dict.fromkeys(each.reason for each in heads or about)
    reason = "; ".join(told) or "no projection was found"
    cells = (form.id, form.name, becomes, reason)
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"


def compiled_row(form: Form) -> str:
    """The same, compiling the form."""
    torch._dynamo.reset()
    greyhound_lowering.clear_report()
    module, inputs = form.make(Dims())
    call(torch.compile(module, backend=Backend(), dynamic=False), inputs)
    return row(form, greyhound_lowering.explain().decisions)


def counts(rows: Sequence[str]) -> str:
    """How many forms become what."""
    became = collections.Counter(each.split(" | ")[2] for each in rows)
    left = became.pop("left", 0)
    made = ", ".join(f"{count} `{op.strip('`')}`" for op, count in became.most_common())
    return f"Of {len(rows)} forms become: {made}; {left} are left."


@functools.cache
def committed_lines() -> frozenset[str]:
    """Lines of the page as it is in the tree."""
    return frozenset(PAGE.read_text(encoding="utf-8").splitlines())


def is_made_by_this_torch() -> bool:
    """Whether the page tells of the torch that runs: names of steps change between versions."""
    return any(f"with torch {_version()}." in line for line in committed_lines())


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def main() -> None:
    """Write the page; needs transformers for the forms K."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("forms K need transformers")
    rows = [compiled_row(form) for form in FORMS.values()]
    head = _HEAD.format(torch=_version(), counts=counts(rows))
    PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
