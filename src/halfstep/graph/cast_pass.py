"""Casts in a captured graph: ops classified by the same op lists as eager, and as few casts as that allows."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..casting.emulation import Emulate, emulated_kinds, narrow, widen
from ..core.dtypes import dtype_name
from ..core.oplists import OpLists
from ..core.oplists.tables import CLASS_OF, FOLLOWS_FIRST, MOVEMENT, SELF_PROMOTING, words
from .grouped_casts import cast_together
from .min_cut import fewest_casts

__all__ = ["GUARD", "Casting", "Row", "cast_graph"]

GUARD = "halfstep_fp16_guard"
"""The key under which ``fp16_guard`` marks nodes."""

_CASTS = words("to _to_copy type_as")
_NAMES = {"cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss"}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SMALL = 2**14  # elements
_HALF, _FLOAT, _ANY = "half", "float", "any"


@dataclass(frozen=True)
class Row:
    """What became of one op: ``op``, dtypes of what it reads and gives, and the rule that decided."""

    name: str
    op: str
    reads: str
    gives: str
    rule: str


@dataclass
class Casting:
    """A graph with casts.

    Attributes:
        module: the graph module; parameters and buffers are those of the one it was made from.
        rows: an entry for each op on floating tensors.
        casts_before: how many casts ``torch.autocast`` makes on the way: one for each input, parameters once.
        casts_after: how many there are; that of parameters together is one.
        half_params: names of parameters that are expected in 16 bits.
    """

    module: fx.GraphModule
    rows: list[Row] = field(default_factory=list)
    casts_before: int = 0
    casts_after: int = 0
    half_params: frozenset[str] = frozenset()


def cast_graph(
    module: fx.GraphModule,
    lists: OpLists,
    half: torch.dtype,
    *,
    guarded: bool = False,
    outside: bool = False,
    black_values: frozenset[str] = frozenset(),
    together: int | None = None,
    emulate: Emulate = "auto",
    opaque: bool | None = None,
) -> Casting:
    """Put casts into a copy of a graph of aten ops.

    Args:
        module: with ``meta["val"]`` on its nodes; stays as it is.
        lists: which op computes in which precision.
        half: the 16-bit dtype.
        guarded: only what was captured inside ``fp16_guard`` may be 16-bit.
        outside: parameters that are read in 16 bits only will be 16-bit themselves.
        black_values: names of nodes that compute in fp32 whatever the lists say.
        together: cast parameters of up to so many elements in one multi-tensor call at the start. None means all on
            CUDA, where it saves launches, and small ones on a CPU: a large weight that is cast just before it is read
            is still in the cache then.
        emulate: where 16-bit products run in fp32 kernels; see ``casting.emulation``.
        opaque: as of ``emulation.narrow``; a graph that goes to Inductor without Dynamo needs True.
    """
    if together is None:
        together = sys.maxsize if any(param.is_cuda for param in module.parameters()) else _SMALL
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    graph._codegen = module.graph._codegen
    casts = _Pass(fx.GraphModule(module, graph), lists, half, guarded, outside, black_values, together)
    return casts.run(emulate, opaque)


class _Pass:
    def __init__(
        self,
        module: fx.GraphModule,
        lists: OpLists,
        half: torch.dtype,
        guarded: bool,
        outside: bool,
        black_values: frozenset[str],
        together: int,
    ) -> None:
        self.module, self.graph = module, module.graph
        self.lists, self.half, self.guarded, self.outside = lists, half, guarded, outside
        self.black_values, self.together = black_values, together
        self.label: dict[fx.Node, str] = {}
        self.demand: dict[tuple[fx.Node, fx.Node], str] = {}  # (value, reader) -> dtype it is read in
        self.rule: dict[fx.Node, str] = {}
        self.moves: set[fx.Node] = set()
        self.casts: set[fx.Node] = set()
        self.casting = Casting(module)

    def run(self, emulate: Emulate, opaque: bool | None) -> Casting:
        for node in list(self.graph.nodes):
            if _op(node) == "_assert_tensor_metadata":
                self.graph.erase_node(node)
        self._classify(frozenset())
        if self.outside:
            params = [n for n in self.graph.nodes if self._is_param(n)]
            fit = {n for n in params if {self.demand.get((n, reader)) for reader in n.users} == {_HALF}}
            self.casting.half_params = frozenset(str(node.target) for node in fit)
            self._classify(self.casting.half_params)
        self._count_eager()
        self._choose()
        self._insert()
        self._emulate(emulate, opaque)
        self.graph.lint()
        self.module.recompile()
        return self.casting

    # ---- which op in which dtype

    def _classify(self, half_params: frozenset[str]) -> None:
        self.label.clear()
        self.demand.clear()
        self.moves.clear()
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if _floating(node):
                    mine = _val(node).dtype in (torch.float16, torch.bfloat16) or str(node.target) in half_params
                    self.label[node] = _HALF if mine else _FLOAT
            elif node.op == "call_function":
                self._classify_call(node)

    def _classify_call(self, node: fx.Node) -> None:
        inputs = [source for source in node.all_input_nodes if source in self.label]
        name = _op(node)
        if node.target is operator.getitem:
            if inputs:
                self.label[node] = self.label[inputs[0]]
            return
        floating = _floating(node) or _several(node)
        self.rule[node] = "free"
        if not inputs or not floating:
            if floating:
                self.label[node] = _HALF if _val(node).dtype in (torch.float16, torch.bfloat16) else _FLOAT
            return
        followed = self.label[inputs[0]]
        if name in _CASTS or _asks_for_dtype(node):
            self.rule[node] = "asked for"
            dtype = _val(node).dtype if not _several(node) else torch.float32
            self._set(node, inputs, _FLOAT if dtype is torch.float32 else _HALF, _ANY)
        elif name.endswith("_") and not name.endswith("__"):
            self.rule[node] = "in place"
            self._set(node, inputs, followed, _ANY)
        elif name in MOVEMENT and len(inputs) == 1:
            self.moves.add(node)
            self._set(node, inputs, followed, followed)
        else:
            rule = self._rule(node, name)
            self.rule[node] = rule
            if rule == "half":
                self._set(node, inputs, _HALF, _HALF)
            elif rule in ("float", "banned", "outside guard", "black value"):
                self._set(node, inputs, _FLOAT, _FLOAT)
            elif name in FOLLOWS_FIRST:
                self._set(node, inputs, followed, _ANY)
            else:
                widest = _FLOAT if _FLOAT in {self.label[source] for source in inputs} else _HALF
                self._set(node, inputs, widest, _ANY if name in SELF_PROMOTING else widest)

    def _rule(self, node: fx.Node, name: str) -> str:
        if node.name in self.black_values:
            return "black value"
        if self.guarded and not (node.meta.get("custom") or {}).get(GUARD):
            return "outside guard"
        return self.lists.rule_of(_NAMES.get(name, name))

    def _set(self, node: fx.Node, inputs: list[fx.Node], label: str, demand: str) -> None:
        self.label[node] = label
        for source in inputs:
            self.demand[source, node] = demand

    def _is_param(self, node: fx.Node) -> bool:
        return (
            node.op == "get_attr"
            and node in self.label
            and isinstance(_attribute(self.module, node), torch.nn.Parameter)
        )

    def _count_eager(self) -> None:
        once: set[fx.Node] = set()
        for (source, reader), wanted in self.demand.items():
            if wanted != _ANY and reader not in self.moves and self.label[source] != wanted and source not in once:
                self.casting.casts_before += 1
                if source.op == "get_attr":
                    once.add(source)

    # ---- where the casts go

    def _choose(self) -> None:
        """Let ops that only move numbers have the dtype with which casts are fewest."""
        if "in place" in self.rule.values():
            return  # a cast between a tensor and its view would part them, and one of them is written to
        free = {node for node in self.moves if not self._must_stay(node)}
        readers: dict[Any, list[Any]] = {}
        for (source, reader), wanted in self.demand.items():
            if wanted != _ANY:
                readers.setdefault(source, []).append(
                    reader if reader in free else self.label[reader] if reader in self.moves else wanted
                )
        fixed: dict[Any, str] = {node: label for node, label in self.label.items() if node not in free}
        near = {n for n in readers if n in free or any(r in free for r in readers[n])}
        chosen: dict[Any, str] = fewest_casts(free, fixed, {node: readers[node] for node in near})
        self.label.update(chosen)
        for source, reader in list(self.demand):
            if reader in free:
                self.demand[source, reader] = self.label[reader]

    def _must_stay(self, node: fx.Node) -> bool:
        """Whether fp32 numbers go through it to somebody who reads fp32: they may not be rounded on the way.

        What the graph gives keeps the dtype it has without casts.
        """
        if any(reader.op == "output" for reader in node.users):
            return True
        source = node
        while source in self.moves:
            source = next(s for s in source.all_input_nodes if s in self.label)
        if self.label[source] == _HALF:
            return False
        waiting = list(node.users)
        while waiting:
            reader = waiting.pop()
            if reader in self.moves:
                waiting.extend(reader.users)
            elif _HALF not in {self.demand.get((source, reader)) for source in reader.all_input_nodes}:
                return True
        return False

    def _insert(self) -> None:
        made = self._cast_parameters()
        params = dict(made)
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            name = _op(node)
            if node in self.rule and node in self.label:
                self._row(node, name)
            replaced: dict[fx.Node, fx.Node] = {}
            for source in node.all_input_nodes:
                wanted = self.demand.get((source, node), _ANY)
                if wanted != _ANY and self.label[source] != wanted:
                    replaced[source] = self._as(source, wanted, node, made)
            for source, cast in replaced.items():
                node.replace_input_with(source, cast)
            if name.endswith("_") and not name.endswith("__"):
                made = dict(params)  # what was cast before is not what is there now

    def _cast_parameters(self) -> dict[tuple[fx.Node, str], fx.Node]:
        """Parameters that are read in 16 bits, in one multi-tensor cast."""
        params = [
            node
            for node in self.graph.nodes
            if self._is_param(node) and self.label[node] == _FLOAT and _val(node).numel() <= self.together
            if _HALF in {self.demand.get((node, reader)) for reader in node.users}
        ]
        if not params:
            return {}
        with self.graph.inserting_after(params[-1]):
            together = self.graph.call_function(cast_together, (self.half, *params))
        made = {}
        with self.graph.inserting_after(together):
            for i, param in reversed(list(enumerate(params))):
                made[param, _HALF] = self.graph.call_function(operator.getitem, (together, i))
        self.casts.update(made.values())
        self.casting.casts_after += 1
        return made

    def _as(self, source: fx.Node, wanted: str, before: fx.Node, made: dict[tuple[fx.Node, str], fx.Node]) -> fx.Node:
        """The value in a dtype, cast once for all of its readers; a widened value narrows to what it came from."""
        if _op(source) in _CASTS and wanted == _HALF:
            origin = next((s for s in source.all_input_nodes if s in self.label), None)
            if origin is not None and self.label[origin] == _HALF:
                return origin
        if (source, wanted) not in made:
            dtype = self.half if wanted == _HALF else torch.float32
            with self.graph.inserting_before(before):
                cast = self.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
            made[source, wanted] = cast
            self.casts.add(cast)
            self.casting.casts_after += 1
        return made[source, wanted]

    def _emulate(self, emulate: Emulate, opaque: bool | None) -> None:
        """Run 16-bit products in fp32 kernels where their device has no units for them."""
        wide: dict[fx.Node, fx.Node] = {}
        for node in [node for node in self.graph.nodes if self.label.get(node) == _HALF]:
            kind = CLASS_OF.get(_op(node))
            device = self._device(node)
            if node.op != "call_function" or kind is None or device is None:
                continue
            if (device, self.half, kind) not in emulated_kinds((device,), self.half, emulate):
                continue
            for source in node.all_input_nodes:
                if source in self.label or source in self.casts:
                    if source not in wide:
                        with self.graph.inserting_after(source):
                            wide[source] = self.graph.call_function(widen, (source, opaque))
                    node.replace_input_with(source, wide[source])
            results = [user for user in node.users if user in self.label] if _several(node) else [node]
            for result in results:
                with self.graph.inserting_after(result):
                    rounded = self.graph.call_function(narrow, (result, self.half, opaque))
                self.casts.add(rounded)
                result.replace_all_uses_with(rounded, delete_user_cb=lambda user, made=rounded: user is not made)

    def _device(self, node: fx.Node) -> str | None:
        values = [_val(n) for n in (node, *node.users)]  # of several results each is a user
        return next((value.device.type for value in values if isinstance(value, torch.Tensor)), None)

    def _row(self, node: fx.Node, name: str) -> None:
        reads = {self.demand.get((s, node), _ANY) for s in node.all_input_nodes if (s, node) in self.demand}
        wanted = next(iter(reads)) if len(reads) == 1 else _ANY
        names = {_HALF: dtype_name(self.half), _FLOAT: "float32", _ANY: "as it is"}
        rule = self.rule[node]
        why = self.lists.reason(_NAMES.get(name, name)) if rule in ("half", "float", "banned") else ""
        self.casting.rows.append(
            Row(node.name, name, names[wanted], names[self.label[node]], f"{rule} ({why})" if why else rule)
        )


def _op(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else str(target)


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _floating(node: fx.Node) -> bool:
    value = _val(node)
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATS


def _several(node: fx.Node) -> bool:
    """Whether an op gives several tensors, which getitem takes apart."""
    return any(user.target is operator.getitem and _floating(user) for user in node.users)


def _asks_for_dtype(node: fx.Node) -> bool:
    return isinstance(node.kwargs.get("dtype"), torch.dtype) or any(isinstance(a, torch.dtype) for a in node.args)


def _attribute(module: torch.nn.Module, node: fx.Node) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found
