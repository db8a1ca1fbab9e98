"""Shows a progress bar on standard error if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(
    title: str, total: int, *, num_done: int = 0, is_shown: bool = True
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of ``total`` items, from any thread; ``num_done`` are already done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(title, total=total, completed=num_done)
        yield lambda: progress.advance(task)
