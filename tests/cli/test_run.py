"""``halfstep run`` is ``python`` with an Apex: what a script sees, what it starts, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.python import python

RUN = [sys.executable, "-m", "halfstep", "run"]

Ending = tuple[int, str, str]


def ending(command: list[str], folder: Path, stdin: str = "", **environment: str) -> Ending:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=folder,
        input=stdin,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


def run(folder: Path, *arguments: str, stdin: str = "", command: str = "run") -> Ending:
    """``halfstep run`` in a process that has torch already."""
    done = python("-m", "halfstep", command, *arguments, cwd=folder, stdin=stdin)
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


ENDINGS = [*(("script", what) for what in SCRIPTS), ("module", "asks where it is"), *((w, "exits") for w in WAYS)]
ENDINGS += [(way, "fails deep inside") for way in ("module", "stdin")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "way", "what"),
    [*(("run", *each) for each in ENDINGS), *(("doctor", *each) for each in ENDINGS if each[1] != "asks where it is")],
)
def test_a_script_ends_as_under_python(command: str, way: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[what] + "\n")
    (tmp_path / "neighbour.py").touch()
    asked = [*WAYS[way], "--lr", "1", "--device", "x"]
    stdin = SCRIPTS[what] if way == "stdin" else ""
    expected = ending([sys.executable, *asked], tmp_path, stdin)
    found = run(tmp_path, *asked, stdin=stdin, command=command)
    assert found[:2] == expected[:2]
    lines = [line for line in expected[2].splitlines() if "<frozen runpy>" not in line]  # which python -m shows
    assert found[2].splitlines() == lines


WORKERS = """
import sys
from collections.abc import Iterator
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        from apex import amp
        import amp_C
        return [amp.__name__, amp_C.__name__, str(torch.cuda.is_available())]

def work(rank):
    from apex.fp16_utils import FP16_Optimizer
    print("worker", FP16_Optimizer.__module__.split(".")[0], flush=True)

if __name__ == "__main__":
    import apex
    from apex import amp
    mp.spawn(work, nprocs=1)
    print(next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn", batch_size=None))))
    import subprocess
    subprocess.run([sys.executable, "-c", "import apex; print(apex.__name__)"], check=True)
    print(amp.__name__)
"""


@pytest.mark.exhaustive
def test_processes_that_a_script_starts_find_apex(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKERS)
    status, out, error = ending([*RUN, "--device", "cpu", "train.py"], tmp_path)
    assert status == 0, error
    name = "halfstep.compat.apex"
    assert out.splitlines() == [
        "worker halfstep",
        str([f"{name}.amp", f"{name}.amp_C", "True"]),
        name,
        f"{name}.amp",
    ]


@pytest.mark.exhaustive
def test_a_sitecustomize_of_the_user_s_is_imported_too(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "del os.environ['SEEN']\n"
        'code = \'import os, sys; print(os.environ.get("SEEN"), "halfstep" in sys.modules)\'\n'
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    status, out, error = ending([*RUN, "train.py"], tmp_path, PYTHONPATH=path)
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


@pytest.mark.parametrize("line", ["", "amp.initialize(model, optimizer, verbosity=0)"])
def test_a_level_that_changed_nothing_is_told(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS.format(line))
    status, _, error = run(tmp_path, "--opt-level", "o1", "train.py")
    assert status == 0
    assert ("no amp.initialize was called: --opt-level changed nothing" in error) is (line == "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("code", "hinted"),
    [
        ("import torch\ntorch.ones(1).cuda()", True),
        ("import torch\ntorch.cuda.set_device(0)", True),
        ("import torch\ntorch.ones(1, device='cuda')", True),
        ("raise ValueError('a number')", False),
    ],
)
@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_script_that_needs_a_gpu_is_told_how_to_try_it_without(
    command: str, code: str, hinted: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(code + "\n")
    status, _, error = run(tmp_path, "train.py", command=command)
    assert status == 1
    assert (f"`halfstep {command} --device cpu`" in error.splitlines()[-1]) is hinted
    assert "halfstep/cli" not in error


@pytest.fixture
def children_heed_sigint() -> Iterator[None]:
    """Children start with the default of SIGINT. A shell starts jobs in the background without: they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("children_heed_sigint")
def test_a_script_that_is_stopped_by_the_keyboard_dies_of_it(tmp_path: Path) -> None:
    code = "import os, signal\nprint('runs', flush=True)\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "train.py").write_text(code)
    assert ending([*RUN, "train.py"], tmp_path)[:2] == (-signal.SIGINT, "runs\n")


# ---- what torch itself no longer has

SIX = """
import torch._six
from torch._six import container_abcs, inf, int_classes, string_classes
print(isinstance("a", string_classes), isinstance(1, int_classes), issubclass(list, container_abcs.Sequence), inf)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_worker", [False, True])
def test_a_script_that_imports_torch_six_is_told_once(tmp_path: Path, in_worker: bool) -> None:
    (tmp_path / "six.py").write_text(SIX)
    script = "import subprocess, sys\nsubprocess.run([sys.executable, 'six.py'], check=True)\n" if in_worker else SIX
    (tmp_path / "train.py").write_text(script)
    code, out, err = run(tmp_path, "train.py")
    assert code == 0, err
    assert out.split() == ["True", "True", "True", "inf"]
    assert err.count("torch has no torch._six since 2.0") == 1


LOADS = """
import pathlib, subprocess, sys, torch
torch.save({"args": pathlib.PurePosixPath("a"), "w": torch.ones(2)}, "c.pt")
if len(sys.argv) > 1:
    sys.exit(subprocess.run([sys.executable, "-c", "import torch; print(torch.load('c.pt')['args'])"]).returncode)
print(torch.load("c.pt")["args"])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("worker", [[], ["worker"]])
def test_checkpoints_are_trusted_only_when_told(tmp_path: Path, worker: list[str]) -> None:
    (tmp_path / "train.py").write_text(LOADS)
    code, out, err = run(tmp_path, "train.py", *worker)
    assert code == 1
    assert "weights_only" in err
    assert ("halfstep run --trust-checkpoints" in err) is (not worker)
    code, out, err = run(tmp_path, "--trust-checkpoints", "train.py", *worker)
    assert (code, out.strip()) == (0, "a"), err
    assert err.count("a file can run any code that way") == 1


REFUSED = [
    *("from apex.transformer import parallel_state", "from apex.amp.utils import casted_args"),
    "import fused_layer_norm_cuda",
]


@pytest.mark.parametrize("line", REFUSED)
def test_an_import_that_halfstep_refuses_shows_the_line_of_the_script_alone(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    status, _, error = run(tmp_path, "train.py")
    assert status == 1
    _, place, code, *rest = error.splitlines()
    assert place.strip() == f'File "{tmp_path}/train.py", line 2, in <module>'
    assert code.strip() == line
    assert [said.partition(":")[0] for said in rest] in (
        ["halfstep.core.errors.MissingModuleError"],
        ["halfstep.core.errors.MissingNameError"],
    )


PAST_THE_MODEL = """
import sys, torch
from apex import amp
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model = amp.initialize(model, opt_level="O2", cast_ops="yes" in sys.argv or None, verbosity=0)
print(model[0](torch.ones(2, 4)).shape)
"""


def test_a_part_called_past_its_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAST_THE_MODEL)
    status, _, error = run(tmp_path, "train.py")
    assert status == 1
    *_, raised, hint = error.splitlines()
    assert raised.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
    assert hint.startswith("halfstep run: at O2 and O3 a part that is called past its model")
    assert "cast_ops=True" in hint
    status, out, error = run(tmp_path, "train.py", "yes")
    assert (status, out.strip()) == (0, "torch.Size([2, 4])"), error
