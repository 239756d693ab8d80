"""Processes that measure: each imports, compiles and allocates for itself and answers messages."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

Handler = Callable[[Any], Any]


class WorkerError(RuntimeError):
    """A worker failed, ended, or did not answer in time."""


class Worker:
    """A process that answers messages one after the other.

    Args:
        make: Called in the process with ``arguments``; returns the function that answers. Both must
            be picklable.
        *arguments: For ``make``.
        cold: Give the process compile caches of its own, empty and switched off where that can be.
    """

    def __init__(self, make: Callable[..., Handler], *arguments: Any, cold: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._caches = tempfile.mkdtemp(prefix="benchmarks-") if cold else None
        environment = {}
        if self._caches is not None:
            environment = {
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(self._caches, "inductor"),
                "TRITON_CACHE_DIR": os.path.join(self._caches, "triton"),
            }
        self._process = context.Process(target=_serve, args=(theirs, make, arguments))
        with _environment(environment):
            self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def send(self, message: Any) -> None:
        """Sends a message without waiting for its answer."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise WorkerError(f"the process has ended ({error})") from None

    def receive(self, timeout_s: float) -> Any:
        """Waits for the answer to the oldest message that has none yet.

        Raises:
            WorkerError: With what went wrong in the process, or that it did not answer.
        """
        try:
            if not self._connection.poll(timeout_s):
                self._process.kill()  # else its answer would be taken for that of a later message
                raise WorkerError(f"no answer within {timeout_s:.0f} s")
            worked, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise WorkerError(f"exit status {self._process.exitcode}") from None
        if not worked:
            raise WorkerError(value)
        return value

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Sends a message and waits for its answer."""
        self.send(message)
        return self.receive(timeout_s)

    def close(self) -> None:
        """Ends the process and removes its caches."""
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._caches is not None:
            shutil.rmtree(self._caches, ignore_errors=True)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that a process started in this block finds before its first import."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(
    connection: Connection, make: Callable[..., Handler], arguments: tuple[Any, ...]
) -> None:
    handler: Handler | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            if handler is None:
                handler = make(*arguments)
            answer = (True, handler(message))
        except Exception as exception:
            traceback.print_exc()
            text = " ".join(f"{type(exception).__name__}: {exception}".split())
            answer = (False, text[:300])
        connection.send(answer)
