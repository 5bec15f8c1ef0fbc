"""The tests of each example in the five documents that halfstep follows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PADDLE = "Paddle's guide, Automatic Mixed Precision Training"
HANDLE = "an article of June 2018 on amp.init() and its handle"

EXAMPLES = {
    ("Apex's documentation, apex.fp16_utils", "compat/test_apex_fp16_utils_page.py"): {
        "FP16_Optimizer in two lines": "test_two_lines_changed",
        "dynamic_loss_scale=True": "test_dynamic_loss_scaling",
        "the loss scale printed and set": "test_reading_and_setting_the_loss_scale",
        "backward, of one loss and of two": "test_backward",
        "clip_master_grads": "test_clip_master_grads",
        "state_dict and load_state_dict": "test_saving_and_loading",
        "step with a closure": "test_step_with_a_closure",
        "prep_param_lists and what goes with it": "test_manual_master_parameters",
    },
    (HANDLE, "compat/test_apex_handle_article.py"): {
        "the casts of each iteration": "test_verbose_lists_the_casts",
        "the algorithm of automatic loss scaling": "test_the_automatic_loss_scale",
        "one optimizer": "test_one_optimizer",
        "wrap_optimizer and two losses": "test_several_losses",
        "a handle that does nothing": "test_disabled",
        "half_function and its siblings": "test_function_annotation",
        "register_half_function and its siblings": "test_explicit_registration",
    },
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
    ("an article on gradient accumulation in several processes", "distributed/test_accumulation_article.py"): {
        "accumulation without Apex": "test_gradients_add_up",
        "what went wrong": "test_what_went_wrong",
        "delay_unscale, and reduction by hand": "test_windows_of_three",
    },
}


@pytest.mark.parametrize(("document", "path"), EXAMPLES)
def test_every_example_is_a_test(document: str, path: str) -> None:
    there = {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {example: name for example, name in EXAMPLES[document, path].items() if name not in there} == {}
