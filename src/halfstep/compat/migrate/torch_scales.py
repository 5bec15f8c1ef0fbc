"""Apex's own loss scales, ``amp._amp_state.loss_scalers[0]``, become those of a GradScaler."""

from __future__ import annotations

import ast

from .scopes import Use
from .torch_script import Script

__all__ = ["replace_scales"]

_SCALERS = "apex.amp._amp_state.loss_scalers"


def replace_scales(script: Script) -> None:
    """Replace what reads a loss scale, or sets the first one. Other uses of Apex's loss scalers stay among the uses."""
    script.names.uses = [use for use in script.names.uses if use.name != _SCALERS or not _replace(script, use)]


def _replace(script: Script, use: Use) -> bool:
    """Replace a use, if there is something that does the same; whether there was."""
    owners = script.around.owners
    scaler = owners[id(use.node)]
    attribute = owners[id(scaler)]
    one_each = script.package.losses > 1 and not script.package.listed
    if not isinstance(scaler, ast.Subscript) or not isinstance(attribute, ast.Attribute) or one_each:
        return False
    outer = owners[id(attribute)]
    if isinstance(outer, ast.Call) and attribute.attr == "loss_scale":
        optimizer = script.optimizer_near(outer)
        if optimizer is not None:
            script.text.put(outer, f"{script.scaler(optimizer, script.text.source(scaler.slice))}.get_scale()")
        return optimizer is not None
    return isinstance(outer, ast.Assign) and attribute.attr == "_loss_scale" and _begins(script, outer)


def _begins(script: Script, node: ast.Assign) -> bool:
    """Have a GradScaler begin with the scale that is set after an ``amp.initialize``, in the same block."""
    block, place = script.around.places[id(node)]
    starts = [start for start in script.starts if any(start.node is each for each in block[:place])]
    plain = (ast.Constant, ast.BinOp, ast.operator)
    if len(starts) != 1 or script.package.losses > 1 or not all(isinstance(x, plain) for x in ast.walk(node.value)):
        return False
    starts[0].init_scale = script.text.source(node.value)
    script.text.lines(node, [])
    return True
