"""The laws of the design by mutation: in a copy of the code, each mutant breaks one law in a few
words, and the tests that it names must fail: `make mutants`.

A mutant that survives, or an `old` that no longer stands once in its file, fails the target. CI
tries the first of each law; `FULL=1` tries all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from editing import Edit  # noqa: E402
from shards import take_first  # noqa: E402

LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "examples")
NUM_PER_LAW = 1
NUM_COPIES = 2
TIMEOUT_S = 600
PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes that have imported the slow libraries but none of our modules."""
PRELOADED = ["fastapi", "torch", "transformers.modeling_utils"]
MISHAPS = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
"""Errors of a mutant that crashes before it breaks a law."""


@dataclass(frozen=True)
class Mutant:
    name: str
    law: int
    edit: Edit
    tests: tuple[str, ...]

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code of pytest: 1 if a test failed."""
    failed: str
    """The test that failed, or an empty string."""
    message: str
    printed: str


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str
    problem: str
    """Return why the mutant does not count as caught, or an empty string."""
    seconds: float


def read_list() -> tuple[dict[int, str], list[Mutant]]:
    """The laws by their numbers, and the mutants."""
    loads = tomllib.loads(LIST.read_text())
    laws = {int(number): words for number, words in loads.pop("laws").items()}
    mutants = [
        Mutant(name, one["law"], Edit(one["file"], one["old"], one["new"]), tuple(one["tests"]))
        for name, one in loads.items()
    ]
    return laws, mutants


def make_copy(folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_pytest(copy: Path, words: Sequence[str], environment: dict[str, str]) -> None:
    """Run pytest in the code of `copy`, and exit with its exit code."""
    os.environ.update(environment)
    for name in ("CI", "FULL"):
        os.environ.pop(name, None)
    sys.dont_write_bytecode = bool(environment)
    path = [str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path.insert(0, path[0])
    os.chdir(copy)
    with open(copy / "printed.txt", "wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    import pytest

    code = int(pytest.main(list(words)))
    sys.stdout.flush()
    os._exit(code)


def run_tests(copy: Path, tests: Sequence[str], **environment: str) -> Ended:
    """Return the result of pytest on `tests`, in its own process and the code of `copy`."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    words = [
        *("-q", "-x", "--tb=short", "-p", "no:cacheprovider"),
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of plugins that are loaded already
        *(f"--junitxml={report}", f"--basetemp={copy / 'scratch'}", *tests),
    ]
    process = PROCESSES.Process(target=run_pytest, args=(copy, words, environment))
    process.start()
    process.join(TIMEOUT_S + 10 * len(tests))
    process.kill()
    process.join()
    failed, message = "", ""
    if report.is_file():
        for case in ElementTree.parse(report).iter("testcase"):
            if (failure := case.find("failure")) is not None:
                failed, message = case.attrib["name"].partition("[")[0], failure.attrib["message"]
    printed = (copy / "printed.txt").read_text(errors="replace")[-4000:]
    return Ended(process.exitcode or 0, failed, message, printed)


def try_mutant(copy: Path, mutant: Mutant) -> Verdict:
    began = time.monotonic()
    file = mutant.edit.file
    mutant.edit.apply(copy)
    try:
        # Compiled code of a mutant must not be used for the next one.
        ended = run_tests(copy, mutant.tests, PYTHONDONTWRITEBYTECODE="1")
    finally:
        shutil.copy2(ROOT / file, copy / file)
    problem = ""
    if ended.code == 0:
        problem = "it survives"
    elif ended.code != 1 or not ended.failed or ended.message.startswith(MISHAPS):
        problem = f"no test failed, pytest ended with {ended.code}:\n{ended.printed}"
    return Verdict(mutant, ended.failed, problem, time.monotonic() - began)


def try_mutants(mutants: Sequence[Mutant], folder: Path) -> list[Verdict]:
    """Return the verdicts on the mutants, after their tests have passed on the original code."""
    copies = [make_copy(folder / str(number)) for number in range(NUM_COPIES)]
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))

    def judge(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            verdict = try_mutant(copy, mutant)
        finally:
            free.put(copy)
        print(f"{'FAILED' if verdict.problem else 'caught'}  {mutant.name}", flush=True)
        return verdict

    with ThreadPoolExecutor(NUM_COPIES) as pool:
        shares = [(copy, tests[number::NUM_COPIES]) for number, copy in enumerate(copies)]
        for ended in pool.map(lambda share: run_tests(*share), filter(all, shares)):
            if ended.code:
                raise SystemExit(f"the tests fail without any mutant:\n{ended.printed}")
        return list(pool.map(judge, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to try, instead of the list")
    names = parser.parse_args().names
    laws, mutants = read_list()
    chosen = [
        mutant
        for law in laws
        for mutant in take_first([mutant for mutant in mutants if mutant.law == law], NUM_PER_LAW)
    ]
    if names:
        chosen = [mutant for mutant in mutants if mutant.name in names]
    began = time.monotonic()
    # Set these like tests/conftest.py, before torch is loaded.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    PROCESSES.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = try_mutants(chosen, Path(folder))
    print("\n| law | mutant | caught by | seconds |\n|---|---|---|---|")
    for one in sorted(verdicts, key=lambda verdict: verdict.mutant.law):
        law = (f"{one.mutant.law}. " if one.mutant.law else "") + laws[one.mutant.law]
        caught = f"`{one.caught_by}`" if not one.problem else "nothing"
        print(f"| {law} | {one.mutant.words} | {caught} | {one.seconds:.0f} |")
    bad = [one for one in verdicts if one.problem]
    seconds = time.monotonic() - began
    print(f"\n{len(verdicts) - len(bad)} of {len(verdicts)} mutants caught in {seconds:.0f} s")
    for one in bad:
        print(f"\n{one.mutant.name} ({one.mutant.edit.file}): {one.problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
