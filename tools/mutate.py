"""Mutation testing: change one small thing in the sources, and see whether a test fails.

    python tools/mutate.py src/halfstep/parameters/unscale.py --tests tests/parameters --sample 60

The tests run once with a tracer that notes which of them execute which lines of the given files. Then each mutant is
written into a scratch copy of the project, and the tests that reach its line run there until one fails. A mutant that
no test kills is printed. Every run is a fork of this process, which has torch imported already.

What cannot be told from the original, whatever a test does, is listed with its reason in ``equivalent_mutants.txt``.
Lines that only other processes execute are not seen by the tracer: name the tests that start those with ``--always``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib
import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path.home() / ".cache" / "halfstep"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
QUIETLY = ["-q", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
WARM = ("torch", "torch._dynamo", "hypothesis", "numpy")


class Reach:
    """A pytest plugin: which tests execute which lines of some files, and how each test ends."""

    def __init__(self, files: Iterable[str], traced: bool) -> None:
        self.tests: dict[str, dict[int, set[str]]] = {file: defaultdict(set) for file in files}
        self.seconds: Counter[str] = Counter()
        self.unusable: set[str] = set()
        self._now = ""  # the running test; none while modules are imported
        if traced:
            threading.settrace(self._enter)
            sys.settrace(self._enter)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        return self._execute if frame.f_code.co_filename in self.tests else None

    def _execute(self, frame: Any, event: str, argument: Any) -> Any:
        in_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # or else in the body of a module or class
        self.tests[frame.f_code.co_filename][frame.f_lineno].add(self._now if in_function else "")
        return self._execute

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        caches = [c for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
        codes = [getattr(inspect.unwrap(cache), "__code__", None) for cache in caches]
        self._caches = [c for c, code in zip(caches, codes, strict=True) if code and code.co_filename in self.tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = item.nodeid
        for cache in self._caches:  # what is found in a cache is not executed
            cache.cache_clear()
        try:
            return (yield)
        finally:
            self._now = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]
        if not report.passed:
            self.unusable.add(report.nodeid)


class Only:
    """A pytest plugin: only these tests, in this order."""

    def __init__(self, tests: Iterable[str]) -> None:
        self.places = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda i: self.places[i.nodeid])


def warm_up() -> None:
    """Import what takes long, before any fork."""
    for name in WARM:
        importlib.import_module(name)
    torch, hypothesis = sys.modules["torch"], sys.modules["hypothesis"]
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "mutate",
        database=None,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutate")


def fork(scratch: Path, arguments: list[str], make_plugins: Callable[[], list[Any]]) -> int:
    """Run pytest on the sources in ``scratch`` in a child process; its id."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(scratch)
        os.environ["PYTHONPATH"] = str(scratch / "src")
        os.environ["HALFSTEP_CACHE_DIR"] = str(scratch / "cache")
        sys.path.insert(0, str(scratch / "src"))
        log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        plugins = make_plugins()
        code = int(pytest.main([*QUIETLY, *arguments], plugins))
        sys.settrace(None)
        for plugin in plugins:
            if isinstance(plugin, Reach):
                (scratch / "reach").write_bytes(pickle.dumps((plugin.tests, plugin.seconds, plugin.unusable)))
    except Exception:  # noqa: BLE001 - shown, and this process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def observe(scratch: Path, arguments: list[str], files: Sequence[str], order: Sequence[str] = ()) -> Any:
    """Run the tests on what is not mutated: the lines, seconds and failures that ``Reach`` notes.

    They are traced at first, and run once more in the ``order`` in which mutants will meet them.
    """
    (scratch / "reach").unlink(missing_ok=True)
    make_plugins = lambda: [Reach(files, traced=not order), *([Only(order)] if order else [])]  # noqa: E731
    _, status = os.waitpid(fork(scratch, arguments, make_plugins), 0)
    if os.waitstatus_to_exitcode(status) not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit((scratch / "log").read_text())
    return pickle.loads((scratch / "reach").read_bytes())


def finished(pid: int, deadline: float) -> str | None:
    """What became of a mutant; None while its tests run."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        return "survived" if os.waitstatus_to_exitcode(status) in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else "killed"
    if time.monotonic() < deadline:
        return None
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timed out"


def outcomes(
    mutants: Sequence[Mutant], tests_of: Callable[[Mutant], list[str]], seconds: Counter[str], scratches: list[Path]
) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with what became of it, as soon as that is known."""
    waiting, running = list(reversed(mutants)), dict[Path, tuple[int, float, Mutant]]()
    while waiting or running:
        for scratch in scratches:
            if scratch in running:
                pid, deadline, mutant = running[scratch]
                if (outcome := finished(pid, deadline)) is not None:
                    del running[scratch]
                    (scratch / mutant.path).write_bytes(mutant.source)
                    yield mutant, outcome
            elif waiting:
                mutant = waiting.pop()
                if not (tests := tests_of(mutant)):
                    yield mutant, "not reached"
                    continue
                (scratch / mutant.path).write_bytes(mutant.mutated)
                # Python tells by the time and the size whether a compiled file is still good.
                os.utime(scratch / mutant.path, (len(waiting), len(waiting)))
                files = sorted({test.partition("::")[0] for test in tests})
                pid = fork(scratch, ["-x", *files], functools.partial(list, [Only(tests)]))
                deadline = time.monotonic() + 20 + 4 * sum(seconds[test] for test in tests)
                running[scratch] = pid, deadline, mutant
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="files or folders below src/")
    parser.add_argument("--tests", nargs="+", required=True, help="test files or folders, from the root of the project")
    parser.add_argument("--always", nargs="+", default=[], help="tests among them that every mutant meets")
    parser.add_argument("-k", default="", help="which of the tests, as pytest's -k")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (1)")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    given = [Path(source) for source in options.sources]
    paths = sorted(map(str, (path for each in given for path in (each.rglob("*.py") if each.is_dir() else [each]))))
    every = [mutant for path in paths for mutant in mutants_of(path)]
    # By a digest: a change of some lines leaves the choice among others as it is.
    chosen = sorted(every, key=lambda m: hashlib.sha1(repr((options.seed, m.key)).encode()).digest())[: options.sample]
    known = {tuple(part.strip() for part in line.split(" | ")[:3]) for line in EQUIVALENT.read_text().splitlines()}
    mutants = [mutant for mutant in chosen if mutant.key not in known]
    print(f"{len(mutants)} mutants of {len(every)}; {len(chosen) - len(mutants)} more are known to be equivalent")
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        scratches = [Path(folder, str(i)) for i in range(options.jobs)]
        for scratch in scratches:
            shutil.copytree(ROOT, scratch, ignore=shutil.ignore_patterns(".*"))
            if CACHE.exists():  # what a mutant compiles stays here
                shutil.copytree(CACHE, scratch / "cache")
        arguments = [*options.tests, "-k", options.k]
        files = {path: str(scratches[0] / path) for path in paths}
        reached, seconds, unusable = observe(scratches[0], arguments, list(files.values()))
        order = sorted(seconds.keys() - unusable, key=seconds.__getitem__)
        _, seconds, failing = observe(scratches[0], arguments, [], order)
        print(f"{len(order)} tests in {seconds.total():.0f} s; {len(unusable | failing)} more were skipped or failed")
        order = sorted(seconds.keys() - failing, key=seconds.__getitem__)
        always = {test for test in order if test.startswith(tuple(options.always))}

        def tests_of(mutant: Mutant) -> list[str]:
            by_line = reached[files[mutant.path]]
            tests = set[str]().union(*(by_line.get(line, ()) for line in mutant.lines))
            if "" in tests:  # executed by an import
                tests.update(order)
            return [test for test in order if test in tests | always]

        score: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant, outcome in outcomes(mutants, tests_of, seconds, scratches):
            score[mutant.path][outcome] += 1
            if outcome != "killed":
                print(f"{outcome}: {mutant}")
    for path, counts in [*sorted(score.items()), ("all", sum(score.values(), Counter()))]:
        killed = counts["killed"] + counts["timed out"]
        print(f"{killed:4} of {counts.total():4} killed ({killed / counts.total():4.0%})  {path}")


if __name__ == "__main__":
    main()
