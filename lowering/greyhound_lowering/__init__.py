"""Chunked losses for unchanged models: the ``torch.compile`` rewrite of ``greyhound_ops``.

``enable()`` rewrites every graph that Inductor compiles from then on, ``with enabled():`` those of
a block, ``torch.compile(model, backend="greyhound")`` those of one call; ``explain()`` tells what
was found, what became of it, and why.
"""

from __future__ import annotations

from greyhound_lowering.backend import greyhound
from greyhound_lowering.hooks import disable, enable, enabled, is_enabled
from greyhound_lowering.report import Decision, Report, account
from greyhound_lowering.rewrite_pass import RewritePass
from greyhound_lowering.settings import RewriteSettings, rewrite_requested
from greyhound_ops import torch_private

__all__ = [
    "Decision",
    "Report",
    "RewritePass",
    "RewriteSettings",
    "clear_report",
    "disable",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "rewrite_pass",
]


def explain() -> Report:
    """What became of every projection found in the graphs compiled so far in this process."""
    return account.report()


def clear_report() -> None:
    """Forget what `explain` would tell."""
    account.clear()


def rewrite_pass(**settings: object) -> RewritePass:
    """Make a pass for Inductor's own option.

    As in ``torch.compile(model, options={"pre_grad_custom_pass": rewrite_pass()})``.

    Args:
        **settings: Fields of `RewriteSettings`.

    Returns:
        A pass for one ``torch.compile`` call.
    """
    from greyhound_lowering.hooks import _settings

    return RewritePass(_settings(settings))


torch_private.register_backend(greyhound, "greyhound")
if rewrite_requested():
    enable()
