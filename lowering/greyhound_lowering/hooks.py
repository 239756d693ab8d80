"""Installing the pass into Inductor, beside whatever is installed already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from greyhound_lowering.report import account
from greyhound_lowering.rewrite_pass import RewritePass
from greyhound_lowering.settings import RewriteSettings, from_environment
from greyhound_ops import torch_private

HOOK = "pre_grad_custom_pass"


class ChainedPass(torch_private.graph_pass_base()):  # type: ignore[misc]
    """Passes one after another in the place of one.

    Torch 2.11 takes a single pass; later ones take lists too.

    Args:
        passes: Callables on a graph, in order.
    """

    def __init__(self, passes: tuple[Any, ...]) -> None:
        super().__init__()
        self.passes = passes

    def uuid(self) -> Any:
        """The uuids of all, or None (no caching) if one of them has none."""
        uuids = tuple(each.uuid() if hasattr(each, "uuid") else None for each in self.passes)
        return None if any(not uuid for uuid in uuids) else uuids

    def __call__(self, graph: fx.Graph) -> None:
        """Run all passes."""
        for each in self.passes:
            each(graph)


def chained(existing: Any, ours: RewritePass) -> Any:
    """The hook's new value: what was there, then our pass in the place of another of ours."""
    before = [each for each in passes_of(existing) if not isinstance(each, RewritePass)]
    return ChainedPass((*before, ours)) if before else ours


def passes_of(hook: Any) -> tuple[Any, ...]:
    """The single passes behind a value of the hook."""
    if hook is None:
        return ()
    if isinstance(hook, ChainedPass):
        return hook.passes
    return tuple(hook) if isinstance(hook, (list, tuple)) else (hook,)


class _Installed:
    """What one `enable` put in and what it found."""

    def __init__(self, ours: RewritePass) -> None:
        config = torch_private.inductor_config()
        self.ours = ours
        self.before = {HOOK: getattr(config, HOOK)}
        values = {HOOK: chained(self.before[HOOK], ours)}
        for name, value in torch_private.early_pass_options().items():
            if getattr(config, name) == "default":  # the user's own choice stands
                self.before[name] = getattr(config, name)
                values[name] = value
        self.after = values
        for name, value in values.items():
            setattr(config, name, value)

    def remove(self) -> None:
        config = torch_private.inductor_config()
        # Somebody may have wrapped our hook since; then it stays in theirs and does nothing.
        self.ours.active = False
        for name, value in self.after.items():
            if getattr(config, name) is value or getattr(config, name) == value:
                setattr(config, name, self.before[name])


_lock = threading.Lock()
_installed: _Installed | None = None


def _settings(changes: dict[str, Any]) -> RewriteSettings:
    import dataclasses

    return dataclasses.replace(from_environment(), **changes)


def available() -> bool:
    """Whether this torch has what the rewrite needs; if not, `explain` tells what is missing."""
    reason = torch_private.rewrite_lacks()
    if reason is not None:
        account.unavailable(reason)
    return reason is None


def enable(**settings: Any) -> None:
    """Rewrite every graph that Inductor compiles in this process from now on.

    Graphs compiled before stay as they are; ``torch.compiler.reset()`` drops them. With a torch
    that lacks what the rewrite needs nothing is done but a warning.

    Args:
        **settings: Fields of `RewriteSettings`; the others as the environment gives them.

    Raises:
        ValueError: A setting out of range.
        TypeError: An unknown setting.
    """
    global _installed
    wanted = _settings(settings)
    if not available():
        return
    with _lock:
        if _installed is not None:
            _installed.remove()
        _installed = _Installed(RewritePass(wanted))


def disable() -> None:
    """Undo `enable`: Inductor's hook is again exactly what it was."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed.remove()
            _installed = None


def is_enabled() -> bool:
    """Whether `enable` is in force."""
    return _installed is not None


@contextmanager
def enabled(on: bool = True, **settings: Any) -> Iterator[None]:
    """Turn the rewrite on (or off) for the graphs compiled inside a block.

    Args:
        on: False turns it off instead.
        **settings: Fields of `RewriteSettings`.

    Yields:
        Nothing.
    """
    global _installed
    wanted = _settings(settings)  # refused before anything is touched
    if not available():
        yield
        return
    with _lock:
        outer = _installed
        if outer is not None:
            outer.remove()
        _installed = _Installed(RewritePass(wanted)) if on else None
    try:
        yield
    finally:
        with _lock:
            if _installed is not None:
                _installed.remove()
            _installed = None
            if outer is not None:
                _installed = _Installed(RewritePass(outer.ours.settings))
