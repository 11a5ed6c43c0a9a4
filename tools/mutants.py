"""Mutation test of the test suite: hand-picked mistakes, applied one at a time, that the tests must catch.

python tools/mutants.py [--only=TEXT] [--jobs=2] [--tests='-m "not slow"'] [--near] [--seconds=600]

The mistakes are in mutants.toml. Each one is applied to a temporary copy of leanformer/ with links to the rest of the
repository, where pytest runs until the first failure: first the tests of the mirrored folder, then, unless --near, all
tests. A result is one of:

    caught      a test fails
    not caught  all of these tests pass
    timeout     the tests take longer than --seconds; not counted as caught
    broken      `old` does not occur exactly once in the file, or pytest cannot run

A test that also fails without the mistake catches nothing: run the suite first. Exit status 1 unless all mistakes are
caught. The cache of compiled programs, LEANFORMER_TEST_CACHE, hides no mistake, because its key is the program's text.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parent
PACKAGE = "leanformer"
COMMANDS = "cli"  # test folder of the modules at the top level of the package
CAUGHT, NOT_CAUGHT, TIMEOUT, BROKEN = "caught", "not caught", "timeout", "broken"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Mistake in a file of the package: `new` replaces `old`."""

    name: str  # the mistake in words
    file: str  # path below leanformer/
    old: str  # text that occurs exactly once in the file
    new: str

    def apply(self, source: str) -> str:
        """Return the source with the mistake. Raises ValueError unless `old` occurs exactly once."""
        if (number := source.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {number} times")
        return source.replace(self.old, self.new)

    @property
    def mirrored(self) -> str:
        """Test folder of the file."""
        return f"tests/{self.file.partition('/')[0] if '/' in self.file else COMMANDS}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a mistake, with the test that caught it or the reason why pytest could not run."""

    kind: str
    detail: str = ""


def read(path: Path = HERE / "mutants.toml") -> list[Mutant]:
    """Return the mistakes in a TOML file."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


@contextlib.contextmanager
def copy_tree(tree: Path, mutant: Mutant) -> Iterator[Path]:
    """Make a temporary copy of a tree with the mistake. Only the package is copied; the rest is linked."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as name:
        copy = Path(name)
        for path in tree.iterdir():
            if path.name != PACKAGE and path.name not in (".git", ".venv", "runs"):
                (copy / path.name).symlink_to(path.absolute())
        shutil.copytree(tree / PACKAGE, copy / PACKAGE)
        file = copy / PACKAGE / mutant.file
        file.write_text(mutant.apply(file.read_text()))
        ast.parse(file.read_text())
        yield copy


def run_tests(copy: Path, words: Sequence[str], seconds: float) -> Result:
    """Run pytest in a copy until the first failure, and end all processes that it started."""
    with tempfile.TemporaryDirectory(prefix="mutant_run_") as folder, (Path(folder) / "output").open("w+") as output:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "--tb=line", "-rfE", "-n", "0"]
        process = subprocess.Popen(
            [*command, f"--basetemp={folder}/tmp", *words],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return Result(TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode in (0, 5):  # all passed, or nothing was selected
        return Result(NOT_CAUGHT)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return Result(CAUGHT, failed[1]) if failed else Result(BROKEN, text[-2000:])


def judge(mutant: Mutant, tree: Path, arguments: Sequence[str], seconds: float, near: bool = False) -> Result:
    """Return the result of a mistake in a checkout.

    Args:
        arguments: pytest arguments for every run.
        seconds: time limit.
        near: True to run only the tests of the mirrored folder.
    """
    start, result = time.monotonic(), Result(NOT_CAUGHT)
    try:
        with copy_tree(tree, mutant) as copy:
            for place in [mutant.mirrored, "tests"][: 1 if near else 2]:
                if result.kind == NOT_CAUGHT:
                    left = seconds - (time.monotonic() - start)
                    result = run_tests(copy, [*arguments, place], left)
    except (OSError, SyntaxError, ValueError) as error:
        return Result(BROKEN, str(error))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the mistakes whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of mistakes tested in parallel")
    parser.add_argument("--tests", default='-m "not slow"', help="pytest arguments for every run")
    parser.add_argument("--near", action="store_true", help="run only the tests of the mirrored folder")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit per mistake")
    args = parser.parse_args()

    mutants = [mutant for mutant in read() if args.only in mutant.name or args.only in mutant.file]

    def work(mutant: Mutant) -> str:
        result = judge(mutant, ROOT, shlex.split(args.tests), args.seconds, args.near)
        print(f"{result.kind:<10} {mutant.file}: {mutant.name}  [{result.detail}]", flush=True)
        return result.kind

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        kinds = [*pool.map(work, mutants)]
    print(f"{kinds.count(CAUGHT)} of {len(kinds)} caught.")
    return int(kinds.count(CAUGHT) < len(kinds))


if __name__ == "__main__":
    sys.exit(main())
