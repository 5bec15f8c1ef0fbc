"""Every row of the table of ops, asked by all who cast: eager op casting, a captured graph, a model without lists
whose op torch has refused, and one that is recorded. There is one answer."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from halfstep.casting import current
from halfstep.casting.graph.cast_pass import cast_graph
from halfstep.casting.graph.emulated_products import canonical_name
from halfstep.casting.scope import OpCasting
from halfstep.core.oplists import OpLists
from halfstep.core.oplists.dtypes import ANY, FLOAT, HALF, dtypes, refused_row
from halfstep.core.oplists.tables import OPS
from tests.casting.test_listed_ops import HAS_FP32_WEIGHTS, NO_CALL, TRUTH_VALUES, call_of, kinds, slots

DTYPES = {HALF: torch.bfloat16, FLOAT: torch.float32}
LISTED = {name: op for name, op in OPS.items() if op.list not in ("free", "banned")}
CALLED = {name for name in LISTED if name[0] != "_"} - NO_CALL.keys() - TRUTH_VALUES - HAS_FP32_WEIGHTS
DTYPE_IS_ANOTHER = {"float_power", "nuclear_norm"}  # float64; torch.norm(p="nuc"), whose row says norm
GIVEN = pytest.mark.parametrize("given", [[HALF], [FLOAT], [HALF, FLOAT], [FLOAT, HALF]], ids=" ".join)


def result_of(name: str, given: list[str], *, enabled: bool | None) -> set[torch.dtype] | str:
    """The dtypes of the result under O1, in a model without lists, or of torch alone; its error if it refuses."""
    shapes, call = call_of(name)
    tensors = slots(shapes, [DTYPES[each] for each in given])
    try:
        with OpCasting(torch.bfloat16, enabled=bool(enabled), meets=enabled is not None, emulate=False):
            return kinds(call(*tensors))
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@GIVEN
@pytest.mark.parametrize("name", sorted(CALLED - DTYPE_IS_ANOTHER))
def test_all_who_cast_give_one_answer(name: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = given[: len(call_of(name)[0])]
    assert result_of(name, given, enabled=True) == {DTYPES[dtypes(OPS[name], given)[1]]}
    found = result_of(name, given, enabled=False)
    if isinstance(result_of(name, given, enabled=None), str):
        assert found == {DTYPES[dtypes(refused_row(OPS[name], False), given)[1]]}
    monkeypatch.setattr(current, "is_recorded", lambda: True)
    assert result_of(name, given, enabled=False) == found


@GIVEN
@pytest.mark.parametrize("level", ["O1", "O2", "O2!promote", "OD", "O1+exp-linear~sum^mm"])
def test_a_captured_graph_gives_the_same_answer(level: str, given: list[str]) -> None:
    graph, lists = fx.Graph(), OpLists.parse(level)
    inputs = [graph.placeholder(f"x{i}") for i, _ in enumerate(given)]
    packets = [packet for name in LISTED if (packet := getattr(torch.ops.aten, name, None))]
    nodes = [graph.call_function(getattr(packet, packet.overloads()[0]), tuple(inputs)) for packet in packets]
    for node, precision in [*zip(inputs, given, strict=True), *((node, FLOAT) for node in nodes)]:
        node.meta["val"] = torch.empty(1, dtype=DTYPES[precision])
    graph.output(nodes)
    rows = cast_graph(fx.GraphModule({}, graph), lists, torch.bfloat16, emulate=False).rows
    assert len(rows) == len(nodes) > 250
    names = {HALF: "bfloat16", FLOAT: "float32", ANY: "as it is"}
    for node, row in zip(nodes, rows, strict=True):
        reads, gives = dtypes(lists.row(canonical_name(node)), given)
        assert (row.reads, row.gives) == (names[reads], names[gives]), row
