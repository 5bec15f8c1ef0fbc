"""``halfstep run`` is ``python`` with an Apex: what a script sees, what it starts, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.python import python

Ending = tuple[int, str, str]


def run(folder: Path, *arguments: str, stdin: str = "", command: str = "run", **environment: str) -> Ending:
    """``halfstep run`` in a process that has torch already."""
    env = {**os.environ, **environment}
    done = python("-m", "halfstep", command, *arguments, cwd=folder, stdin=stdin, env=env)
    return done.returncode, done.stdout, done.stderr


SCRIPTS = {
    "reads what is not there": "input()",
    "is interrupted": "raise KeyboardInterrupt",
    "breaks a pipe": "import errno\nraise BrokenPipeError(errno.EPIPE, 'worker died')",
    "fails deep inside": """
def f(x):
    return 1 / x

try:
    f(0)
except ZeroDivisionError as e:
    raise KeyError(1) from e
""",
    "cannot be compiled": "x = (",
    "exits": "import sys\nprint('a', flush=True)\nsys.exit(3)",
    "exits with words": "import sys\nsys.exit('no data')",
    "asks where it is": """
import os, sys
import neighbour
os.chdir("/")
print(os.path.exists(__file__), __file__, sys.argv, sys.path[0], __name__, neighbour.__file__)
print(sys.modules["__main__"].__dict__ is globals())
""",
}
WAYS = {"script": ["train.py"], "module": ["-m", "train"], "stdin": ["-"]}


ENDINGS = [
    *(("run", "script", what) for what in SCRIPTS),
    ("run", "module", "asks where it is"),
    *(("run", way, "fails deep inside") for way in ("module", "stdin")),
    *(("doctor", "script", what) for what in ("fails deep inside", "exits")),
]


@pytest.mark.exhaustive
def test_a_real_process_ends_as_under_python(tmp_path: Path) -> None:
    """What a forked process leaves out: objects that are torn down after the script."""
    (tmp_path / "train.py").write_text("class Last:\n    def __del__(self): raise ValueError('ended')\nlast = Last()")
    ends = []
    for ways in (["-m", "halfstep", "run"], []):
        command = [sys.executable, *ways, "train.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
        ends.append((done.returncode, done.stdout, "ValueError: ended" in done.stderr))
    assert ends == [(0, "", True)] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("command", "way", "what"), ENDINGS)
def test_a_script_ends_as_under_python(command: str, way: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[what] + "\n")
    (tmp_path / "neighbour.py").touch()
    asked = [*WAYS[way], "--lr", "1", "--device", "x"]
    stdin = SCRIPTS[what] if way == "stdin" else ""
    expected = subprocess.run(
        [sys.executable, *asked], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, input=stdin
    )
    found = run(tmp_path, *asked, stdin=stdin, command=command)
    assert found[:2] == (expected.returncode, expected.stdout)
    lines = [line for line in expected.stderr.splitlines() if "<frozen runpy>" not in line]  # which python -m shows
    assert found[2].splitlines() == lines


WORKER = """
import pathlib
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        from torch._six import string_classes
        args = torch.load("c.pt")["args"]
        import amp_C
        from apex import amp
        return [isinstance("a", string_classes), args, amp.__name__, amp_C.__name__, torch.cuda.is_available()]

if __name__ == "__main__":
    torch.save({"args": pathlib.PurePosixPath("a")}, "c.pt")
    print(next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn", batch_size=None))))
"""


@pytest.mark.exhaustive
def test_a_process_that_a_script_starts_finds_all_that_the_script_finds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    status, out, error = run(tmp_path, "--device", "cpu", "--trust-checkpoints", "train.py")
    assert status == 0, error
    name = "halfstep.compat.apex"
    assert out == f"[True, PurePosixPath('a'), '{name}.amp', '{name}.amp_C', True]\n"
    assert error.count("torch has no torch._six since 2.0") == 1


@pytest.mark.exhaustive
def test_a_sitecustomize_of_the_user_s_is_imported_too(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        'code = \'import os, sys; print(os.environ.get("SEEN"), "halfstep" in sys.modules)\'\n'
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    status, out, error = run(tmp_path, "train.py", PYTHONPATH=path)
    assert (status, out) == (0, "yes False\n"), error


TRAINS = """
import torch
from apex import amp
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{}
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", ["", "amp.initialize(model, optimizer, verbosity=0)"])
def test_a_level_that_changed_nothing_is_told(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS.format(line))
    status, _, error = run(tmp_path, "--opt-level", "o1", "train.py")
    assert status == 0
    assert ("no amp.initialize was called: --opt-level changed nothing" in error) is (line == "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run", "torch.ones(1).cuda()"),
        ("run", "torch.cuda.set_device(0)"),
        ("doctor", "torch.ones(1, device='cuda')"),
    ],
)
def test_a_script_that_needs_a_gpu_is_told_how_to_try_it_without(command: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{code}\n")
    status, _, error = run(tmp_path, "train.py", command=command)
    assert status == 1
    assert f"`halfstep {command} --device cpu`" in error.splitlines()[-1]
    assert "halfstep/cli" not in error


# ---- what torch itself no longer has

SIX = """
import torch._six
from torch._six import container_abcs, inf, int_classes, string_classes
print(isinstance("a", string_classes), isinstance(1, int_classes), issubclass(list, container_abcs.Sequence), inf)
"""


def test_a_script_that_imports_torch_six_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIX)
    code, out, err = run(tmp_path, "train.py")
    assert code == 0, err
    assert out.split() == ["True", "True", "True", "inf"]
    assert err.count("torch has no torch._six since 2.0") == 1


LOADS = """
import pathlib, torch
torch.save({"args": pathlib.PurePosixPath("a")}, "c.pt")
print(torch.load("c.pt")["args"])
"""


@pytest.mark.exhaustive
def test_checkpoints_are_trusted_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADS)
    code, out, err = run(tmp_path, "train.py")
    assert code == 1
    assert "weights_only" in err
    assert "halfstep run --trust-checkpoints" in err
    code, out, err = run(tmp_path, "--trust-checkpoints", "train.py")
    assert (code, out.strip()) == (0, "a"), err
    assert err.count("a file can run any code that way") == 1


REFUSED = [
    *("from apex.transformer import parallel_state", "from apex.amp.utils import casted_args"),
    "import fused_layer_norm_cuda",
]


@pytest.mark.exhaustive
def test_imports_that_halfstep_refuses_show_the_line_of_the_script_alone(tmp_path: Path) -> None:
    shown = "try:\n    {}\nexcept ImportError:\n    sys.excepthook(*sys.exc_info())\n"
    (tmp_path / "train.py").write_text("import sys, torch\n" + "".join(map(shown.format, REFUSED)))
    status, _, error = run(tmp_path, "train.py")
    assert status == 0
    lines = [line for line in error.splitlines() if not line.startswith("Traceback ")]
    assert [line.strip() for line in lines[::3]] == [
        f'File "{tmp_path}/train.py", line {number}, in <module>' for number in (3, 7, 11)
    ]
    assert [line.strip() for line in lines[1::3]] == REFUSED
    errors = ["MissingModuleError", "MissingNameError", "MissingModuleError"]
    assert [line.partition(":")[0] for line in lines[2::3]] == [f"halfstep.core.errors.{name}" for name in errors]


PAST_THE_MODEL = """
import torch
from apex import amp
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model = amp.initialize(model, opt_level="O2", verbosity=0)
print(model[0](torch.ones(2, 4)).shape)
"""


@pytest.mark.exhaustive
def test_a_part_called_past_its_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAST_THE_MODEL)
    status, _, error = run(tmp_path, "train.py")
    assert status == 1
    *_, raised, hint = error.splitlines()
    assert raised.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
    assert hint.startswith("halfstep run: at O2 and O3 a part that is called past its model")
    assert "cast_ops=True" in hint
