"""``torch.compile(model, backend="greyhound")``: Inductor with the rewrite, for one call."""

from __future__ import annotations

from typing import Any

import torch

from greyhound_lowering.hooks import HOOK, _settings, available, chained, passes_of
from greyhound_lowering.rewrite_pass import RewritePass
from greyhound_ops import torch_private

PREFIX = "greyhound."


def greyhound(
    graph_module: torch.fx.GraphModule,
    example_inputs: Any,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a graph with Inductor, rewritten first.

    Args:
        graph_module: Graph from Dynamo.
        example_inputs: Its example inputs.
        mode: A mode of ``torch.compile``, such as ``"reduce-overhead"``.
        options: Options of Inductor, and fields of `RewriteSettings` under ``greyhound.``, as in
            ``{"greyhound.chunk_size": 1024}``.

    Returns:
        The compiled graph.

    Raises:
        ValueError: A setting out of range.
        TypeError: An unknown setting under ``greyhound.``.
    """
    given = dict(options or {})
    ours = {key[len(PREFIX) :]: given.pop(key) for key in list(given) if key.startswith(PREFIX)}
    patches = {**torch_private.inductor_mode_options(mode), **given}
    if not available():
        _settings(ours)  # a wrong setting is an error all the same
        return torch_private.compile_with_inductor(graph_module, example_inputs, patches)
    existing = patches.get(HOOK, getattr(torch_private.inductor_config(), HOOK))
    if not ours and _rewrites_already(existing):
        return torch_private.compile_with_inductor(graph_module, example_inputs, patches)
    patches[HOOK] = chained(existing, RewritePass(_settings(ours)))
    for name, value in torch_private.early_pass_options().items():
        patches.setdefault(name, value)
    return torch_private.compile_with_inductor(graph_module, example_inputs, patches)


# ``torch._dynamo.reset()`` asks for it, as it does of Inductor's own backend.
greyhound.reset = torch_private.reset_cuda_graphs  # type: ignore[attr-defined]


def _rewrites_already(hook: Any) -> bool:
    """Whether `enable` has put an active pass there."""
    return any(isinstance(each, RewritePass) and each.active for each in passes_of(hook))
