"""The private names of torch that halfstep uses, in one place and under public names; ``compiler_compat`` has the
names of its compilers.

A private name may change in any release, so a new torch is checked here first; all of these exist in torch 2.13. Some
names with an underscore are contracts of torch with other libraries and are not listed here:
``tests/core/test_torch_compat.py`` has them, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import _safe_softmax as safe_softmax
from torch._C import DisableTorchFunction, FunctionSchema
from torch._C import _current_autograd_node as current_node
from torch._C import _current_graph_task_id as backward_pass_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _dispatch_get_all_op_names as all_op_names
from torch._C import _get_dispatch_mode as builtin_dispatch_mode
from torch._C import _get_dispatch_stack_at as dispatch_mode_at
from torch._C import _get_function_stack_at as function_mode_at
from torch._C import _get_tracing_state as jit_tracing_state
from torch._C import _ImperativeEngine as ImperativeEngine
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _jit_get_schemas_for_operator as schemas_of_op
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count
from torch._C import _pop_torch_dispatch_stack as pop_dispatch_mode
from torch._C import _set_grad_enabled as set_grad_mode
from torch._C import _TorchDispatchModeKey as BuiltinModes
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_hooks
from torch._C._autograd import _saved_tensors_hooks_is_enabled as saved_hooks_allowed  # type: ignore[attr-defined]
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._C._functorch import peek_interpreter_stack as functorch_level
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors
from torch.amp.grad_scaler import OptState
from torch.amp.grad_scaler import _refresh_per_optimizer_state as new_optimizer_state
from torch.autograd import _get_sequence_nr as next_sequence_number  # type: ignore[attr-defined]
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.variable import Variable
from torch.distributions.dirichlet import _Dirichlet as Dirichlet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.parallel.distributed import _find_tensors as outputs_of_wrapper
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

F = TypeVar("F", bound=Callable[..., Any])

AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

__all__ = [
    "C_NAMESPACES",
    "HAS_GRAD_DTYPE",
    "STATE_INIT",
    "STATE_MODULE",
    "AccumulateGrad",
    "BatchNorm",
    "BuiltinModes",
    "DeviceContext",
    "Dirichlet",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "FunctionSchema",
    "ImperativeEngine",
    "InstanceNorm",
    "OpOverload",
    "OpOverloadPacket",
    "OptState",
    "StorageWeakRef",
    "SyncBatchNormFunction",
    "TorchDispatchMode",
    "all_op_names",
    "apply_to_own",
    "backward_pass_id",
    "base_of",
    "buffers_of",
    "builtin_dispatch_mode",
    "children_of",
    "current_node",
    "dispatch_mode_at",
    "dispatch_mode_count",
    "divides_by_initial_world",
    "foreach_unscale_",
    "forget_used_parameters",
    "forward_hooks",
    "found_inf_of",
    "fsdp_has_run",
    "fsdp_params",
    "fsdp_policies",
    "function_mode_at",
    "function_mode_count",
    "functorch_level",
    "fused_adagrad_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "has_comm_hook",
    "has_rebuilt_buckets",
    "has_recording_mode",
    "has_step_hooks",
    "hook_tables",
    "initial_scale",
    "is_any_autocast_enabled",
    "is_fake",
    "is_flattened",
    "is_functorch_wrapped_tensor",
    "is_torchs_mode",
    "is_traceable_wrapper_subclass",
    "is_view",
    "jit_tracing_state",
    "join_facts",
    "module_hooks",
    "new_optimizer_state",
    "next_sequence_number",
    "node_sequence_number",
    "outputs_of_wrapper",
    "parameters_of",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_saved_hooks",
    "profiler_enabled",
    "public_hook",
    "push_function_mode",
    "push_saved_hooks",
    "qualified_name",
    "queue_after_backward",
    "rebuild_buckets",
    "register_comm_hook",
    "register_state_dict_hook",
    "renew_flat_weights",
    "replace_engine",
    "safe_softmax",
    "saved_hooks",
    "saved_hooks_allowed",
    "scale_of",
    "schema_of",
    "schemas_of_op",
    "set_found_inf",
    "set_fsdp_policy",
    "set_grad_mode",
    "step_hooks",
    "storage_of",
    "subclass_over",
    "tensor_hooks",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "unflatten_dense_tensors",
    "update_scale_",
    "values_of",
    "wrap_step",
]

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""True since torch 2.13, in which the gradient of a parameter may have another dtype than the parameter."""

STATE_MODULE = "torch.distributed.checkpoint.state_dict"
STATE_INIT = "_init_optim_state"
"""The name of the function in that module that makes an optimizer create its state."""

C_NAMESPACES: dict[str, Any] = {
    "functions": torch._C._VariableFunctions,
    "nn": torch._C._nn,
    **{name: getattr(torch._C, f"_{name}") for name in ("linalg", "fft", "special")},
}
"""The namespaces of torch's C functions, which its public Python functions call."""

update_scale_: Callable[..., torch.Tensor] = torch._amp_update_scale_
"""``update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)``, in place."""

foreach_unscale_: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""``foreach_unscale_(grads, found_inf, inv_scale)``, in place: multiply, and set ``found_inf`` to 1 for inf or NaN."""

fused_adam_: Callable[..., None] = torch._fused_adam_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_adagrad_: Callable[..., None] = torch._fused_adagrad_
fused_sgd_: Callable[..., None] = torch._fused_sgd_
"""The steps of ``torch.optim`` with ``fused=True``: lists of parameters, gradients, state and step counts."""

children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter("_modules")
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""The tables of a module's own submodules, parameters and buffers. A change of a table changes the module."""

forward_hooks: Callable[[torch.nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
"""The table of a module's hooks after ``forward``, in the order in which they run."""

schema_of: Callable[[Any], FunctionSchema] = attrgetter("_schema")
"""The schema of an op: its name and its arguments, with the arguments that it writes to."""


base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The base tensor of a view; None if autograd does not know the tensor as a view."""

divides_by_initial_world: Callable[[Any], bool] = attrgetter("_divide_by_initial_world_size")
"""True if a wrapper divides gradients by the number of all ranks, including ranks that have run out of inputs."""

subclass_over: Callable[..., Any] = torch.Tensor._make_subclass
"""``subclass_over(cls, tensor, requires_grad)``: make a tensor of another class with the same memory."""


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage of a weak reference; None if it has been freed."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def hook_tables(module: torch.nn.Module) -> list[dict[int, Any]]:
    """List the tables of a module's hooks on ``forward``, on saving and loading, and of these hooks' flags."""
    passes = [module._forward_pre_hooks, module._forward_hooks]
    flags = [
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
    return [*passes, *flags, module._state_dict_hooks, module._load_state_dict_pre_hooks]


def register_state_dict_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Register a state-dict hook that may return another dictionary, which the public function does not allow."""
    module._register_state_dict_hook(hook)


def public_hook(hook: F) -> F:
    """Mark a copied state-dict hook as registered by the public function."""
    hook._from_public_api = True  # type: ignore[attr-defined]
    return hook


def renew_flat_weights(module: torch.nn.RNNBase, args: object = None) -> None:
    """Update a recurrent module's list of weights to its current weights. It is also a forward pre-hook."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def module_hooks(module: torch.nn.Module) -> int:
    """Count the hooks on the passes of a module."""
    backward = module._backward_hooks, module._backward_pre_hooks
    return sum(map(len, (module._forward_hooks, module._forward_pre_hooks, *backward)))


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """List the hooks on the gradient of a leaf."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(tensor._backward_hooks or {}).values(), *(after or {}).values()]


def node_sequence_number(node: Any) -> int:
    """Return the number of a graph node: the value of ``next_sequence_number()`` before the op of the node.

    Leaf nodes, which accumulate gradients, have a number above all other nodes.
    """
    return node._sequence_nr()  # type: ignore[no-any-return]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """List the hooks on the step of an optimizer, without the hooks on all optimizers."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if user code or a library, not halfstep itself, observes the steps of an optimizer by torch's hooks."""
    everywhere = sys.modules["torch.optim.optimizer"]
    hooks = [*everywhere._global_optimizer_pre_hooks.values(), *everywhere._global_optimizer_post_hooks.values()]
    hooks += [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return bool([hook for hook in hooks if not hook.__module__.startswith("halfstep")])


def wrap_step(optimizer: torch.optim.Optimizer) -> None:
    """Wrap the step of an optimizer's class in torch's hooks, unless it is wrapped."""
    optimizer._patch_step_function()


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return the scale of a ``GradScaler`` on the device; None before the first ``scale``."""
    return scaler._get_scale_async()  # type: ignore[no-any-return]


def initial_scale(scaler: Any) -> float:
    """Return the initial scale of a ``GradScaler``."""
    return getattr(scaler, "_init_scale", 0.0)


def found_inf_of(scaler: Any, optimizer: object) -> dict[torch.device, torch.Tensor]:
    """Return the overflow flags of an optimizer in a ``GradScaler``, by device. The dict is the scaler's own."""
    return scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # type: ignore[no-any-return]


def set_found_inf(scaler: Any, optimizer: object, found: dict[Any, Any]) -> None:
    """Set the overflow flags of an optimizer in a ``GradScaler``, by device."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """Return the name of an op with its namespace and without its overload."""
    packet = op._overloadpacket if isinstance(op, OpOverload) else op
    return packet._qualified_op_name


def is_torchs_mode(mode: Any) -> bool:
    """True for a dispatch mode of torch itself, such as FakeTensorMode."""
    return getattr(mode, "_mode_key", None) is not None


def has_recording_mode() -> bool:
    """True if a dispatch mode may record ops. The modes of ``numerics`` only watch them."""
    modes = (dispatch_mode_at(i) for i in range(dispatch_mode_count()))
    return any(not getattr(mode, "only_watches", False) for mode in modes)


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd knows a tensor as a view."""
    return tensor._is_view()


def replace_engine(replace: Callable[[Any], Any]) -> None:
    """Let backward passes that Python begins go through the engine that a function returns for the present one."""
    Variable._execution_engine = replace(Variable._execution_engine)


def saved_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost pack and unpack hooks on saved tensors; None if there are none."""
    return _top_saved_tensors_default_hooks(False)


def values_of(sparse: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor without a copy, coalesced or not."""
    return sparse._values()


def has_comm_hook(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """True if user code registered a communication hook. Only torch's log has its built-in hooks."""
    return bool(wrapper._comm_hooks or wrapper._get_ddp_logging_data().get("comm_hook"))


def register_comm_hook(wrapper: torch.nn.parallel.DistributedDataParallel, state: Any, hook: Any) -> None:
    """Register a communication hook, and remove it from the wrapper's list of hooks.

    Torch copies and pickles that list, but not the hooks in its reducer, and the state of this hook cannot be pickled.
    """
    wrapper.register_comm_hook(state, hook)
    wrapper._comm_hooks.pop()


def join_facts(wrapper: torch.nn.parallel.DistributedDataParallel) -> tuple[bool, int | None]:
    """Return True if the latest ``wrapper.join()`` was enabled, and the rank whose weights all ranks got at its end.

    Both outlast the context: torch continues to count the active ranks, to divide gradients by (torch 2.13).
    """
    return bool(wrapper._join_config.enable), getattr(wrapper, "_authoritative_rank", None)


def is_flattened(param: torch.Tensor) -> bool:
    """True if ``FullyShardedDataParallel`` (FSDP1) moved a parameter into a flat one, or for a flat parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))


def has_rebuilt_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> bool:
    """True if DDP has rebuilt its buckets, which happens once."""
    return bool(wrapper._has_rebuilt_buckets)


def rebuild_buckets(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Make ranks agree, once, after a synced backward pass, on buckets in the order in which gradients arrived.

    torch does this in the next forward pass, and waits there forever for a rank without such a pass (torch 2.13).
    """
    reducer = getattr(wrapper, "reducer", None)
    if reducer is not None and not wrapper._use_python_reducer and reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True


def forget_used_parameters(wrapper: torch.nn.parallel.DistributedDataParallel) -> None:
    """Reset the parameters that unsynced backward passes used. Call it only while no synced pass is running."""
    wrapper.reducer._reset_state()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Queue a function to call at the end of the running backward pass, after functions that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def apply_to_own(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to a module's own parameters and buffers as ``Module.to`` does, without its children.

    A ``DTensor`` keeps its identity, and a module of FSDP2 examines all parameters that it gathers again.
    """
    module._apply(change, recurse=False)


def _fsdp_states(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, Any]]:
    """List the modules on which ``fully_shard`` was called, each with its FSDP2 state."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # fully_shard was never imported
        return []
    kind: Any = fsdp.FSDPModule
    return [(module, module._get_fsdp_state()) for module in modules if isinstance(module, kind)]


def _fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that a module of FSDP2 gathers together: at most one in torch 2.11."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_policies(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, Any]]:
    """List the modules on which ``fully_shard`` was called, each with its ``MixedPrecisionPolicy``."""
    return [(module, state._mp_policy) for module, state in _fsdp_states(modules)]


def set_fsdp_policy(module: torch.nn.Module, policy: Any) -> None:
    """Set the ``MixedPrecisionPolicy`` of a module of FSDP2; without effect after its first forward pass."""
    ((_, state),) = _fsdp_states([module])
    state._mp_policy = policy
    for group in _fsdp_groups(state):
        group.mp_policy = policy


def fsdp_has_run(module: torch.nn.Module) -> bool:
    """True if a module of FSDP2 has run a forward pass, in which it reads the dtypes of its parameters."""
    ((_, state),) = _fsdp_states([module])
    return state._is_root is not None


def fsdp_params(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return the parameters that FSDP2 gathers together: for each of its groups, by their qualified names."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [group for _, state in _fsdp_states(model.modules()) for group in _fsdp_groups(state)]
    found = [[each.sharded_param for each in group.fsdp_params] for group in groups]
    return [{names[id(param)]: param for param in params if id(param) in names} for params in found]


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor has no values: it is on the meta device, or from a ``FakeTensorMode``."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
