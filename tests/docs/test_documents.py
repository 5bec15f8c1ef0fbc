"""The tests of each example in the five documents that halfstep follows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PADDLE = "Paddle's guide, Automatic Mixed Precision Training"
FP16_UTILS = "Apex's documentation, apex.fp16_utils"
ACCUMULATION = "an article on gradient accumulation in several processes"
HANDLE = "an article of June 2018 on amp.init() and its handle"

EXAMPLES = {
    (FP16_UTILS, "compat/test_fp16_optimizer.py"): {
        "FP16_Optimizer in two lines": "test_recorded_run",
        "dynamic_loss_scale=True": "test_dynamic_defaults_are_those_documented",
        "dynamic_loss_args": "test_dynamic_args_reach_the_scaler",
        "the loss scale printed and set": "test_a_changed_scale_does_not_reach_back",
        "backward, of one loss and of two": "test_backward_twice_adds_and_unscales_each_once",
        "backward of two losses with update_master_grads": "test_delayed_unscaling_waits_for_whoever_asks_first",
        "clip_master_grads after an overflow": "test_clip_and_inspect_tell_of_an_overflow",
        "state_dict and load_state_dict": "test_resume_is_bit_exact",
        "step with a closure": "test_recorded_lbfgs",
    },
    (FP16_UTILS, "compat/test_fp16_utils.py"): {
        "prep_param_lists and what goes with it": "test_training_with_master_parameters_by_hand"
    },
    (FP16_UTILS, "amp/test_doors.py"): {
        "clip_master_grads": "test_clipping_is_of_unscaled_gradients_and_an_overflow_skips"
    },
    (HANDLE, "compat/test_handle.py"): {
        "the casts of each iteration": "test_verbose_lists_the_casts_of_a_network",
        "the algorithm of automatic loss scaling": "test_properties",
        "wrap_optimizer and two losses": "test_each_loss_has_a_scale_of_its_own",
        "a handle that does nothing": "test_disabled_does_nothing",
        "half_function, register_half_function and their siblings": "test_functions_of_the_user_s_own",
    },
    (HANDLE, "amp/test_doors.py"): {"one optimizer": "test_a_training_goes_where_fp32_goes"},
    (HANDLE, "compat/test_apex_amp_internals.py"): {
        "the lists of functions": "test_lists_have_the_names_of_the_original"
    },
    ("NVIDIA's blog, Tools for Easy Mixed-Precision Training in PyTorch", "amp/test_nvidia_article.py"): {
        "three steps": "test_three_steps",
        "whitelist, blacklist and everything else": "test_three_sets_of_functions",
        "wrapped_linear": "test_linear_casts_its_arguments_as_the_wrapper_of_the_article",
        "one cast of each weight of nn.RNNCell": "test_a_weight_of_an_rnn_cell_is_cast_once_in_a_call_of_its_model",
    },
    (PADDLE, "amp/test_paddle_amp_guide.py"): {
        "1.2.2 grad_scaler": "test_the_loss_scale_moves_as_in_section_1_2_2",
        "2.1.1 FP32, which the others are compared with": "fp32_loss",
        "2.1.2 O1": "test_o1",
        "2.1.3 O2": "test_o2",
        "2.2 high-level API": "test_high_level_api",
        "3.1 gradient accumulation": "test_gradient_accumulation",
        "V decorate before DataParallel": "test_o2_with_distributed_training",
    },
    (PADDLE, "core/test_hardware.py"): {
        "1.3 hardware": "test_a_gpu_by_compute_capability",
        "V the warning about a GPU without 16-bit units": "test_warns_once_for_each_dtype_and_goes_on",
    },
    (PADDLE, "graph/test_paddle_static_guide.py"): {
        "3.2.1 FP32": "test_fp32_training_mode_of_static_graph",
        "3.2.2 O1": "test_amp_o1_training_mode_of_static_graph",
        "3.2.3 O2, without and with fp16_guard": "test_amp_o2_training_mode_of_static_graph",
    },
    (ACCUMULATION, "distributed/test_accumulation_article.py"): {
        "delay_unscale, and reduction by hand": "test_windows_of_three"
    },
    (ACCUMULATION, "distributed/test_accumulation_across_processes.py"): {"what went wrong": "test_every_pattern"},
    (ACCUMULATION, "amp/test_doors.py"): {"accumulation on one process": "test_a_training_goes_where_fp32_goes"},
}


@pytest.mark.parametrize(("document", "path"), EXAMPLES)
def test_every_example_is_a_test(document: str, path: str) -> None:
    there = {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {example: name for example, name in EXAMPLES[document, path].items() if name not in there} == {}
