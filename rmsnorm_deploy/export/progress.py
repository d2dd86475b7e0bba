"""What the command says while it works: one line a stage on stderr, with its time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.text import Text


class Progress:
    """Call it with a stage's name for a context manager; the stage's time is printed when it ends well."""

    def __init__(self, *, quiet: bool = False) -> None:
        """``quiet`` says nothing at all."""
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.times: dict[str, float] = {}
        self._depth = 0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Run one stage. Stages may be nested; only the outermost has the moving sign."""
        start = time.perf_counter()
        self._depth += 1
        moving = self._depth == 1 and self.console.is_terminal
        try:
            with self.console.status(Text(stage)) if moving else nullcontext():
                yield
        finally:
            self._depth -= 1
        self.times[stage] = time.perf_counter() - start
        self.console.print(Text(f"{'  ' * self._depth}{stage:<12} {self.times[stage]:7.1f} s"))

    def notes(self, notes: Sequence[str]) -> None:
        """Choices that were made for the user."""
        for note in notes:
            self.console.print(Text(f"  - {note}", "dim"), soft_wrap=True)
