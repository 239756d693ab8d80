"""Every private or semi-private name of torch that this project uses, one function each.

Supported torch: 2.11 to 2.14. A name that a newer torch has lost degrades as its function says;
nothing else in the project imports from ``torch._*``.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Oldest torch that serves, as major and minor number.
OLDEST_TORCH = (2, 11)


def _check_version() -> None:
    """Say what is needed, before an import below says what it misses."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"greyhound-ops needs torch {oldest} or newer, found torch {torch.__version__}; "
            f"install it with: pip install 'torch>={oldest}'"
        )


_check_version()


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to keep its graph (``retain_graph=True``).

    Degrades to True, which costs memory but is always right.
    """
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else bool(query())


def storage_reference(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's memory: ``cdata`` tells it from others, ``expired()`` its end.

    Degrades to None.
    """
    try:
        from torch.multiprocessing.reductions import StorageWeakRef
    except ImportError:
        return None
    return StorageWeakRef(tensor.untyped_storage())


def is_plain_eager(tensor: torch.Tensor) -> bool:
    """Whether a tensor is real and nothing is tracing, so that its memory may be touched directly.

    False for fake, functional and functorch tensors and while a graph is being recorded. Degrades
    to False, which costs a copy.
    """
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    if is_wrapped is None or type(tensor) is not torch.Tensor or _proxy_mode(unknown=True):
        return False
    return not is_wrapped(tensor)


def is_recording() -> bool:
    """Whether a graph is being recorded by something other than Dynamo, such as ``make_fx``.

    Degrades to what ``torch.jit`` says of itself.
    """
    return torch.jit.is_tracing() or _proxy_mode(unknown=False)  # type: ignore[attr-defined]


def _proxy_mode(unknown: bool) -> bool:
    """Whether a mode that records graphs is active; ``unknown`` where a newer torch hides it."""
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    if depth is None:
        return unknown
    if depth() == 0:
        return False
    from torch.fx.experimental import proxy_tensor

    mode = getattr(proxy_tensor, "get_proxy_mode", None)
    return unknown if mode is None else mode() is not None


def has_forward_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a forward-mode tangent at the current level."""
    from torch.autograd import forward_ad

    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def functorch_is_active() -> bool:
    """Whether a ``torch.func`` transform is running.

    Degrades to False: what a transform then makes of an op is torch's own error, or ours for a
    tangent.
    """
    query = getattr(torch._C, "_are_functorch_transforms_active", None)
    return query is not None and bool(query())


def autograd_kernel(
    op: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> Callable[..., Any] | None:
    """The kernel that ``torch.library.register_autograd`` would register, for wrapping.

    Args:
        op: The operator overload.
        backward: As for ``torch.library.register_autograd``.
        setup_context: As for ``torch.library.register_autograd``.

    Returns:
        A function ``(keyset, *args, **kwargs)`` for ``Library.impl(..., with_keyset=True)``; None
        where a newer torch makes it otherwise. The op then registers by the public function, and
        forward mode is no longer refused.
    """
    try:
        from torch._library.autograd import Info, make_autograd_impl
    except ImportError:
        return None
    return make_autograd_impl(cast("Any", _Listed(op)), Info(backward, setup_context))


class _Listed:
    """An operator whose schema has its arguments in a list.

    The kernel above fills in defaults on every call, and for each of n arguments asks the schema
    for all of them, which the binding makes anew each time: 0.1 to 0.5 ms for 23.
    """

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self._op = op
        self._schema = SimpleNamespace(
            arguments=tuple(op._schema.arguments), returns=tuple(op._schema.returns)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


def inductor_config() -> Any:
    """Inductor's configuration module."""
    import torch._inductor.config

    return torch._inductor.config


def rewrite_lacks() -> str | None:
    """What the rewrite needs and this torch has not, in words; None if nothing.

    Asked once, before anything is installed: a pass that found out in the middle of a graph would
    leave half a graph.
    """
    for module, name in _NEEDED_BY_REWRITE:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"torch {torch.__version__} has no {module}.{name}"
    return None


_NEEDED_BY_REWRITE = (
    ("torch._inductor.config", "pre_grad_custom_pass"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch", "UntypedStorage._cdata"),
)


def early_pass_options() -> dict[str, Any]:
    """Options that make Inductor run pre-grad passes before it looks into its caches.

    The account of a rewrite is then complete on a warm cache too. Torch before 2.12 always runs
    them early and has no such option.
    """
    if hasattr(inductor_config(), "pre_grad_pass_timing"):
        return {"pre_grad_pass_timing": "early"}
    return {}


def graph_pass_base() -> type:
    """Base class of graph passes whose ``uuid()`` enters Inductor's cache key.

    Degrades to ``object``; `rewrite_lacks` then keeps every pass out.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return object
    return CustomGraphPass


def compile_with_inductor(
    graph_module: torch.fx.GraphModule, example_inputs: Any, options: dict[str, Any]
) -> Any:
    """Compile a graph from Dynamo with Inductor under config options.

    Degrades to the backend that torch itself calls ``inductor``, which takes no options here.
    """
    try:
        from torch._inductor.compile_fx import compile_fx
    except ImportError:
        if options:
            raise
        return torch._dynamo.lookup_backend("inductor")(graph_module, example_inputs)
    return compile_fx(graph_module, example_inputs, config_patches=options)


def reset_cuda_graphs() -> None:
    """Drop the CUDA graphs that Inductor has recorded, with their memory.

    Does nothing where none can have been recorded; degrades to nothing, which costs memory only.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    reset = getattr(trees, "reset_cudagraph_trees", None)
    if reset is not None:
        reset()


def fresh_compile_cache() -> AbstractContextManager[Any]:
    """Compile in a block with Inductor's caches empty. Degrades to the caches as they are."""
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None)
    return nullcontext() if fresh is None else fresh()


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """Config options of a ``torch.compile`` mode.

    There is nothing to degrade to: without the list a mode other than the default is an error.
    """
    if mode is None or mode == "default":
        return {}
    return dict(torch._inductor.list_mode_options(mode))


def register_backend(backend: Callable[..., Any], name: str) -> None:
    """Make a backend known to ``torch.compile`` by name, unless it is already.

    The entry point of the installed package does the same without an import; this serves a source
    tree on ``PYTHONPATH``. Degrades to the entry point alone.
    """
    try:
        from torch._dynamo.backends import registry
    except ImportError:
        return
    if name not in getattr(registry, "_COMPILER_FNS", (name,)):
        registry.register_backend(backend, name=name)


def compile_attempt() -> tuple[str, int] | None:
    """The compilation that is running and how often Dynamo has restarted it; None outside one.

    Degrades to None: what was noted in an attempt that Dynamo threw away is then told twice.
    """
    try:
        from torch._guards import CompileContext

        trace = CompileContext.current_trace_id()
        return None if trace is None else (str(trace.compile_id), trace.attempt)
    except (ImportError, AttributeError):
        return None


def count(key: str, times: int = 1) -> None:
    """Count events in ``torch._dynamo.utils.counters["greyhound"]``. Degrades to nothing."""
    try:
        from torch._dynamo.utils import counters
    except ImportError:
        return
    counters["greyhound"][key] += times


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Put a text into torch's structured trace (``TORCH_TRACE``). Degrades to nothing."""
    try:
        from torch._logging import trace_structured  # type: ignore[attr-defined]
    except ImportError:
        return
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=payload,
    )


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value a symbolic size had when it was traced, without a guard; None if it had none.

    Degrades to None: the rewrite is then declined, or its bytes are not told.
    """
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def guard_or_no(condition: bool | torch.SymBool) -> bool:
    """A condition on sizes as a guard; False where one of them is known at run time only.

    Degrades to a guard, which such a size refuses.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import guard_or_false
    except ImportError:
        return bool(condition)
    return bool(guard_or_false(condition))


def static_size(size: int | torch.SymInt) -> int | None:
    """A size as a number if it is one in every run, without adding a guard; else None.

    Dynamo leaves sizes as symbols that it has since proved equal to a constant. Degrades to None.
    """
    if isinstance(size, int):
        return size
    known = getattr(size.node, "maybe_as_int", None)
    value = None if known is None else known()
    return None if value is None else int(value)


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The ``reduction`` that torch's deprecated pair of switches stands for.

    Nothing private: torch's own function for it also warns.
    """
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a (fake) tensor's storage: views of one another share it.

    Degrades to its address, which fake tensors do not have: see `rewrite_lacks`.
    """
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", 0)) or storage.data_ptr()


def is_plain_fake(value: object) -> bool:
    """Whether an example value is an ordinary tensor and no subclass such as DTensor.

    The rewrite is off without fake tensors: see `rewrite_lacks`; likewise the next two.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data and no address. Degrades to False: asking it then raises."""
    try:
        from torch._subclasses.fake_tensor import FakeTensor
    except ImportError:
        return False
    return isinstance(tensor, FakeTensor)


def linear_function() -> Any:
    """What ``torch.nn.functional.linear`` is in a graph from Dynamo.

    Degrades to ``torch.nn.functional.linear``.
    """
    return getattr(torch._C._nn, "linear", torch.nn.functional.linear)


def constant_under_dynamo(function: _Function) -> _Function:
    """Have Dynamo run a function while it traces and take the result as a constant.

    ``torch.compiler.assume_constant_result`` without the import of Dynamo. Were the mark not known,
    Dynamo would trace into the function or refuse to.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def autograd_in_op() -> Iterator[None]:
    """Record gradients inside an operator's implementation, below which autograd is excluded.

    Degrades to gradients being enabled, which records nothing down there: a loss that autograd has
    to differentiate is then an error, and one that brings its gradient is right.
    """
    needed = (
        "DispatchKey",
        "DispatchKeySet",
        "_ForceDispatchKeyGuard",
        "_dispatch_tls_local_exclude_set",
        "_dispatch_tls_local_include_set",
    )
    if not all(hasattr(torch._C, each) for each in needed):
        with torch.enable_grad():
            yield
        return
    key = torch._C.DispatchKey
    outside = torch._C._dispatch_tls_local_exclude_set()
    exclude = torch._C.DispatchKeySet(key.Undefined)
    # As outside any operator, where autocast alone may be off. A compiled graph runs its operators
    # below more than autograd: without functorch's keys nothing could be compiled in them.
    for name, each in key.__members__.items():
        if name.startswith("Autocast") and outside.has(each):
            exclude = exclude.add(each)
    include = torch._C._dispatch_tls_local_include_set()
    guard = torch._C._ForceDispatchKeyGuard(include, exclude)
    with guard, torch.enable_grad(), without_compiled_autograd():
        yield


def without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """What autograd saves here is nobody else's to pack, count or take to another device.

    A checkpoint without reentrance counts what a forward saves and compares it with its second run.
    Not around transforms of ``torch.func``, which refuse to run under hooks.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Compiled autograd off, if anybody has switched it on.

    What an operator differentiates is its own: captured, every chunk would become a compiled graph;
    what the rewrite differentiates while it looks at a graph would be lost. Does nothing where
    compiled autograd was never imported, or is off already.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    off = getattr(module, "_disable", None)
    # Entered a second time it would be marked as left at the end of the first.
    if off is None or getattr(module, "active_disable_ctx", False):
        return nullcontext()
    switched_off: AbstractContextManager[Any] = off()
    return switched_off


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of some options of Inductor that this torch has; they change speed and no result.

    Degrades to fewer.
    """

    def is_known(name: str) -> bool:
        found = inductor_config()
        for part in name.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    return {name: value for name, value in options.items() if is_known(name)}


def compile_in_op(function: _Function, options: dict[str, Any] | None = None) -> _Function:
    """Compile a function that operators call, inside whatever a user's compiled graph is part of.

    CUDA graphs stay off: the operator may run where one is recorded, and they do not nest. Their
    trees tell steps apart by a count of calls of compiled functions, which shall be the user's
    calls alone: with ours, what a step has saved for its backward could be taken for the last
    step's and be freed. While a graph is captured nothing is compiled, which would have to wait for
    the device; what was not compiled in a warm-up runs operator by operator.

    Degrades to counting our calls where the count is kept elsewhere.
    """
    compiled = torch.compile(function, options={"triton.cudagraphs": False, **(options or {})})

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        guard = sys.modules.get("torch._dynamo.mutation_guard")
        tracker: Any = getattr(guard, "GenerationTracker", None)
        before = getattr(tracker, "generation", None)
        stance: AbstractContextManager[Any] = nullcontext()
        if is_capturing():
            stance = torch.compiler.set_stance("eager_on_recompile")
        try:
            with stance, without_compiled_autograd():
                return compiled(*args)
        finally:
            if before is not None:
                tracker.generation = before

    return call  # type: ignore[return-value]


def compile_stance() -> str | None:
    """What a user has set by ``torch.compiler.set_stance``; None if compiled code must not run.

    None also while ``torch.compile`` is disabled, or a stance brings its own backend. Degrades to
    None: everything then goes through ``torch.compile`` itself.
    """
    from torch._dynamo import config

    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    name, backend = getattr(stance, "stance", None), getattr(stance, "backend", "unknown")
    if name == "force_eager" or backend is not None or getattr(config, "disable", True):
        return None
    return name


def process_state() -> Callable[[], bool] | None:
    """A question for later: is what Dynamo guards of the process still as it is now?

    Grad mode, autocast, the default dtype, determinism, the precision of products, threads.
    Degrades to None: nothing may then be compiled but by Dynamo.
    """
    try:
        from torch._C._dynamo.guards import GlobalStateGuard
    except ImportError:
        return None
    unchanged: Callable[[], bool] = GlobalStateGuard().check
    return unchanged


_own_compile_lock = threading.RLock()


def compile_lock() -> AbstractContextManager[Any]:
    """Held by whoever compiles; Inductor serves one thread at a time, one may enter twice.

    Degrades to a lock of this project's.
    """
    try:
        from torch._dynamo import convert_frame
    except ImportError:
        return _own_compile_lock
    lock: AbstractContextManager[Any] = getattr(convert_frame, "compile_lock", _own_compile_lock)
    return lock


def compile_traced(
    function: Callable[..., list[torch.Tensor]],
    tensors: list[torch.Tensor],
    by_row: list[bool],
    options: dict[str, Any],
    donated: int = 0,
) -> tuple[Callable[[list[Any]], Any], Callable[[int], bool]] | None:
    """Compile a function of tensors with Inductor alone, without Dynamo and AOTAutograd.

    The function is run once, on fake tensors whose first dimension is one symbol for all that have
    rows. Whatever else it asks of them or of the process is compiled in: the caller has to watch
    sizes, strides, dtypes and devices, and see `process_state`. Alignment is Inductor's to watch,
    which copies an input that has lost it. CUDA graphs stay off, as in `compile_in_op`.

    Args:
        function: Takes the tensors and returns a list of new ones. May differentiate.
        tensors: Plain strided ones that need no gradient.
        by_row: Whether the first dimension of each is the rows'; it is of the first.
        options: Of Inductor.
        donated: How many of the first tensors the compiled function may write over and return as a
            result of the same size. Degrades to new memory for each result.

    Returns:
        The compiled function of a list ``[rows, *tensors]``, which it empties, and whether it
        serves a number of rows. None where torch has other names, or the graph would be one that
        AOTAutograd has to prepare: it mutates, is random or holds tensors of its own.
    """
    try:
        from torch._dispatch.python import enable_python_dispatcher
        from torch._dynamo.source import ConstantSource
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        shapes = ShapeEnv()
        new_symbol, new_size = shapes.create_symbol, shapes.create_symintnode
        guards_of, holds = shapes.produce_guards_expression, shapes.evaluate_guards_expression
    except (ImportError, AttributeError):
        return None
    rows, source = tensors[0].shape[0], ConstantSource("rows")
    size: Any = rows
    if rows > 1:  # one row is a constant, as for Dynamo: such a size broadcasts
        size = new_size(new_symbol(rows, source, DimDynamic.DYNAMIC), hint=rows, source=source)
    fake_mode = FakeTensorMode(shape_env=shapes)

    def fake(tensor: torch.Tensor, has_rows: bool) -> torch.Tensor:
        shape = (size, *tensor.shape[1:]) if has_rows else tensor.shape
        made = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        # Inductor takes an input for aligned whose offset is; such a one it would copy every time.
        return made.as_strided(shape, tensor.stride(), 1) if tensor.data_ptr() % 16 else made

    with compile_lock(), tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
        # In this thread, whose modes record: a device has its own threads for derivatives.
        with (
            fake_mode,
            enable_python_dispatcher(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            fakes = [fake(each, has) for each, has in zip(tensors, by_row, strict=True)]
            inputs: list[Any] = [size, *fakes]
            graph = make_fx(lambda _, *given: function(*given), select_decomp_table())(*inputs)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                return None
            if isinstance(node.target, torch._ops.OpOverload) and (
                node.target._schema.is_mutable
                or torch.Tag.nondeterministic_seeded in node.target.tags
            ):
                return None
        graph.graph.eliminate_dead_code()
        # Inductor's cache knows a graph by its code and not by what may be written over.
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for index, node in enumerate(places[1 : 1 + donated]):
            node._rename(f"donated_{index}")
            node.target = node.name
        graph.recompile()
        # Inductor's joint passes are left out. They look for attention and products, which take a
        # quarter of a second to set up, and split a softmax with a temperature into more loops.
        output = next(iter(reversed(graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # keep strides
        options = {"triton.cudagraphs": False, **options}
        with config.patch(options), without_compiled_autograd():
            if donated:
                # As AOTAutograd tells of what a forward saved for its backward alone.
                TracingContext.get().fw_metadata = SimpleNamespace(  # type: ignore[assignment]
                    bw_donated_idxs=list(range(1, 1 + donated)), static_input_indices=[]
                )
            compiled = compile_fx_inner(
                graph, inputs, is_inference=not donated, is_backward=bool(donated)
            )
        guards = guards_of([size]) if rows > 1 else None

    @functools.lru_cache(maxsize=1024)
    def serves(number: int) -> bool:
        if rows < 2 or number < 2:
            return number == rows
        return not guards or bool(holds(guards, [number]))

    return compiled, serves


@contextmanager
def while_inductor_waits(work: Callable[[], None]) -> Iterator[None]:
    """Do some work inside, at the first moment when Inductor waits for its compiler processes.

    Degrades to the end of the block, as where Inductor finds all that it needs in its caches.

    Args:
        work: Called once, in this thread.
    """
    done = False

    def once() -> None:
        nonlocal done
        if not done:
            done = True
            work()

    try:
        from torch._inductor.async_compile import AsyncCompile

        wait = AsyncCompile.wait
    except (ImportError, AttributeError):
        yield
        once()
        return
    here = threading.get_ident()

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            once()
        return wait(self, *args, **kwargs)

    AsyncCompile.wait = waiting  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]
    once()


def is_capturing() -> bool:
    """Whether a CUDA graph is being recorded on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def mark_rows_dynamic(tensor: torch.Tensor) -> None:
    """Have Dynamo take the first dimension as a symbol, should a compiled function be called.

    Does nothing while nobody has imported Dynamo: then nothing is compiled.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and tensor.dim() and hasattr(dynamo, "maybe_mark_dynamic"):
        dynamo.maybe_mark_dynamic(tensor, 0)


def is_compiled(function: Any) -> bool:
    """Whether a callable comes from ``torch.compile``; False for what a newer torch calls so."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    return hasattr(function, "_orig_mod") and hasattr(function, "dynamo_ctx")


def statically_equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal in every run, without adding a guard.

    Degrades to False where a newer torch keeps its symbols elsewhere: a rewrite is then declined.
    """
    from torch.fx.experimental import symbolic_shapes

    prove = getattr(symbolic_shapes, "statically_known_true", None)
    return prove is not None and bool(prove(one == other))


def size_parts(
    size: torch.SymInt,
) -> tuple[Callable[[Any, Any], Any], list[int | torch.SymInt]] | None:
    """The operator and terms that a symbolic size is made of, if it is a product or a sum.

    Degrades to None, as for a size that is neither.
    """
    import operator

    import sympy  # type: ignore[import-untyped]

    node = size.node
    expression = getattr(node, "expr", None)
    make = getattr(getattr(node, "shape_env", None), "create_symintnode", None)
    if make is None:
        return None
    if isinstance(expression, sympy.Mul):
        function: Callable[[Any, Any], Any] = operator.mul
    elif isinstance(expression, sympy.Add):
        function = operator.add
    else:
        return None
    terms: list[int | torch.SymInt] = []
    for term in expression.args:
        if isinstance(term, sympy.Integer):
            terms.append(int(term))
        else:
            terms.append(make(term, hint=None))
    return function, terms


def fake_mode_of(tensors: list[torch.Tensor]) -> Any:
    """The mode that fake tensors belong to, or None if they are not fake or of several modes.

    Not the mode of the tracing context: Dynamo gives the backend one of its own.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    modes = [each.fake_mode for each in tensors if isinstance(each, FakeTensor)]
    return modes[0] if modes and all(mode is modes[0] for mode in modes) else None


def decompositions(names: list[str]) -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of some ATen operators by name; unknown ones are left out.

    Degrades to none: fewer losses are then proved to be row-wise.
    """
    try:
        from torch._decomp import get_decompositions
    except ImportError:
        return {}
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return dict(get_decompositions(packets))


def fresh_fake_mode() -> Any:
    """A mode in which tensors have shapes and no data, apart from any that is tracing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def is_outermost_graph(graph: torch.fx.Graph) -> bool:
    """Whether a graph from Dynamo is a frame's own and not the body of a higher-order operator.

    What a body returns is read by the graph around it. Degrades to False: what may be done to a
    frame's own outputs alone is then not done.
    """
    return any("grapharg" in node.meta for node in graph.nodes if node.op == "placeholder")
