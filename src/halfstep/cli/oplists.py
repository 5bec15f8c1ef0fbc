"""``halfstep oplists``: shows the precision of each op."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["command"]


_DEVICES = click.Choice(["cpu", "cuda"])
_LEVELS = click.Choice(["O1", "O2", "OD"])


@click.command(context_settings={"show_default": True}, epilog="Example: halfstep oplists softmax matmul")
@click.argument("names", nargs=-1)
@click.option("--device", type=_DEVICES, default="cpu", help="whose torch.autocast to compare with")
@click.option("--level", "--opt-level", type=_LEVELS, default="O1", help="whose lists to print")
@click.option("--white", multiple=True, metavar="OP", help="as in custom_white_list; may be given again")
@click.option("--black", multiple=True, metavar="OP", help="as in custom_black_list; may be given again")
@click.option("--wide", multiple=True, metavar="OP", help="as in custom_wide_list; may be given again")
def command(names: tuple[str, ...], device: str, level: str, **custom: Any) -> None:
    """Print the rule of each op of a list, or of the ops NAMES, written as in torch or Paddle."""
    from rich.console import Console
    from rich.table import Table

    from ..core.errors import HalfstepError
    from ..core.oplists import BANNED, RULES, OpLists, entries
    from .tables import print_whole

    try:
        found = entries(names, lists=OpLists.custom(level=level, **custom), device=device)
    except HalfstepError as error:
        raise click.UsageError(str(error)) from error
    table = Table("op", "rule", "reason", f"torch.autocast on {device}", "16 bits")
    for entry in found:
        table.add_row(*entry, style=None if entry.rule == entry.native else "bold")
    console = Console()
    print_whole(console, table)
    for rule in dict.fromkeys(entry.rule for entry in found):
        console.print(f"{rule}: {RULES[rule]}.", highlight=False)
    for entry in found:
        if entry.rule == "banned":
            console.print(f"\n{entry.op}: {BANNED[entry.op]}", highlight=False)
