"""The outputs of ``halfstep run``: a report, rows of numerics, and a line on skipped steps."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .files import check_writable
from .termination import exiting_on_sigterm

if TYPE_CHECKING:
    from ..stepping.attached import AttachedOptimizer

__all__ = ["Outputs", "is_first"]


@dataclass(frozen=True)
class Outputs:
    """The files that the user requested.

    Attributes:
        report: the file for a page on every step.
        numerics: the file for the statistics of tensors.
        every: the distance of two steps that ``numerics`` samples; None for the first 20, and every 100th.
    """

    report: Path | None = None
    numerics: Path | None = None
    every: int | None = None

    def check(self) -> None:
        """Refuse files that could only fail after the script has run.

        Raises:
            click.ClickException: with the reason.
        """
        if self.every is not None and self.numerics is None:
            raise click.UsageError("--every goes with --numerics FILE.")
        if self.report is not None and self.numerics is not None and self.report.resolve() == self.numerics.resolve():
            raise click.UsageError(f"--report and --numerics would both write {self.report}.")
        check_writable(self.report, self.numerics)

    @contextmanager
    def written(self, script: str, command_line: list[str]) -> Iterator[None]:
        """Write the files when the block ends, even with an error.

        Args:
            script: the name of the script.
            command_line: the command line, shown on the pages.
        """
        with ExitStack() as stack:
            stack.enter_context(_telling_skips())
            if self.report is not None or self.numerics is not None:
                stack.enter_context(exiting_on_sigterm())
            if self.report is not None and is_first():
                stack.enter_context(_reported(self.report, script, shlex.join(command_line)))
            if self.numerics is not None:
                from .run_numerics import monitored

                stack.enter_context(monitored(self.numerics, self.every, script, shlex.join(command_line)))
            yield


def is_first() -> bool:
    """True if this is the only process, or the process of rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def _telling_skips() -> Iterator[None]:
    """Print the number of skipped steps at the end, if there were any."""
    from ..core.text import counted
    from ..stepping.attached import creation_callbacks, skipped_steps

    made = []

    def note(attached: AttachedOptimizer) -> None:
        if not attached.window.delegates_to_outer:
            made.append(attached.counts)  # without a reference to the optimizer

    creation_callbacks.append(note)
    try:
        yield
    finally:
        creation_callbacks.remove(note)
        skipped = sum(map(skipped_steps, made))
        if skipped and is_first():
            steps = counted(sum(counts["calls"] for counts in made), "step")
            were = "was" if skipped == 1 else "were"
            click.echo(f"halfstep: {skipped:,} of {steps} {were} skipped for an overflow.", err=True)


@contextmanager
def _reported(path: Path, script: str, command_line: str) -> Iterator[None]:
    """Record the block, and write the report at its end."""
    from .run_report import recording, write_report

    path = path.resolve()  # the script may change the working directory
    ending = ""
    with recording() as record:
        try:
            yield
        except SystemExit as left:
            ending = f"It exited with {left.code}." if left.code else ""
            raise
        except BaseException as error:
            ending = f"It ended with {type(error).__name__}: {error}"
            raise
        finally:
            write_report(path, record, script, command_line, ending)
            click.echo(f"halfstep: wrote {path}", err=True)
