"""Exceptions that are more than a plain `ValueError` or `TypeError`."""

from __future__ import annotations


class TargetOutOfRangeError(ValueError, IndexError):
    """A target lies outside ``[0, V)`` and is not ``ignore_index``.

    It is an `IndexError` too because that is what ``torch.nn.functional.cross_entropy`` raises
    on the CPU, so that code catching torch's error keeps working when its graph is rewritten.
    """


class NotDifferentiableTwiceError(RuntimeError):
    """A second derivative was asked of an op that makes its gradients in the forward."""


class ForwardModeError(NotImplementedError):
    """A forward-mode tangent reached an op that has no forward-mode rule."""
