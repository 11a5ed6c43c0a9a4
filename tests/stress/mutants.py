"""Mutation test of the test suite: hand-picked mistakes, applied one at a time, that the tests must catch.

python tests/stress/mutants.py [--only=TEXT] [--jobs=2] [--tests='-m "not slow"'] [--select=COVERAGE_FILE]
    [--times=FILE] [--tree=DIR] [--out=FILE.json] [--seconds=600] [--stop=SECONDS]

The mistakes are in mutants.toml. Each one is applied to a temporary copy of leanformer/ with links to the rest of the
repository, where pytest runs until the first failure, in one process per mistake. With --select, a coverage database
with one context per test, the tests that execute the changed line run first, and then the others of the mirrored
folder, because no test is recorded for a line that runs at import, in a process that a test starts, or in a program
that an earlier test has compiled. Without --select, the tests of the mirrored folder run first and then all tests. A
result is one of:

    caught      a test fails that passes without the mistake
    not caught  all of these tests pass
    timeout     the tests that execute the line take longer than --seconds; not counted as caught
    broken      `old` does not occur exactly once in the file, or pytest cannot run

The database comes from `pytest --cov=leanformer --cov-branch --cov-context=test`; several are merged by `coverage
combine`. Reading it needs the package coverage, which is not a dependency of leanformer. --times is the output of
`pytest --durations=0`, used to run quick tests before slow ones. With --out, results are stored, and the same command
resumes with mistakes that are missing or timed out. With --stop, no mistake is started after that many seconds. Exit
status 1 unless all mistakes are caught.

The cache of compiled programs, LEANFORMER_TEST_CACHE, hides no mistake, because its key is the text of the program.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "leanformer"
COMMANDS = "cli"  # test folder of the modules at the top level of the package
CAUGHT, NOT_CAUGHT, TIMEOUT, BROKEN = "caught", "not caught", "timeout", "broken"
FIRST_SECONDS = 60  # of tests in the first of two pytest runs, by --times: enough for most mistakes
UNKNOWN_SECONDS = 3.0  # per test that --times does not list; pytest lists none under 5 ms
CLASSES = (0.5, 3.0, 15.0, float("inf"))  # seconds per test: inside a class, the tests of a file run one after another
SELECTION, FAILURE = "LEANFORMER_MUTANT_TESTS", "LEANFORMER_MUTANT_FAILURE"  # files that the plugin reads and writes


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Mistake in a file of the package: `new` replaces `old`.

    Attributes:
        name: the mistake in words.
        file: path below leanformer/.
        old: text that occurs exactly once in the file.
    """

    name: str
    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the source with the mistake. Raise ValueError unless `old` occurs exactly once."""
        if (number := source.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {number} times")
        return source.replace(self.old, self.new)

    def lines(self, source: str) -> set[int]:
        """Return the numbers of the lines whose tests must catch the mistake.

        These are the changed lines with the header of the statement around them. For a constant of a module or a class,
        the lines of the file that use it are added; for a function's arguments, the first statement of its body.
        """
        self.apply(source)
        first = 1 + source[: source.index(self.old)].count("\n")
        last = first + self.old.count("\n")
        tree = ast.parse(source)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        inner = max((n for n in nodes if n.lineno <= first and last <= n.end_lineno), key=lambda n: n.lineno)
        body = getattr(inner, "body", None)
        end = max(inner.lineno, body[0].lineno - 1) if body else inner.end_lineno
        lines = {*range(first, last + 1), *range(inner.lineno, end + 1)}
        if isinstance(inner, ast.FunctionDef):
            start = body[ast.get_docstring(inner) is not None and len(body) > 1]
            lines |= {*range(start.lineno, start.end_lineno + 1)}
        constants = [*tree.body, *(node for top in nodes if isinstance(top, ast.ClassDef) for node in top.body)]
        if inner in constants and isinstance(inner, ast.Assign):
            names = [node.id for target in inner.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            texts = enumerate(source.splitlines(), 1)
            lines |= {i for i, text in texts if any(re.search(rf"\b{name}\b", text) for name in names)}
        return lines


def read(path: Path = HERE / "mutants.toml") -> list[Mutant]:
    """Return the mistakes in a TOML file."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


class Coverage:
    """Database of the tests that execute each line.

    Args:
        path: a coverage database with one context per test.
    """

    def __init__(self, path: Path):
        from coverage import CoverageData

        self._data = CoverageData(basename=str(path), no_disk=False)
        self._data.read()
        if not (files := self._data.measured_files()):
            raise SystemExit(f"--select={path}: no file was measured. Run `coverage combine` first.")
        self._files = {name[name.rindex(f"{PACKAGE}/") :]: name for name in files if f"{PACKAGE}/" in name}

    def tests(self, file: str, lines: set[int]) -> set[str]:
        """Return the tests that execute one of the lines."""
        by_line = self._data.contexts_by_lineno(self._files.get(f"{PACKAGE}/{file}", file))
        contexts = {context for line in lines for context in by_line.get(line, ())}
        return {context.rpartition("|")[0] for context in contexts if "|" in context}


def read_times(path: Path) -> dict[str, float]:
    """Return seconds by test from the output of `pytest --durations=0`, set-up and teardown included."""
    seconds: dict[str, float] = {}
    for number, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(.+?) *$", path.read_text(), re.MULTILINE):
        seconds[test] = seconds.get(test, 0.0) + float(number)
    return seconds


def mirrored_paths(tree: Path, file: str) -> list[str]:
    """Return the test folder for a file of the package, or its test files in an older flat layout."""
    package = file.partition("/")[0] if "/" in file else COMMANDS
    if (tree / "tests" / package).is_dir():
        return [f"tests/{package}"]
    names = sorted(path.name for path in (ROOT / "tests" / package).glob("test_*.py"))
    return [f"tests/{name}" for name in names if (tree / "tests" / name).is_file()]


def sort_tests(tests: Sequence[str], times: Mapping[str, float], near: Sequence[str]) -> list[str]:
    """Return tests sorted by duration class, those in `near` first within a class, and tests of a file together."""

    def key(test: str) -> tuple[Any, ...]:
        seconds = times.get(test, UNKNOWN_SECONDS)
        file = test.partition("::")[0]
        is_near = any(file == place or file.startswith(f"{place}/") for place in near)
        return next(i for i, most in enumerate(CLASSES) if seconds <= most), not is_near, file, seconds, test

    return sorted(tests, key=key)


def split(tests: Sequence[str], times: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return the first tests that together take FIRST_SECONDS, and the others."""
    total = 0.0
    for i, test in enumerate(tests):
        total += times.get(test, UNKNOWN_SECONDS)
        if total > FIRST_SECONDS:
            return [*tests[: i + 1]], [*tests[i + 1 :]]
    return [*tests], []


@contextlib.contextmanager
def copy_tree(tree: Path, mutant: Mutant | None = None) -> Iterator[Path]:
    """Make a temporary copy of a tree with the mistake. Only the package is copied; the rest is linked."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as name:
        copy = Path(name)
        for path in tree.iterdir():
            if path.name != PACKAGE and path.name not in (".git", ".venv", "runs"):
                (copy / path.name).symlink_to(path.absolute())
        shutil.copytree(tree / PACKAGE, copy / PACKAGE)
        if mutant is not None:
            file = copy / PACKAGE / mutant.file
            file.write_text(mutant.apply(file.read_text()))
        yield copy


@dataclasses.dataclass(frozen=True)
class Stage:
    """Arguments of one pytest run.

    Attributes:
        places: files or folders.
        only: tests to run, in this order; all in `places` if empty.
        order: tests that run after others, in this order, if `only` is empty.
        without: tests to leave out.
        optional: whether the mistake counts as not caught if the time limit ends the run.
    """

    places: Sequence[str]
    only: Sequence[str] = ()
    order: Sequence[str] = ()
    without: Sequence[str] = ()
    optional: bool = False


class Runner:
    """Runner of pytest on copies of a tree.

    Args:
        tree: root of a checkout.
        arguments: pytest arguments for every run.
        seconds: time limit per mistake.
    """

    def __init__(self, tree: Path, arguments: Sequence[str], seconds: float):
        self.tree, self.arguments, self.seconds = tree.absolute(), arguments, seconds
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End all pytest processes."""
        with self._lock:
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, copy: Path, stage: Stage, seconds: float, without: Sequence[str] = ()) -> dict[str, Any]:
        """Run tests until the first failure; `result` is CAUGHT, NOT_CAUGHT, TIMEOUT or BROKEN.

        Args:
            without: tests to leave out, in addition to those of the stage.
        """
        with tempfile.TemporaryDirectory(prefix="mutant_run_") as name:
            selection, failure = Path(name) / "tests.json", Path(name) / "failure.json"
            selection.write_text(json.dumps(dataclasses.asdict(stage) | {"without": [*stage.without, *without]}))
            paths = os.pathsep.join([str(copy), str(HERE)])
            environment = os.environ | {"PYTHONPATH": paths, SELECTION: str(selection), FAILURE: str(failure)}
            words = [sys.executable, "-m", "pytest", "-p", "mutants", "-p", "no:cacheprovider", "-x", "--tb=line"]
            words += ["-n", "0", *self.arguments, f"--basetemp={name}/tmp", *stage.places]
            result = {"result": NOT_CAUGHT}
            with (Path(name) / "output").open("w+") as output:
                pipes = {"stdout": output, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(words, cwd=copy, env=environment, start_new_session=True, **pipes)
                with self._lock:
                    self._running.add(process)
                try:
                    process.wait(timeout=max(seconds, 1))
                except subprocess.TimeoutExpired:
                    result = {"result": TIMEOUT}
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and processes that tests have started
                process.wait()
                with self._lock:
                    self._running.discard(process)
                output.seek(0)
                text = output.read()
            if failure.is_file():
                return {"result": CAUGHT, **json.loads(failure.read_text())}
            if result["result"] == TIMEOUT or process.returncode in (0, 5):  # all passed, or nothing was selected
                return result
            return {"result": BROKEN, "reason": text[-2000:]}

    def judge(self, mutant: Mutant, stages: Sequence[Stage], without: Sequence[str] = ()) -> dict[str, Any]:
        """Return the result of a mistake after running the stages in order; `stage` is the number of the last one."""
        start = time.monotonic()
        result: dict[str, Any] = {"result": NOT_CAUGHT}
        try:
            with copy_tree(self.tree, mutant) as copy:
                ast.parse((copy / PACKAGE / mutant.file).read_text())
                for number, stage in enumerate(stages, 1):
                    left = self.seconds - (time.monotonic() - start)
                    result = self.run(copy, stage, left, without) | {"stage": number}
                    if result["result"] == TIMEOUT and stage.optional:
                        result |= {"result": NOT_CAUGHT, "reason": "The tests of the mirrored folder did not finish."}
                    if result["result"] != NOT_CAUGHT:
                        break
        except (OSError, SyntaxError, ValueError) as error:
            result = {"result": BROKEN, "reason": str(error)}
        return result | {"seconds": round(time.monotonic() - start, 1)}


def make_stages(mutant: Mutant, tree: Path, coverage: Coverage | None, times: Mapping[str, float]) -> list[Stage]:
    """Return the pytest runs for a mistake; each stops at the first failure."""
    near = mirrored_paths(tree, mutant.file)
    if coverage is None:
        return [Stage(near, order=sort_tests([*times], times, near)), Stage(["tests"])]
    try:
        lines = mutant.lines((tree / PACKAGE / mutant.file).read_text())
    except (OSError, ValueError):
        return [Stage([])]  # broken
    tests = sort_tests([*coverage.tests(mutant.file, lines)], times, near)
    stages = [Stage(unique_files(part), only=part) for part in split(tests, times) if part]
    order = sort_tests([*times], times, near)
    return stages + ([Stage(near, order=order, without=tests, optional=bool(tests))] if near else [])


def unique_files(tests: Sequence[str]) -> list[str]:
    """Return the files of tests, each once."""
    return [*dict.fromkeys(test.partition("::")[0] for test in tests)]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Select and order tests, when pytest loads this file as a plugin."""
    if SELECTION not in os.environ:
        return
    selection = json.loads(Path(os.environ[SELECTION]).read_text())
    only, without = {*selection["only"]}, {*selection["without"]}
    position = {test: i for i, test in enumerate(selection["only"] or selection["order"])}
    keep = [item for item in items if (not only or item.nodeid in only) and item.nodeid not in without]
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = sorted(keep, key=lambda item: position.get(item.nodeid, -1))


def pytest_runtest_logreport(report: Any) -> None:
    """Record the first test that fails."""
    _record_failure(report.nodeid, report)


def pytest_collectreport(report: Any) -> None:
    """Record a file that cannot be imported."""
    _record_failure(f"collection of {report.nodeid}", report)


def _record_failure(test: str, report: Any) -> None:
    if report.failed and FAILURE in os.environ and not (path := Path(os.environ[FAILURE])).is_file():
        text = str(report.longrepr).strip().splitlines()
        path.write_text(json.dumps({"test": test, "reason": text[-1][:200] if text else ""}))


def verify(runner: Runner, results: Mapping[str, Mapping[str, Any]], sound: set[str], unsound: set[str]) -> None:
    """Run the tests that caught mistakes on the unchanged package, and add each to `sound` or `unsound`."""
    tests = {result["test"] for result in results.values() if result["result"] == CAUGHT}
    tests = {test for test in tests if not test.startswith("collection of ")} - sound - unsound
    while tests:
        with copy_tree(runner.tree) as copy:
            stage = Stage(unique_files(sorted(tests)), only=sorted(tests))
            result = runner.run(copy, stage, max(3600.0, runner.seconds))
        if result["result"] != CAUGHT:
            if result["result"] == NOT_CAUGHT:
                sound |= tests
            return
        unsound.add(result["test"])
        tests.discard(result["test"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only the mistakes whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of mistakes tested in parallel")
    parser.add_argument("--tests", default='-m "not slow"', help="pytest arguments for every run")
    parser.add_argument("--select", type=Path, help="coverage database with one context per test")
    parser.add_argument("--times", type=Path, help="output of pytest --durations=0")
    parser.add_argument("--tree", type=Path, default=ROOT, help="root of the checkout to test")
    parser.add_argument("--out", type=Path, help="JSON file of the results; mistakes in it are not run again")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit per mistake")
    parser.add_argument("--stop", type=float, default=float("inf"), help="seconds after which no mistake is started")
    f = parser.parse_args()

    start = time.monotonic()
    mutants = [m for m in read() if f.only is None or f.only in m.name or f.only in m.file]
    runner = Runner(f.tree, shlex.split(f.tests), f.seconds)
    coverage = f.select and Coverage(f.select)
    times = read_times(f.times) if f.times else {}
    stored = json.loads(f.out.read_text()) if f.out and f.out.is_file() else {}
    results, sound, unsound = stored.get("results", {}), {*stored.get("sound", ())}, {*stored.get("unsound", ())}
    lock = threading.Lock()

    def save() -> None:
        if f.out:
            content = {"results": results, "sound": sorted(sound), "unsound": sorted(unsound)}
            draft = f.out.with_name(f"{f.out.name}.part")
            draft.write_text(json.dumps(content, indent=2) + "\n")
            draft.replace(f.out)

    def work(mutant: Mutant) -> None:
        if time.monotonic() - start > f.stop:
            return
        with lock:
            stages = make_stages(mutant, f.tree, coverage, times)
        result = runner.judge(mutant, stages, sorted(unsound))
        with lock:
            results[mutant.name] = result
            print(f"{result['result']:<10} {result['seconds']:7.1f} s  {mutant.name}  [{result.get('test', '')}]")
            sys.stdout.flush()
            save()

    def end(number: int, _: Any) -> None:
        runner.stop()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    left = [m for m in mutants if results.get(m.name, {}).get("result") not in (CAUGHT, NOT_CAUGHT)]
    left.sort(key=lambda m: m.name in results)  # those that timed out come last
    while left:
        with concurrent.futures.ThreadPoolExecutor(f.jobs) as pool:
            [*pool.map(work, left)]
        if time.monotonic() - start > f.stop:
            break
        verify(runner, results, sound, unsound)
        left = [m for m in mutants if results[m.name].get("test") in unsound]
        for mutant in left:
            del results[mutant.name]
        save()
    return summarise([m for m in mutants if m.name in results], results, len(mutants))


def summarise(mutants: Sequence[Mutant], results: Mapping[str, Mapping[str, Any]], number: int) -> int:
    """Print the number of each result and the mistakes that were not caught, and return the exit status."""
    counts = {kind: [m for m in mutants if results[m.name]["result"] == kind] for kind in (CAUGHT, NOT_CAUGHT)}
    counts |= {kind: [m for m in mutants if results[m.name]["result"] == kind] for kind in (TIMEOUT, BROKEN)}
    print(f"\n{len(counts[CAUGHT])} of {len(mutants)} caught; {number - len(mutants)} not run yet.")
    for kind in (NOT_CAUGHT, TIMEOUT, BROKEN):
        for m in counts[kind]:
            reason = results[m.name].get("reason", "")
            print(f"{kind}: {m.file}: {m.name}" + (f"\n    {reason}" if reason else ""))
    return int(len(counts[CAUGHT]) < number)


if __name__ == "__main__":
    sys.exit(main())
