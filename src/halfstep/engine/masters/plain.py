"""Plain masters: an fp32 copy beside each 16-bit parameter, held by the optimizer in the parameter's place.

The optimizer then updates fp32 numbers with fp32 state, whatever optimizer it is, and the copies are rounded back
into the model. When gradients move from the model to the masters is decided in ``engine.stepping``.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...core.formats import is_half
from ...kernels import eager
from ...kernels.plan import Plan, PlanCache

__all__ = ["MasterLink", "PlainMasters", "link_of", "master_of"]


class MasterLink:
    """A 16-bit parameter of a model and its fp32 master. Optimizers that share the parameter share the link.

    Attributes:
        model: the 16-bit parameter.
        master: the fp32 one.
        reduced: the fp32 gradient that ranks have averaged and of which the 16-bit one is the rounded copy, or None.
    """

    __slots__ = ("__weakref__", "_reduced_version", "_view", "master", "model", "owners", "reduced", "spent_by")

    def __init__(self, model: torch.nn.Parameter) -> None:
        self.model = model
        self._view: torch.Tensor | None = None  # the collected gradient, where it is a view of a DDP bucket
        self.owners = 0  # optimizers that update it
        self.spent_by: set[int] = set()  # those that have stepped with the gradient it has
        # From the rounded weight, as Apex had it: the master starts where the model computes.
        fp32 = model.detach().to(torch.float32, copy=True)
        self.master = torch.nn.Parameter(fp32, requires_grad=model.requires_grad)
        self.reduced: torch.Tensor | None = None
        self._reduced_version = -1

    def note_reduced(self) -> None:
        """The 16-bit gradient is as the ranks left it: from here on, if it changes, it says more than ``reduced``."""
        grad = self.model.grad
        self._reduced_version = -1 if grad is None else grad._version
        if grad is None and self.reduced is not None and not self.reduced.any():
            self.reduced = None  # no rank has ever used the parameter: no gradient, rather than one of zeros

    def take_accumulated(self) -> torch.Tensor | None:
        """The gradient of the master, which then has none."""
        grad = None if self.spent_by else self.master.grad
        self.master.grad = None
        self.spent_by.clear()
        return grad

    def fresh_grad(self) -> torch.Tensor | None:
        """The gradient of the 16-bit parameter, unless the master has had it already."""
        grad = self.model.grad
        if self.reduced is not None:
            if self._reduced_version == (-1 if grad is None else grad._version):
                return self.reduced
            self.reduced = None
        if grad is None or getattr(grad, "_halfstep_collected", -1) == grad._version:
            return None
        # DistributedDataParallel rebuilds its buckets once, in a forward, and gradient_as_bucket_view=True then hands
        # the same gradient back as another object, without the mark (torch 2.13, Reducer::initialize_bucket_views).
        if self._view is not None and grad is not self._view and grad._is_view() and torch.equal(grad, self._view):
            self.mark_collected()
            return None
        return grad

    def mark_collected(self) -> None:
        """Remember on the gradient itself that the master has it; Apex left 16-bit gradients in place, so do we."""
        self.reduced = None
        grad = self.model.grad
        if grad is not None:
            grad._halfstep_collected = grad._version  # type: ignore[attr-defined]
            grad._halfstep_unscaled = False  # type: ignore[attr-defined]
            self._view = grad if grad._is_view() else None

    def clear_grad(self) -> None:
        """Set the gradient of the 16-bit parameter to None."""
        self.model.grad = self._view = None


# Parameter -> weak reference to its link. Weak on both sides: the optimizer's PlainMasters owns the links, so that a
# model outliving its optimizer has no masters any more. Model hooks and a second optimizer look masters up here,
# because what hangs on the module itself would be copied by deepcopy and pickle.
_LINKS: MutableMapping[torch.Tensor, weakref.ref[MasterLink]] = WeakIdKeyDictionary()


def _link(param: torch.nn.Parameter) -> MasterLink:
    reference = _LINKS.get(param)
    link = reference() if reference is not None else None
    if link is None:
        link = MasterLink(param)
        _LINKS[param] = weakref.ref(link)
    return link


def link_of(param: torch.Tensor) -> MasterLink | None:
    """The link of a model's parameter, or None if no living optimizer keeps a master for it."""
    reference = _LINKS.get(param)
    return reference() if reference is not None else None


def master_of(param: torch.Tensor) -> torch.nn.Parameter | None:
    """The fp32 master of a model's parameter, or None if no living optimizer keeps one."""
    link = link_of(param)
    return None if link is None else link.master


class PlainMasters:
    """The masters of one optimizer.

    On construction every trainable float16 or bfloat16 parameter in ``optimizer.param_groups`` is replaced there by
    its master, and what state the optimizer had for it follows, in fp32.

    Attributes:
        links: one ``MasterLink`` for each master, in the order of the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.links: list[MasterLink] = []
        self._frozen: list[tuple[dict[str, Any], int]] = []
        self._plans = PlanCache()
        for group in optimizer.param_groups:
            self.adopt(optimizer, group)

    def adopt(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Give masters to the 16-bit parameters of a group; frozen ones get theirs when they are unfrozen."""
        for i, param in enumerate(group["params"]):
            if is_half(param):
                if param.requires_grad:
                    self._swap(optimizer, group, i)
                else:
                    self._frozen.append((group, i))

    def adopt_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Give masters to parameters that were frozen before and train now."""
        if self._frozen:
            thawed = [(group, i) for group, i in self._frozen if group["params"][i].requires_grad]
            self._frozen = [(group, i) for group, i in self._frozen if not group["params"][i].requires_grad]
            for group, i in thawed:
                self._swap(optimizer, group, i)

    def _swap(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], i: int) -> None:
        param = group["params"][i]
        link = _link(param)
        link.owners += 1
        group["params"][i] = link.master
        self.links.append(link)
        if param in optimizer.state:
            state = optimizer.state.pop(param)
            optimizer.state[link.master] = {
                name: value.float() if isinstance(value, torch.Tensor) and is_half(value) else value
                for name, value in state.items()
            }

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round every master into its 16-bit parameter."""
        if self.links:
            masters = [link.master for link in self.links]
            models = [link.model for link in self.links]
            eager.copy(self._plans.get("copy", masters, masters, models), masters, models)  # type: ignore[arg-type]

    @torch.no_grad()
    def collect(self, inv_scale: torch.Tensor | None, found_inf: torch.Tensor, seen: set[int]) -> None:
        """Add the model's fresh gradients, times ``inv_scale``, to the gradients of the masters.

        Args:
            inv_scale: 0-dim float32 tensor; None adds them as they are and looks for no overflow.
            found_inf: 0-dim float32 tensor, set to 1.0 if one of these gradients holds inf or NaN.
            seen: identities of masters already served in this pass; extended.
        """
        first: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        again: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        reduced: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for link in self.links:
            if id(link.master) in seen:
                continue
            seen.add(id(link.master))
            grad = link.fresh_grad()
            if grad is None:
                continue
            if link.spent_by:
                link.master.grad = None
                link.spent_by.clear()
            if grad.is_sparse:
                _collect_sparse(link, grad, inv_scale, found_inf)
            else:
                rows = again if link.master.grad is not None else reduced if grad is link.reduced else first
                rows.append((link.master, grad))
            link.mark_collected()
        for master, grad in reduced:
            master.grad = grad  # fp32 already, and nobody else's
        if reduced and inv_scale is not None:
            masters, grads = [master for master, _ in reduced], [grad for _, grad in reduced]
            eager.unscale_(self._plans.get("reduced", masters, grads), grads, inv_scale, found_inf)
        for slot, rows in (("first", first), ("again", again)):
            if not rows:
                continue
            masters = [master for master, _ in rows]
            grads = [grad for _, grad in rows]
            if slot == "first":
                for master in masters:
                    master.grad = torch.empty_like(master)
            targets = [master.grad for master in masters]
            plan = self._plans.get(slot, masters, grads, targets)  # type: ignore[arg-type]
            eager.unscale_into(plan, grads, targets, inv_scale, found_inf, accumulate=slot == "again")  # type: ignore[arg-type]

    def drop_collected(self) -> None:
        """Set those 16-bit gradients to None that the masters have had."""
        for link in self.links:
            if link.fresh_grad() is None:
                link.clear_grad()

    def clear_master_grads(self) -> None:
        """Set the gradients of the masters to None."""
        for link in self.links:
            link.master.grad = None
            link.spent_by.clear()

    def spend_master_grads(self) -> None:
        """After a step: the gradients are gone, but for another optimizer with the same master they are still there."""
        for link in self.links:
            if link.owners > 1:
                link.spent_by.add(id(self))
            if link.owners <= 1 or len(link.spent_by) == link.owners:
                link.master.grad = None
                link.spent_by.clear()

    def drop_spent(self) -> None:
        """Before a step: a gradient that this optimizer has stepped with before does not serve it again."""
        for link in self.links:
            if link.spent_by and id(self) in link.spent_by:
                link.master.grad = None
                link.spent_by.clear()

    @torch.no_grad()
    def unscale_model_grads(self, inv_scale: torch.Tensor) -> None:
        """Unscale the 16-bit gradients, too, that the masters have had, for those who look at them or clip them."""
        links = [link for link in self.links if link.model.grad is not None and link.fresh_grad() is None]
        grads: list[torch.Tensor] = []
        for link in links:
            grad = link.model.grad
            if grad.is_sparse and not grad.is_coalesced():  # type: ignore[union-attr]
                grad = link.model.grad = grad.float().coalesce().to(grad.dtype)  # type: ignore[union-attr]
            grads.append(grad._values() if grad.is_sparse else grad)  # type: ignore[union-attr, arg-type]
        if grads:
            unread = torch.zeros((), device=grads[0].device)
            eager.unscale_(self._plans.get("model", [link.model for link in links], grads), grads, inv_scale, unread)
        for link in links:
            link.mark_collected()
            link.model.grad._halfstep_unscaled = True  # type: ignore[union-attr]

    def take_edits(self) -> None:
        """Where a gradient that ``unscale_model_grads`` unscaled was edited since, let ``collect`` take it anew."""
        for link in self.links:
            grad = link.model.grad
            if grad is not None and getattr(grad, "_halfstep_unscaled", False) and link.fresh_grad() is not None:
                link.master.grad = None
                grad._halfstep_unscaled = False  # type: ignore[attr-defined]

    def zero_model_grads(self, set_to_none: bool) -> None:
        """Clear the 16-bit gradients of the model."""
        for link in self.links:
            link.reduced = None
            if set_to_none:
                link.clear_grad()
            elif link.model.grad is not None:
                if link.model.grad.grad_fn is not None:
                    link.model.grad.detach_()  # not always: a view of a DistributedDataParallel bucket refuses it
                link.model.grad.requires_grad_(False).zero_()
                link.mark_collected()


def _collect_sparse(
    link: MasterLink, grad: torch.Tensor, inv_scale: torch.Tensor | None, found_inf: torch.Tensor
) -> None:
    """Coalesce in fp32, where duplicates of an index cannot overflow, then unscale the values."""
    wide = grad.float().coalesce()
    if inv_scale is not None:
        values = [wide._values()]
        eager.unscale_(Plan(values), values, inv_scale, found_inf)
    link.master.grad = wide if link.master.grad is None else link.master.grad + wide
