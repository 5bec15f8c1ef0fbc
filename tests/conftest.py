"""One thread, as the golden facts were recorded, and no op casting or random state handed from one test to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from halfstep import amp
from halfstep.casting import config, emulation
from tests.support.backends import seed_without_traces
from tests.support.combinations import STRENGTHS, chosen
from tests.support.defaults import DEFAULTS, OtherDefaults
from tests.support.processes import ranks

__all__ = ["ranks"]

gc.disable()  # imports and the collection of tests make millions of objects that stay
torch.set_num_threads(1)
settings.register_profile("halfstep", deadline=None)  # on a busy machine an example may take any time
settings.load_profile("halfstep")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be there before anything, such as torch.compile, imports triton
seed_without_traces()


TERMINAL = ["COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR"]
TERMINAL += ["PYTHON_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"]
"""What a terminal or a CI says of itself. Rich, click and Python change by it what they print."""


def pytest_sessionstart() -> None:
    for name in TERMINAL:  # pytest has read them before, so its own output keeps its colours
        os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--combinations",
        choices=STRENGTHS,
        default="pairs",
        help="cases of a test with several parameters: each value is in one (`make quick`), every two values meet in"
        " one, or all",
    )
    parser.addoption("--defaults", choices=DEFAULTS, help="the default device or dtype that halfstep's own calls meet")


def pytest_configure(config: pytest.Config) -> None:
    # The suite trains in both formats on any CPU; the speed warning is the business of core/test_hardware.py alone.
    config.addinivalue_line("filterwarnings", "ignore::halfstep.amp.PrecisionWarning")
    config.pluginmanager.register(Combinations())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "ranks" in item.fixturenames:
            item.add_marker(pytest.mark.exhaustive)  # it starts processes


class Combinations:
    """A plugin that leaves out combinations of parameters; see ``tests/support/combinations.py``."""

    @pytest.hookimpl(trylast=True)  # after -k and -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = chosen(items, STRENGTHS[config.getoption("combinations")])
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)  # a plugin of tools/mutate.py looks for objects, and finds no frozen ones
def pytest_collection_finish() -> None:
    gc.freeze()  # a run of the garbage collector looks only at what tests make: 10 ms instead of 600
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The part of an id that one argument makes, where pytest would only number it or leave a number without a name."""
    if val is None or isinstance(val, bool | int | float):
        return f"{argname}={val}"
    text = value_in_id(val)
    return text if text and len(text) <= 60 and " at 0x" not in text else None


def value_in_id(val: object) -> str | None:
    """A few words for a dtype, a class, or what holds them; None where pytest knows better."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, type):
        return val.__name__
    if isinstance(val, dict):
        return ",".join(f"{key}={value_in_id(value) or value}" for key, value in val.items()) or "{}"
    if isinstance(val, list | tuple | set | frozenset):
        return ",".join(value_in_id(value) or str(value) for value in val) or "()"
    if dataclasses.is_dataclass(val):  # with what differs from the defaults
        fields = [f.name for f in dataclasses.fields(val) if f.repr and getattr(val, f.name) != f.default]
        return f"{type(val).__name__}({','.join(f'{name}={getattr(val, name)}' for name in fields)})"
    return None


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """Keep the garbage collector from reading again what the file before has imported, such as Dynamo.

    ``gc.get_objects()`` no longer lists what is there now, so a file sees only its own models and optimizers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    default = request.config.getoption("--defaults")
    with OtherDefaults(default) if default else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def fresh_process_state(other_defaults: None) -> Iterator[None]:
    torch.manual_seed(0)
    modes = torch._C._len_torch_function_stack()
    logger = logging.getLogger("halfstep")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)  # verbose=True lets its lines be seen
    logger.handlers[:] = handlers
    amp.deactivate()
    torch.nn.modules.module._global_forward_pre_hooks.clear()  # a handle of amp.init has one, and no public end
    assert torch._C._len_torch_function_stack() == modes, "a test left a function mode behind"
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast on"
    emulation._kinds.cache_clear()  # a test may have pretended another machine
    config.derive.cache_clear()
