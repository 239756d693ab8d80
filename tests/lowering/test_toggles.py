"""Switching the rewrite on and off: what is there before is kept, called and put back."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import greyhound_lowering
from greyhound_lowering.rewrite_pass import RewritePass
from lowering.forms import FORMS, Dims
from lowering.rewriting import TINY, TINY_OPTIONS, run_python

HOOK = "pre_grad_custom_pass"
# The package exports a function of the same name.
rewrite_module = importlib.import_module("greyhound_lowering.rewrite_pass")
TAKES_LISTS = hasattr(config, "pre_grad_pass_timing")


class Recorder(CustomGraphPass):
    """A user's pass: notes whether the graph it sees is rewritten already."""

    def __init__(self, name: str = "recorder") -> None:
        self.name = name
        self.saw_op: list[bool] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.saw_op.append(any("greyhound" in str(node.target) for node in graph.nodes))

    def uuid(self) -> str:
        return self.name


@pytest.fixture(scope="module", autouse=True)
def _one_cache() -> Iterator[None]:
    """A cache on disk for all tests here: what is served from it must not depend on the order."""
    from torch._inductor import utils

    with (getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache)():
        yield


@pytest.fixture(autouse=True)
def _restored(_one_cache: None) -> Iterator[None]:
    greyhound_lowering.disable()
    greyhound_lowering.clear_report()
    with config.patch({HOOK: None}):
        yield
        greyhound_lowering.disable()


def compiled_count(backend: str = "inductor", **arguments: Any) -> int:
    """Projections rewritten while a form is compiled and run."""
    before = greyhound_lowering.explain().rewritten_count
    torch._dynamo.reset()
    module, inputs = FORMS["A01"].make(Dims())
    loss = torch.compile(module, backend=backend, **arguments)(*inputs)
    torch.testing.assert_close(loss, FORMS["A01"].make(Dims())[0](*inputs))
    return greyhound_lowering.explain().rewritten_count - before


def hooks() -> dict[str, Any]:
    names = (HOOK, "pre_grad_pass_timing")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


EXISTING: dict[str, Any] = {
    "nothing": lambda: None,
    "one pass": lambda: Recorder(),
    "a function": lambda: lambda graph: None,
}
if TAKES_LISTS:
    EXISTING["a list"] = lambda: [Recorder("first"), Recorder("second")]

existing_hooks = pytest.mark.parametrize("existing", EXISTING.values(), ids=EXISTING)


@existing_hooks
def test_disable_restores_what_was_there(existing: Any) -> None:
    setattr(config, HOOK, existing())
    before = hooks()
    greyhound_lowering.enable(**TINY)
    assert greyhound_lowering.is_enabled()
    assert getattr(config, HOOK) is not before[HOOK]
    greyhound_lowering.disable()
    assert not greyhound_lowering.is_enabled()
    after = hooks()
    assert after == before
    assert after[HOOK] is before[HOOK]


@existing_hooks
def test_block_restores_what_was_there_also_after_an_error(existing: Any) -> None:
    setattr(config, HOOK, existing())
    before = hooks()
    with pytest.raises(KeyError), greyhound_lowering.enabled(**TINY):
        raise KeyError
    assert hooks() == before
    assert getattr(config, HOOK) is before[HOOK]


def test_disable_without_enable_does_nothing() -> None:
    before = hooks()
    greyhound_lowering.disable()
    greyhound_lowering.disable()
    assert hooks() == before


def test_enable_twice_then_disable_restores() -> None:
    mine = Recorder()
    setattr(config, HOOK, mine)
    greyhound_lowering.enable(**TINY)
    greyhound_lowering.enable(min_logits_bytes=0)
    greyhound_lowering.disable()
    assert getattr(config, HOOK) is mine


def test_enable_rewrites_and_disable_does_not() -> None:
    assert compiled_count() == 0
    greyhound_lowering.enable(**TINY)
    assert compiled_count() == 1
    greyhound_lowering.disable()
    assert compiled_count() == 0


def test_users_pass_is_called_first() -> None:
    mine = Recorder()
    setattr(config, HOOK, mine)
    with greyhound_lowering.enabled(**TINY):
        assert compiled_count() == 1
    assert mine.saw_op == [False]


@pytest.mark.skipif(not TAKES_LISTS, reason="this torch takes a single pass")
def test_list_of_passes_is_called_in_order() -> None:
    order: list[str] = []
    mine = [Recorder("first"), Recorder("second")]
    for each in mine:
        each.saw_op = _Noted(order, each.name)  # type: ignore[assignment]
    setattr(config, HOOK, mine)
    with greyhound_lowering.enabled(**TINY):
        assert compiled_count() == 1
    assert order == ["first False", "second False"]


class _Noted(list):  # type: ignore[type-arg]
    def __init__(self, order: list[str], name: str) -> None:
        self.order, self.name = order, name

    def append(self, value: Any) -> None:
        self.order.append(f"{self.name} {value}")


def test_nested_blocks() -> None:
    with greyhound_lowering.enabled(**TINY):
        outer = getattr(config, HOOK)
        with greyhound_lowering.enabled(kinds=(), **TINY):
            assert compiled_count() == 0
            with greyhound_lowering.enabled(False):
                assert not greyhound_lowering.is_enabled()
                assert getattr(config, HOOK) is None
        assert compiled_count() == 1
        assert getattr(config, HOOK).settings == outer.settings
    assert getattr(config, HOOK) is None
    assert not greyhound_lowering.is_enabled()


def test_block_that_turns_it_off_turns_it_on_again() -> None:
    greyhound_lowering.enable(**TINY)
    with greyhound_lowering.enabled(False):
        assert compiled_count() == 0
    assert compiled_count() == 1


def test_disable_after_somebody_wrapped_our_hook() -> None:
    """The wrapper stays, and what it wraps does nothing any more."""
    greyhound_lowering.enable(**TINY)
    ours = getattr(config, HOOK)

    class Wrapper(Recorder):
        def __call__(self, graph: fx.Graph) -> None:
            ours(graph)
            super().__call__(graph)

    wrapper = Wrapper()
    setattr(config, HOOK, wrapper)
    greyhound_lowering.disable()
    assert getattr(config, HOOK) is wrapper
    assert compiled_count() == 0
    assert wrapper.saw_op == [False]


def test_backend_name_is_registered_by_import() -> None:
    assert "greyhound" in torch._dynamo.list_backends()


def test_backend_rewrites_one_call_and_leaves_the_hook() -> None:
    before = hooks()
    assert compiled_count("greyhound", options=TINY_OPTIONS) == 1
    assert hooks() == before
    assert compiled_count() == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_backend_with_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "0")
    assert compiled_count("greyhound", mode=mode) == 1


def test_backend_passes_options_on_to_inductor() -> None:
    mine = Recorder()
    assert compiled_count("greyhound", options={**TINY_OPTIONS, HOOK: mine}) == 1
    assert mine.saw_op == [False]


def test_backend_keeps_a_hook_that_is_there() -> None:
    mine = Recorder()
    setattr(config, HOOK, mine)
    assert compiled_count("greyhound", options=TINY_OPTIONS) == 1
    assert mine.saw_op == [False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"greyhound.no_such_setting": 1}, "no_such_setting"),
        ({"no_such_option_of_inductor": 1}, "no_such_option_of_inductor"),
        ({"greyhound.chunk_size": 0}, "chunk_size"),
        ({"greyhound.min_logits_bytes": -1}, "min_logits_bytes"),
        ({"greyhound.kinds": ("no_such_kind",)}, "no_such_kind"),
        ({"greyhound.grad_weight_accum_dtype": "fp8"}, "fp8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_backend_refuses_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled_count("greyhound", options=options)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"no_such_setting": 1}, TypeError),
        ({"chunk_size": 0}, ValueError),
        ({"kinds": ("no_such_kind",)}, ValueError),
        ({"min_logits_bytes": -1}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_enable_refuses_wrong_settings_and_changes_nothing(
    settings: dict[str, Any], error: type[Exception]
) -> None:
    before = hooks()
    with pytest.raises(error):
        greyhound_lowering.enable(**settings)
    with pytest.raises(error), greyhound_lowering.enabled(**settings):
        pass
    with pytest.raises(error):
        greyhound_lowering.rewrite_pass(**settings)
    assert hooks() == before
    assert not greyhound_lowering.is_enabled()


def test_refused_block_leaves_an_outer_one_as_it_was() -> None:
    with greyhound_lowering.enabled(**TINY):
        with pytest.raises(TypeError), greyhound_lowering.enabled(no_such_setting=1):
            pass
        assert greyhound_lowering.is_enabled()
        assert compiled_count() == 1


def test_backend_under_enable_rewrites_once() -> None:
    greyhound_lowering.enable(**TINY)
    assert compiled_count("greyhound") == 1
    assert len(greyhound_lowering.explain().decisions) == 1


def test_options_of_one_call_win_over_enable() -> None:
    greyhound_lowering.enable(**TINY)
    assert compiled_count("greyhound", options={**TINY_OPTIONS, "greyhound.kinds": ()}) == 0


def test_options_of_one_call_win_over_enable_in_the_account_too() -> None:
    """One projection, one decision: not one by each pass."""
    greyhound_lowering.enable()  # the logits are too small for it
    assert compiled_count("greyhound", options=TINY_OPTIONS) == 1
    assert [each.verdict for each in greyhound_lowering.explain().decisions] == ["rewritten"]


def test_pass_as_an_option_of_plain_torch_compile() -> None:
    ours = greyhound_lowering.rewrite_pass(**TINY)
    assert compiled_count(options={HOOK: ours}) == 1
    assert getattr(config, HOOK) is None


# ----------------------------------------------------------------------------- environment

ENVIRONMENT = """
import torch
import greyhound_lowering
from lowering.forms import FORMS, Dims
module, inputs = FORMS["A01"].make(Dims())
{before}
torch.compile(module, backend="{backend}")(*inputs)
print("rewritten", greyhound_lowering.explain().rewritten_count, greyhound_lowering.is_enabled())
"""


@pytest.mark.parametrize(
    ("env", "before", "backend", "expected"),
    [
        ({"GREYHOUND_REWRITE": "1"}, "", "inductor", "1 True"),
        ({"GREYHOUND_REWRITE": "0"}, "greyhound_lowering.enable()", "inductor", "0 True"),
        ({"GREYHOUND_REWRITE": "0"}, "", "greyhound", "0 False"),
        ({}, "", "inductor", "0 False"),
    ],
    ids=["1", "0 against enable", "0 against the backend", "unset"],
)
def test_environment(
    env: dict[str, str],
    before: str,
    backend: str,
    expected: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    surroundings = {
        **env,
        "GREYHOUND_REWRITE_MIN_BYTES": "0",
        # One for the four: they must not serve each other's graphs.
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.getbasetemp() / "inductor"),
    }
    done = run_python(ENVIRONMENT.format(before=before, backend=backend), env=surroundings)
    assert f"rewritten {expected}" in done.stdout


def test_min_bytes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "3KiB")
    assert greyhound_lowering.rewrite_pass().settings.min_logits_bytes == 3 * 1024
    assert greyhound_lowering.rewrite_pass(min_logits_bytes=7).settings.min_logits_bytes == 7
    monkeypatch.setenv("GREYHOUND_REWRITE_MIN_BYTES", "many")
    with pytest.raises(ValueError, match="GREYHOUND_REWRITE_MIN_BYTES"):
        greyhound_lowering.rewrite_pass()


# ------------------------------------------------------------------------------------ uuid


def test_uuid_tells_settings_apart() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"kinds": ()},
        {"min_logits_bytes": 0},
        {"chunk_size": 5},
        {"grad_weight_accum_dtype": "weight"},
    ]
    uuids = {greyhound_lowering.rewrite_pass(**each).uuid() for each in settings}
    assert len(uuids) == len(settings)
    assert greyhound_lowering.rewrite_pass().uuid() == greyhound_lowering.rewrite_pass().uuid()


def test_uuid_changes_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: RewritePass = greyhound_lowering.rewrite_pass()
    before = ours.uuid()
    ours.active = False
    assert ours.uuid() != before
    ours.active = True
    assert ours.uuid() == before
    monkeypatch.setenv("GREYHOUND_REWRITE", "0")
    assert ours.uuid() != before


def test_uuid_changes_with_the_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = greyhound_lowering.rewrite_pass()
    before = ours.uuid()
    copy = tmp_path / "rewrite_pass.py"
    copy.write_text("# another version\n")
    rewrite_module.source_hash.cache_clear()
    try:
        monkeypatch.setattr(rewrite_module, "__file__", str(copy))
        assert ours.uuid() != before
    finally:
        monkeypatch.undo()
        rewrite_module.source_hash.cache_clear()
    assert ours.uuid() == before


def test_uuid_is_the_same_in_another_process() -> None:
    code = "import greyhound_lowering as g; print(repr(g.rewrite_pass(chunk_size=5).uuid()))"
    here = greyhound_lowering.rewrite_pass(chunk_size=5).uuid()
    env = {"PYTHONHASHSEED": "1"}
    assert run_python(code, env=env).stdout.strip() == repr(here)
    assert pickle.loads(pickle.dumps(here)) == here


def test_uuid_of_chained_passes_holds_both() -> None:
    def chained(recorder: Recorder) -> Any:
        with config.patch({HOOK: recorder}), greyhound_lowering.enabled(**TINY):
            return getattr(config, HOOK).uuid()

    assert chained(Recorder("one")) != chained(Recorder("other"))
    assert chained(Recorder("one")) == chained(Recorder("one"))
    # A pass without one keeps the graph out of the caches: so must the pair.
    assert not chained(Recorder(""))


def test_pass_without_graphs_of_interest_changes_nothing() -> None:
    graph = fx.symbolic_trace(lambda x: F.relu(x) + 1).graph
    before = str(graph)
    greyhound_lowering.rewrite_pass(**TINY)(graph)
    assert str(graph) == before
