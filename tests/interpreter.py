"""Triton's interpreter, which runs the kernels where there is no GPU."""

from __future__ import annotations


def repair_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of a one-element array, which numpy 2.4 refuses.

    Triton 3.7 squeezes it first; this does the same.
    """
    import triton
    from packaging.version import Version

    if Version(triton.__version__) >= Version("3.7"):
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched
