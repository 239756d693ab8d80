"""The launches that ``compute-sanitizer`` runs: each does what it must, and no kernel is left out.

Here on whatever kernels run on in this process; ``tests/sanitizer/run.sh`` runs them on a GPU.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import hopper
from greyhound_ops.kernels import cross_entropy as cross_entropy_kernels
from greyhound_ops.kernels import distillation as distillation_kernels
from sanitizer import launch

# Constants that the device or the size decides, of which one process sees one value.
BY_DEVICE = {"WIDEN", "APPROXIMATE"}

# The interpreter takes seconds for tiles that a GPU does at once: every so manieth combination.
EVERY = (
    {"exponentials": 2, "products": 3, "panels": 3}
    if os.environ.get("TRITON_INTERPRET") == "1"
    else {}
)

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, list[str]], dict[str, launch.Record]]:
    """Failures by family, and what was launched."""
    with launch.recorded() as records:
        failed = {
            name: launch.failures(DEVICE, name, each.combinations()[:: EVERY.get(name, 1)])
            for name, each in launch.LAUNCHES.items()
            if launch.lacks(DEVICE, name) is None
        }
    return failed, records


@pytest.mark.parametrize("name", launch.LAUNCHES)
def test_outputs_are_written_and_nothing_else(
    name: str, ran: tuple[dict[str, list[str]], dict[str, launch.Record]]
) -> None:
    if (reason := launch.lacks(DEVICE, name)) is not None:
        pytest.skip(reason)
    assert not ran[0][name], "\n".join(ran[0][name])


def test_every_kernel_with_every_constant(
    ran: tuple[dict[str, list[str]], dict[str, launch.Record]],
) -> None:
    if len(ran[0]) < len(launch.LAUNCHES):
        pytest.skip("needs a GPU that runs every kernel")
    assert set(launch.kernels()) == set(ran[1])
    missing = [name for name, record in ran[1].items() if not record.launches]
    assert not missing, f"kernels that tests/sanitizer/launch.py does not launch: {missing}"
    for name, record in ran[1].items():
        for constant, values in record.constants.items():
            flag = all(isinstance(value, bool) for value in values)
            if flag and constant not in BY_DEVICE:
                assert values == {True, False}, f"{name}: {constant} is always {values}"
    of = {name.split(".")[1]: record.constants for name, record in ran[1].items()}
    assert of["projection_kernel"]["MODE"] == {"exponentials", "sums", "statistics", "logits"}
    assert of["distillation_kernel"]["KIND"] == set(
        launch.LAUNCHES["distillation"].choices["divergence"]
    )


@pytest.mark.parametrize("name", launch.LAUNCHES)
def test_any_two_values_that_may_meet_do(name: str) -> None:
    family = launch.LAUNCHES[name]
    combined = family.combinations()
    assert all(family.possible(each) for each in combined)
    met = {pair for each in combined for pair in itertools.combinations(each.items(), 2)}
    generator = torch.Generator().manual_seed(1)
    drawn = 0
    for _ in range(3000):
        options = {
            option: values[int(torch.randint(len(values), (), generator=generator))]
            for option, values in family.choices.items()
        }
        if family.possible(options):
            drawn += 1
            missing = set(itertools.combinations(options.items(), 2)) - met
            assert not missing, f"never launched together: {missing}"
    assert drawn > 20


# ------------------------------------------------------------------------ what is found at all


def cross_entropy_options(**changes: object) -> launch.Options:
    return {**launch.LAUNCHES["cross_entropy"].combinations()[0], "classes": 7, **changes}


def test_a_row_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cross_entropy_kernels.cross_entropy
    monkeypatch.setattr(
        cross_entropy_kernels,
        "cross_entropy",
        lambda logits, target, *rest, **options: right(logits[:-1], target[:-1], *rest, **options),
    )
    with pytest.raises(RuntimeError, match="logits left where the gradient should be"):
        launch.launch_cross_entropy(DEVICE, cross_entropy_options())
    with pytest.raises(RuntimeError, match="loss: 1 of 7 elements not written"):
        launch.launch_cross_entropy(DEVICE, cross_entropy_options(write=False))


def test_a_column_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = distillation_kernels.distillation

    def wide(student: torch.Tensor, *rest: object, **options: object) -> None:
        rows, classes = student.shape
        right(student, *rest, **options)  # type: ignore[arg-type]
        student.as_strided((rows, classes + 1), student.stride(), student.storage_offset())[
            0, classes
        ] = 0.0

    monkeypatch.setattr(distillation_kernels, "distillation", wide)
    options = {**launch.LAUNCHES["distillation"].combinations()[0], "classes": 7, "gap": 3}
    with pytest.raises(RuntimeError, match="student: written beside its elements"):
        launch.launch_distillation(DEVICE, options)


@pytest.mark.parametrize("dtype", launch._POISON_BITS)
def test_the_pattern_is_no_number_that_a_kernel_makes(dtype: torch.dtype) -> None:
    tensor = launch.poison_(torch.empty(5, dtype=dtype))
    assert launch.is_poison(tensor).all()
    if dtype.is_floating_point:
        assert tensor.isnan().all()
        assert not launch.is_poison(torch.full((5,), float("nan"), dtype=dtype)).any()
        assert not launch.is_poison(torch.full((5,), float("inf"), dtype=dtype) * 0).any()


def test_buffers_that_are_read_before_they_are_written_are_found() -> None:
    buffers = launch.Buffers(DEVICE)
    scratch = buffers.make("scratch", 4, dtype=torch.float32)
    buffers.output("sum", 4).copy_(scratch + 1.0)
    with pytest.raises(RuntimeError, match="sum: "):
        buffers.check()


def test_writes_around_a_tensor_are_found() -> None:
    buffers = launch.Buffers(DEVICE)
    rows = buffers.output("rows", 3, 5, pitch=8)
    rows.fill_(1.0)
    buffers.check()
    rows.as_strided((3, 6), (8, 1), rows.storage_offset())[1, 5] = 0.0
    with pytest.raises(RuntimeError, match="rows: written beside its elements"):
        buffers.check()


def test_what_was_launched_compiles_for_hopper(
    ran: tuple[dict[str, list[str]], dict[str, launch.Record]],
) -> None:
    # The interpreter runs what the compiler refuses, a block smaller than its parts for one. Tiles
    # have a test of their own (test_hopper_compile), at the sizes of a GPU.
    chosen: dict[str, hopper.Kernel] = {}
    for name, record in ran[1].items():
        seen: set[tuple[str, str]] = set()
        for index, signature in enumerate(record.signatures):
            new = {(each, str(value)) for each, value in signature.items()} - seen
            if "WIDEN" in signature or not new:
                continue
            seen |= new
            fixed = {each: value[0] for each, value in signature.items() if type(value) is tuple}
            options = {
                each: fixed.pop(each) for each in ("num_warps", "num_stages") if each in fixed
            }
            if "APPROXIMATE" in fixed:
                fixed["APPROXIMATE"] = True  # as on a GPU
            types = {each: value for each, value in signature.items() if type(value) is str}
            chosen[f"{name} {index}"] = name, fixed, types, options
    assert len({label.split()[0] for label in chosen}) >= 12
    made = hopper.compiled(chosen)
    wrong = {label: each for label, each in made.items() if isinstance(each, str)}
    assert not wrong, wrong
