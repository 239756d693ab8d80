"""Compiles kernels for a Hopper GPU where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

#: Kernel as ``module.name``, constants and types of the other arguments by name, and options.
Kernel = tuple[str, dict[str, Any], dict[str, str], dict[str, int]]

# In one clean process: under TRITON_INTERPRET=1 there is nothing to compile.
_SCRIPT = """
import importlib, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

made = {}
for label, (name, constants, types, options) in json.load(sys.stdin).items():
    module, name = name.split(".")
    kernel = getattr(importlib.import_module("greyhound_ops.kernels." + module), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    fixed = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs={})
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        made[label] = compiled.metadata.shared
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        made[label] = f"{type(cause).__name__}: {cause}"
print(json.dumps(made))
"""


def compiled(kernels: dict[str, Kernel]) -> dict[str, int | str]:
    """Compile kernels for compute capability 9.0.

    Args:
        kernels: By a label; what a kernel is not told of is an ``i32``.

    Returns:
        Bytes of shared memory of one program by label, or what went wrong.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=json.dumps(kernels), capture_output=True, text=True,
        env=environment, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, int | str] = json.loads(result.stdout.splitlines()[-1])
    assert found.keys() == kernels.keys()
    return found
