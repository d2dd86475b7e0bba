"""Says on standard error what a long command is doing, without a word from one that is done within two seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

QUIET_SECONDS = 2.0


class Progress:
    """A context manager that is called with each new step.

    On a terminal the step is a status line, which vanishes; elsewhere it is a line of its own, and at most one is
    written
    every two seconds.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._last = time.monotonic()
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, step: str) -> None:
        if self._status is not None:
            self._status.update(step)
        elif time.monotonic() - self._last >= QUIET_SECONDS:
            self._show(step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def _show(self, step: str) -> None:
        if self._console.is_terminal:
            self._status = self._console.status(step)
            self._status.start()
        else:
            self._last = time.monotonic()
            self._console.print(f"... {step}", markup=False, highlight=False)
