"""The one exception of the rewrite: a form that is left exactly as it was."""

from __future__ import annotations


class Declined(Exception):
    """Why a projection is left alone, in words for the user."""
