"""Casts in a captured graph: eager mode's op lists decide about each op, and a minimum cut places the casts."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...core.dtypes import dtype_name
from ...core.oplists import OpLists
from ...core.oplists.dtypes import ANY, FLOAT, HALF, dtypes, needs_fp32, numbers_kind
from ...core.oplists.tables import Op, words
from ...torch_internals.compiler_compat import codegen_of
from ..emulation import Emulate
from ..rules import CASTABLE
from .emulated_products import canonical_name, emulate_products, op_name
from .grouped_casts import cast_together
from .min_cut import fewest_casts

__all__ = ["GUARD", "CastGraph", "CastNode", "cast_graph"]

GUARD = "halfstep_fp16_guard"
"""The key under which ``fp16_guard`` marks nodes."""

_CASTS = words("to _to_copy type_as")
_SMALL = 2**14  # elements


@dataclass(frozen=True)
class CastNode:
    """The outcome for one op: its name, the dtypes of its inputs and its result, and the rule that decided."""

    name: str
    op: str
    reads: str
    gives: str
    rule: str


@dataclass
class CastGraph:
    """A graph with casts.

    Attributes:
        module: the graph module, which shares parameters and buffers with the original module.
        rows: an entry per op on floating tensors.
        casts_before: the count of casts that ``torch.autocast`` makes: one per input, and one per parameter in all.
        casts_after: the count of casts in the graph; the multi-tensor cast of parameters counts as one.
        half_params: the names of parameters that the graph expects in 16 bits.
    """

    module: fx.GraphModule
    rows: list[CastNode] = field(default_factory=list)
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
) -> CastGraph:
    """Insert casts into a copy of a graph of aten ops.

    Args:
        module: the graph, with ``meta["val"]`` on its nodes; not changed.
        lists: the op lists, which choose the precision of each op.
        half: the 16-bit dtype.
        guarded: compute in 16 bits only the nodes that were captured in ``fp16_guard``.
        outside: expect parameters in 16 bits if the graph reads them in 16 bits only; the caller casts them.
        black_values: names of nodes that compute in fp32 regardless of the lists.
        together: cast parameters of at most this many elements in one multi-tensor call at the start. None means all
            parameters on CUDA, where it saves launches, and small parameters on a CPU, where a large weight that is
            cast just before an op reads it is still in the cache.
        emulate: the devices on which 16-bit products run in fp32 kernels; see ``casting.emulation``.
        opaque: the argument of ``emulation.narrow``; a graph that goes to Inductor without Dynamo needs True.
    """
    if together is None:
        together = sys.maxsize if any(param.is_cuda for param in module.parameters()) else _SMALL
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(codegen_of(module.graph))
    made = _CastPass(fx.GraphModule(module, graph), lists, half, guarded, black_values, together)
    return made.run(outside, emulate, opaque)


@dataclass
class _CastPass:
    """The pass over one graph: choose the dtypes that each op reads and gives, then insert the casts."""

    module: fx.GraphModule
    lists: OpLists
    half: torch.dtype
    guarded: bool
    black_values: frozenset[str]
    together: int
    label: dict[fx.Node, str] = field(default_factory=dict)  # the precision of each floating value
    demand: dict[tuple[fx.Node, fx.Node], str] = field(default_factory=dict)  # (value, reader) -> precision it reads
    rule: dict[fx.Node, str] = field(default_factory=dict)  # the rule that decided about each op
    moves: set[fx.Node] = field(default_factory=set)  # ops that only move data
    casts: set[fx.Node] = field(default_factory=set)  # the inserted casts

    def run(self, outside: bool, emulate: Emulate, opaque: bool | None) -> CastGraph:
        self.graph = self.module.graph
        self.casting = CastGraph(self.module)
        for node in list(self.graph.nodes):
            if op_name(node) == "_assert_tensor_metadata":
                self.graph.erase_node(node)
        self._classify(frozenset())
        if outside:
            params = [n for n in self.graph.nodes if self._is_param(n)]
            fit = {n for n in params if {self.demand.get((n, reader)) for reader in n.users} == {HALF}}
            self.casting.half_params = frozenset(str(node.target) for node in fit)
            self._classify(self.casting.half_params)
        self._count_eager()
        self._choose()
        self._insert()
        halves = [node for node in self.graph.nodes if self.label.get(node) == HALF]
        wides = [node for node, rule in self.rule.items() if rule == "wide (custom)"]
        emulate_products(self.graph, halves, wides, self.casts.union(self.label), self.half, emulate, opaque)
        self.graph.lint()
        self.module.recompile()
        return self.casting

    # ---- which op in which dtype

    def _classify(self, half_params: frozenset[str]) -> None:
        self.label.clear()
        self.demand.clear()
        self.moves.clear()
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._classify_call(node, [source for source in node.all_input_nodes if source in self.label])
            elif node.op in ("placeholder", "get_attr") and _floating(node):
                self.label[node] = HALF if str(node.target) in half_params else _precision(node)

    def _classify_call(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        name = op_name(node)
        if node.target is operator.getitem:
            if inputs:
                self.label[node] = self.label[inputs[0]]
            return
        self.rule[node] = "free"
        if not (_floating(node) or _several(node)):
            return
        if not inputs:
            self.label[node] = _precision(node)
            return
        if name in _CASTS or any(isinstance(each, torch.dtype) for each in (*node.args, node.kwargs.get("dtype"))):
            self.rule[node] = "asked for"
            in_fp32 = _several(node) or _val(node).dtype is torch.float32
            self._set(node, inputs, FLOAT if in_fp32 else HALF, ANY)
            return
        in_place = _in_place(name)
        op, self.rule[node] = self._row_of(node)
        kind = not in_place and numbers_kind(op)
        if kind and needs_fp32(kind, self.half, *fx.map_arg((node.args, node.kwargs), _val), _val(node)):
            op, self.rule[node] = op._replace(list="float"), "numbers that 16 bits do not have"
        reads, result = dtypes(op, [self.label[source] for source in inputs], in_place)
        if in_place:
            self.rule[node] = "in place"
        elif op.reads == "moves" and op.list == "free" and len(inputs) == 1:
            reads = result
            self.moves.add(node)
        self._set(node, inputs, result, reads)

    def _row_of(self, node: fx.Node) -> tuple[Op, str]:
        """Return the op's row as it applies to a node, and the rule that decides about the node."""
        op = self.lists.row(canonical_name(node))
        if op.reads == "moves" and op.list == "free":
            return op, "free"
        if node.name in self.black_values:
            return op._replace(list="float"), "black value"
        if self.guarded and not (node.meta.get("custom") or {}).get(GUARD):
            return op._replace(list="float"), "outside guard"
        return op, f"{op.list} ({op.reason})" if op.reason else op.list

    def _set(self, node: fx.Node, inputs: list[fx.Node], label: str, demand: str) -> None:
        self.label[node] = label
        for source in inputs:
            self.demand[source, node] = demand

    def _is_param(self, node: fx.Node) -> bool:
        if node.op != "get_attr" or node not in self.label:
            return False
        return isinstance(operator.attrgetter(str(node.target))(self.module), torch.nn.Parameter)

    def _count_eager(self) -> None:
        once: set[fx.Node] = set()
        for (source, reader), wanted in self.demand.items():
            if wanted != ANY and reader not in self.moves and self.label[source] != wanted and source not in once:
                self.casting.casts_before += 1
                if source.op == "get_attr":
                    once.add(source)

    # ---- where the casts go

    def _choose(self) -> None:
        """Choose dtypes for ops that only move data so that casts are fewest."""
        if "in place" in self.rule.values():
            return  # a cast copies, so that a write through a view would miss the tensor behind the view
        free = {node for node in self.moves if not self._must_stay(node)}
        readers: dict[Any, list[Any]] = {}
        for (source, reader), wanted in self.demand.items():
            if wanted != ANY:
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
        """True if fp32 values pass through a node to a reader of fp32, so that the node must not round them.

        An output of the graph keeps the dtype that it has without casts.
        """
        if any(reader.op == "output" for reader in node.users):
            return True
        source = node
        while source in self.moves:
            source = next(s for s in source.all_input_nodes if s in self.label)
        if self.label[source] == HALF:
            return False
        waiting = list(node.users)
        while waiting:
            reader = waiting.pop()
            if reader in self.moves:
                waiting.extend(reader.users)
            elif HALF not in {self.demand.get((source, reader)) for source in reader.all_input_nodes}:
                return True
        return False

    def _insert(self) -> None:
        made = self._cast_parameters()
        params = dict(made)
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            name = op_name(node)
            if node in self.rule and node in self.label:
                self._row(node, name)
            replaced: dict[fx.Node, fx.Node] = {}
            for source in node.all_input_nodes:
                wanted = self.demand.get((source, node), ANY)
                if wanted != ANY and self.label[source] != wanted:
                    replaced[source] = self._as(source, wanted, node, made)
            for source, cast in replaced.items():
                node.replace_input_with(source, cast)
            if _in_place(name):
                made = dict(params)  # the op has changed a value, so that earlier casts of it are stale

    def _cast_parameters(self) -> dict[tuple[fx.Node, str], fx.Node]:
        """Insert one multi-tensor cast of the parameters that ops read in 16 bits, and return its results."""
        params = [
            node
            for node in self.graph.nodes
            if self._is_param(node) and self.label[node] == FLOAT and _val(node).numel() <= self.together
            if HALF in {self.demand.get((node, reader)) for reader in node.users}
        ]
        if not params:
            return {}
        with self.graph.inserting_after(params[-1]):
            together = self.graph.call_function(cast_together, (self.half, *params))
        made = {}
        with self.graph.inserting_after(together):
            for i, param in reversed(list(enumerate(params))):
                made[param, HALF] = self.graph.call_function(operator.getitem, (together, i))
        self.casts.update(made.values())
        self.casting.casts_after += 1
        return made

    def _as(self, source: fx.Node, wanted: str, before: fx.Node, made: dict[tuple[fx.Node, str], fx.Node]) -> fx.Node:
        """Return a value in a precision, cast once for all readers; a value cast from 16 bits returns its origin."""
        if op_name(source) in _CASTS and wanted == HALF:
            origin = next((s for s in source.all_input_nodes if s in self.label), None)
            if origin is not None and self.label[origin] == HALF:
                return origin
        if (source, wanted) not in made:
            dtype = self.half if wanted == HALF else torch.float32
            with self.graph.inserting_before(before):
                cast = self.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
            made[source, wanted] = cast
            self.casts.add(cast)
            self.casting.casts_after += 1
        return made[source, wanted]

    def _row(self, node: fx.Node, name: str) -> None:
        reads = {self.demand.get((s, node), ANY) for s in node.all_input_nodes if (s, node) in self.demand}
        wanted = next(iter(reads)) if len(reads) == 1 else ANY
        names = {HALF: dtype_name(self.half), FLOAT: "float32", ANY: "as it is"}
        self.casting.rows.append(CastNode(node.name, name, names[wanted], names[self.label[node]], self.rule[node]))


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _floating(node: fx.Node) -> bool:
    return isinstance(value := _val(node), torch.Tensor) and value.dtype in CASTABLE


def _precision(node: fx.Node) -> str:
    return HALF if _val(node).dtype in (torch.float16, torch.bfloat16) else FLOAT


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _several(node: fx.Node) -> bool:
    """True for an op with several results, which ``getitem`` nodes separate."""
    return any(user.target is operator.getitem and _floating(user) for user in node.users)
