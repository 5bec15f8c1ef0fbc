"""The common part of the pages of all commands: the facts of the machine at their end."""

from __future__ import annotations

import torch

from ..numerics.html import Markup, element, section
from .machine import describe_machine

__all__ = ["facts", "machine_section"]


def facts(named: dict[str, str]) -> Markup:
    """A list of names and what belongs to them."""
    return element("dl", *(part for name, text in named.items() for part in (element("dt", name), element("dd", text))))


def machine_section(device: torch.device) -> Markup:
    """The machine and the versions that a page was made with."""
    return section("The machine", facts(describe_machine(device)))
