"""The op lists as values: what the name of an op means, which rule it has and why, and lists that are changed."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest
import torch

from halfstep import OpLists, oplists
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError
from halfstep.core.oplists import tables
from halfstep.core.oplists.names import computes, known_names
from halfstep.core.oplists.tables import BANNED, OPS, pairs, words
from halfstep.oplists import RULES, Entry, entries, resolve

# ---- names


SPELLINGS = pairs("""
    softmax=softmax aten::softmax=softmax aten::softmax.int=softmax aten::add_.Tensor=add F.softmax=softmax
    torch.F.softmax=softmax torch.Tensor.add_=add torch.linalg.norm=linalg_norm linalg.norm=linalg_norm
    torch.fft.rfft=fft_rfft torch.special.expm1=expm1 torch.special.erfcx=special_erfcx __matmul__=matmul __iadd__=add
    __rsub__=sub true_divide=div concat=cat arccos_=acos reduce_sum=sum elementwise_add=add
    """)


@pytest.mark.parametrize("name", [*SPELLINGS, "  softmax "])
def test_a_name_may_be_written_in_many_ways(name: str) -> None:
    assert resolve(name) == (SPELLINGS[name.strip()],)


def test_a_name_of_paddle_may_stand_for_several_ops() -> None:
    assert resolve("pool2d") == ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
    assert resolve("max_pool2d_with_index") == resolve("max_pool2d_with_indices") == ("max_pool2d",)


ZOO = """
    reduce_sum reduce_mean elementwise_div elementwise_add c_softmax_with_cross_entropy softmax_with_cross_entropy
    lookup_table lookup_table_v2 c_embedding flash_attn flash_attn_npu matmul matmul_v2 fused_gemm_epilogue
    fused_attention fused_feedforward flatten_contiguous_range greater_than bilinear_interp bilinear_interp_v2
    nearest_interp_v2 sin cos cast set_value tril_triu batch_norm sync_batch_norm softmax layer_norm transpose2
    concat gather conv2d_transpose assign fill_constant tile one_hot_v2 expand_as_v2 fused_linear fused_rms_norm
    swiglu strided_slice gather_nd fake_quantize_dequantize_abs_max fake_quantize_dequantize_moving_average_abs_max
    fused_rotary_position_embedding fused_bn_add_activation fused_multi_transformer soft_relu rank c_identity
    c_concat all_reduce get_tensor_from_selected_rows uniform_random_batch_size_like scale arg_max pool2d c_split
    c_allreduce_sum mp_allreduce_sum all_gather reduce_scatter send_v2 isinf_v2 logsigmoid as_complex as_real
    flashmask_attention eigh lrn
    """
"""Names in the lists of PaddleClas, PaddleOCR, PaddleSeg, PaddleNLP, PaddleFleetX and ERNIE, and in Paddle's own."""


@pytest.mark.parametrize("name", ZOO.split())
def test_names_in_lists_of_paddles_model_zoos(name: str) -> None:
    assert set(resolve(name)) <= known_names()
    lists = OpLists.custom(black=[name])
    assert all(lists.rule_of(op) == "float" for op in resolve(name))


def test_an_op_that_is_given_its_dtype_has_nothing_to_be_cast() -> None:
    assert resolve("cast") == resolve("set_value") == ()
    assert OpLists.default().rule("cast") == "free"
    assert entries(["cast"]) == []
    assert resolve("tril_triu") == ("tril", "triu")


FUNCTIONS = pairs("""
    torch.softmax=softmax torch.Tensor.softmax=softmax F.softmax=softmax torch.Tensor.__matmul__=matmul
    torch.Tensor.mul_=mul operator.add=add operator.itruediv=div torch.linalg.norm=linalg_norm torch.fft.rfft=fft_rfft
    torch.special.expm1=expm1 torch.ops.aten.softmax=softmax torch.ops.aten.softmax.int=softmax
    F.grouped_mm=grouped_mm torch._grouped_mm=grouped_mm torch.arctan2=atan2 torch.row_stack=vstack
    """)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_torch_is_its_op(function: str) -> None:
    assert resolve(eval(function, {"torch": torch, "F": torch.nn.functional, "operator": operator})) == (
        FUNCTIONS[function],
    )


class NotHashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("sofmax", ArgumentValueError, r"'sofmax' is not an op of torch or Paddle\. Did you mean 'softmax'"),
        ("qqqqqqqqq", ArgumentValueError, r"'qqqqqqqqq' is not an op of torch or Paddle\. Write it as in torch"),
        ("roi_align", ArgumentValueError, r"is an op of torchvision, .*\(torchvision\.ops, 'roi_align'\)"),
        ("aten::no_such_op.int", ArgumentValueError, "'aten::no_such_op.int' is not an op"),
        (len, ArgumentValueError, r"is not an op of torch; to cast your own functions, use amp\.half_function"),
        (NotHashable(), ArgumentValueError, "NotHashable object .* is not an op of torch"),
        (3, ArgumentTypeError, "op must be a name or a torch function, not 3"),
    ],
    ids=["misspelled", "like nothing", "of torchvision", "not in ATen", "another function", "not hashable", "a number"],
)
def test_what_is_no_op_is_refused(wrong: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(wrong)
    with pytest.raises(error):
        OpLists.default().rule(wrong)


# ---- what computes


def test_views_factories_and_conversions_do_not_compute() -> None:
    assert all(map(computes, words("exp add softmax bmm linalg_norm sort")))
    assert not any(map(computes, words("view transpose empty_like to_sparse is_nonzero _cast_Float no_such_op ones")))


# ---- rules


RULED = pairs("""
    O1/torch.matmul=half,matrix-unit O1/exp=float,exp-range O1/torch.add=promote, O1/torch.cat=sequence-promote,
    O1/binary_cross_entropy=banned,overflow O1/relu=free, O2/exp=free, O2/mse_loss=promote,
    O2/binary_cross_entropy=float,loss O2!promote/exp=half,default O2!promote/view=free, OD/exp=float,exp-range
    OD/relu=float,default OD/linear=half,matrix-unit OD/view=free, native/matmul=free, O1+exp-matmul/exp=half,custom
    O1+exp-matmul/matmul=float,custom O1~exp/exp=free,custom O1~matmul/matmul=free,custom OD~matmul/matmul=free,custom
    O1~binary_cross_entropy/binary_cross_entropy=free,custom O2^mm/mm=wide,custom
    """)


@pytest.mark.parametrize("asked", RULED)
def test_an_op_has_a_rule_and_a_reason(asked: str) -> None:
    text, op = asked.split("/")
    lists, (rule, reason) = OpLists.parse(text), RULED[asked].split(",")
    (name,) = resolve(op)
    (entry,) = entries([op], lists=lists)
    assert lists.rule(op) == rule == entry.rule
    assert (entry.op, entry.reason) == (name, reason)
    assert lists.reason(name) == reason


def test_a_name_for_ops_of_different_rules_has_none() -> None:
    lists = OpLists.custom(black=["max_pool2d"])
    assert lists.rule("max_pool2d") == "float"
    with pytest.raises(ArgumentValueError, match=r"'pool2d' means .*max_pool2d.*, which have different rules"):
        lists.rule("pool2d")


# ---- the table


FACTS = pairs("""
    kind=,product,convolution,attention,recurrent reads=one,any,first,half-first,moves in_place=one,any,moves
    result=read,given kernels=all,one,wrong,none inside=,product
    """)


def test_a_row_has_known_facts_and_a_name_of_torch_and_is_there_once() -> None:
    for op in OPS.values():
        assert all(getattr(op, fact) in values.split(",") for fact, values in FACTS.items()), op
        assert {op.list, op.cpu, op.cuda} <= RULES.keys(), op
        assert op.name in known_names() or op.result == "given", op
        assert bool(op.reason) == (op.list in ("half", "float", "banned")), op
    names = re.findall(r"^(\w+)", Path(tables.__file__).with_name("ops.txt").read_text(), re.MULTILINE)
    assert len(names) == len(set(names)) == len(OPS)


# ---- tables to read


def test_entries_show_every_public_op_on_a_list_in_the_order_of_the_rules() -> None:
    found = entries()
    assert {entry.op for entry in found} == {op.name for op in OPS.values() if op.list != "free" and op.name[0] != "_"}
    order = [list(RULES).index(entry.rule) for entry in found]
    assert order == sorted(order)
    assert {entry.op for entry in found if entry.rule == "banned"} == set(BANNED)
    assert all(entry.op in known_names() for entry in found)


def test_entries_show_what_the_user_moved() -> None:
    lists = OpLists.custom(["relu"], ["tril"])
    assert {"relu", "tril"}.isdisjoint(entry.op for entry in entries())
    found = [entry for entry in entries(lists=lists) if entry.reason == "custom"]
    assert found == [Entry("relu", "half", "custom", "free"), Entry("tril", "float", "custom", "free")]


def test_entries_of_some_ops_keep_their_order_and_compare_with_a_device() -> None:
    asked = ["softmax", torch.matmul, "relu"]
    found = [(entry.op, entry.rule, entry.native) for entry in entries(asked, device="cuda")]
    assert found == [("softmax", "float", "float"), ("matmul", "half", "half"), ("relu", "free", "free")]
    on = {device: entries(["layer_norm"], device=device)[0].native for device in ("cpu", "cuda", "mars")}
    assert on["mars"] == "free"
    assert on["cuda"] == "float"


# ---- lists as values


def test_lists_are_changed_by_making_others() -> None:
    lists = OpLists.custom(["gelu"], level="O2")
    other = lists.replace(promote=False, black=("exp",))
    assert (lists.promote, lists.black) == (True, ())
    assert other == OpLists.custom(["gelu"], ["exp"], level="O2", use_promote=False)
    assert str(other) == "O2!promote+gelu-exp"
    assert lists.replace() == lists


@pytest.mark.parametrize("text", ["O1", "O2!promote", "OD+gelu", "O1+exp+gelu-linear-matmul~cat~sum^bmm^mm", "native"])
def test_lists_are_printed_and_parsed(text: str) -> None:
    assert str(OpLists.parse(f" {text} ")) == text


def test_no_list_is_an_empty_list() -> None:
    assert OpLists.custom(None, None) == OpLists.default() == OpLists()


def test_the_public_module_offers_the_same() -> None:
    assert oplists.OpLists is OpLists
    assert all(getattr(oplists, name) is not None for name in oplists.__all__)
