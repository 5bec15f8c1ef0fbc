"""Self-contained HTML pages: their frame, and pictures in it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..numerics.html import style
from .machine import describe_machine

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

__all__ = ["log2_axis", "picture", "render"]

_INK = "#010203"  # what matplotlib draws in this color takes the page's text color


def render(name: str, device: torch.device, **values: Any) -> str:
    """A page from ``templates/{name}.html.j2``, with the facts of the machine at its end."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("halfstep.cli")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    return environment.get_template(f"{name}.html.j2").render(
        machine=describe_machine(device), style=Markup(style()), **values
    )


def picture(ylabel: str, draw: Callable[[Axes], None]) -> str:
    """An inline SVG whose text has the font and the color of the page around it."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": ylabel,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _INK,
        "grid.alpha": 0.12,
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.grid(True, which="major")
        axes.minorticks_off()
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg[svg.index("<svg") :])
    return svg.replace(_INK, "currentColor")


def log2_axis(axes: Axes) -> None:
    """A y axis for loss scales: logarithmic to base 2, from at most 0.5 to at least 2."""
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2.0))
