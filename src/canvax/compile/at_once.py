"""Make programs at the same time, each in a thread: most of XLA's work keeps a single processor busy."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextvars import copy_context
from typing import Any

import jax


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run ``calls`` at the same time and return their results. Ctrl-C does not wait for the compiler."""
    precision = jax.config.values["jax_default_matmul_precision"]  # a context's setting holds in its thread only

    made: list[Future[Any]] = [Future() for _ in calls]

    def one(call: Callable[[], Any], result: Future[Any]) -> None:
        try:
            with jax.default_matmul_precision(precision):
                result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threads = []
    for call, result in zip(calls, made, strict=True):
        # Not a pool: its threads are waited for when the process ends.
        # In a copy of the context, so that compilations count for the caller.
        target = copy_context().run
        thread = threading.Thread(target=target, args=(one, call, result), name="canvax compile", daemon=True)
        thread.start()
        threads.append(thread)
    try:
        for result in wait(made, return_when=FIRST_EXCEPTION).done:
            result.result()  # an error does not wait for the other programs
    except Exception:
        for thread in threads:  # but the end of the process does: Python aborts if it ends a thread inside JAX
            atexit.register(thread.join)
        raise
    return [result.result() for result in made]
