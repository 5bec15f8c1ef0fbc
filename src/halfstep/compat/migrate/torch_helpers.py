"""Functions that are added to a rewritten file: what Apex did, and torch has no function for."""

from __future__ import annotations

import ast

__all__ = ["HELPERS", "with_helper"]

_SCALER_OF = '''\
def {}(optimizer):
    """The GradScaler of an optimizer; one that does nothing for an optimizer without, and for None."""
    if hasattr(optimizer, "scaler") or not isinstance(optimizer, (torch.optim.Optimizer, type(None))):
        return optimizer.scaler
    return torch.amp.GradScaler(enabled=False)


'''
_SCALED_PASS = '''\
@contextlib.contextmanager
def {}(scaler, loss, optimizers, delay_unscale=False):
    """Scales the loss of a backward pass; then gradients are unscaled and the loss scale moves, as with Apex.

    If one of the gradients is inf or NaN, the next step of each of the optimizers is skipped.
    """
    if not scaler.is_enabled():
        yield loss
        return
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    earlier = []
    for optimizer in optimizers:
        if not delay_unscale and not getattr(optimizer, "has_scaled_gradients", False):
            earlier += [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        optimizer.has_scaled_gradients = delay_unscale
    for p, _ in earlier:
        p.grad = None
    yield scaler.scale(loss)
    if delay_unscale:
        return
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    overflow = scaler.get_scale() < scale
    if scaler.get_scale() > 2.0**24:  # the most that Apex has
        scaler.update(2.0**24)
    for p, grad in earlier:
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
    for optimizer in optimizers if overflow else []:
        if getattr(optimizer.step, "__name__", "") != "skip_step":

            def skip_step(*args, optimizer=optimizer, step=optimizer.step, **kwargs):
                optimizer.step = step

            optimizer.step = skip_step


'''
HELPERS = {"scaled_pass": _SCALED_PASS, "scaler_of": _SCALER_OF}
"""The name of each function and its text, in the order in which they are added: each before the ones that are there."""


def with_helper(text: str, name: str, helper: str) -> str:
    """The text with a function of this name, before the first function or use of it; as it is where nothing uses it."""
    tree = ast.parse(text)
    users = {id(node) for node in tree.body for each in ast.walk(node) if getattr(each, "id", None) == name}
    if not users:
        return text
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    place = next(i for i, node in enumerate(tree.body) if isinstance(node, kinds) or id(node) in users)
    node, lines = tree.body[place], text.splitlines(keepends=True)
    line = min(each.lineno for each in (node, *getattr(node, "decorator_list", []))) - 1
    begin = (tree.body[place - 1].end_lineno or 0) if place else 0
    while line > begin and lines[line - 1].startswith("#"):
        line -= 1
    around = ["" if line == 0 or not lines[line - 1].strip() else "\n\n", helper.format(name)]
    return "".join([*lines[:line], *around, *lines[line:]])
