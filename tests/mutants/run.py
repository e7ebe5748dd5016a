"""The laws of the design by mutation: in a copy of the code, each mutant breaks one law in a few
words, and the tests that it names must fail: `make mutants`.

A mutant that survives, or an `old` that no longer stands once in its file, fails the target. Twelve
mutants are tried, others for another commit; all of them with `FULL=1`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
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
from sampling import take_sample  # noqa: E402

LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "examples")
NUM_SAMPLED = 12
NUM_COPIES = 2
TIMEOUT_S = 600
MISHAPS = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "SyntaxError")
"""What a mutant raises that breaks down before it breaks a law."""


@dataclass(frozen=True)
class Mutant:
    name: str
    law: int
    edit: Edit
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code of pytest: 1 where a test failed."""
    failed: str
    """The test that failed; empty where none did."""
    message: str
    printed: str


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str
    problem: str
    """Why the mutant does not count as caught; empty where it does."""
    seconds: float


def read_list() -> tuple[dict[int, str], list[Mutant]]:
    """The laws by their numbers, and the mutants."""
    found = tomllib.loads(LIST.read_text())
    laws = {int(number): words for number, words in found.pop("laws").items()}
    mutants = [
        Mutant(name, one.pop("law"), Edit(one["file"], one["old"], one["new"]), tuple(one["tests"]))
        for name, one in found.items()
    ]
    return laws, mutants


def make_copy(folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(copy: Path, tests: Sequence[str], **environment: str) -> Ended:
    """How pytest ended on `tests`, in the code of `copy`."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"),
        *(f"--junitxml={report}", f"--basetemp={copy / 'scratch'}", *tests),
    ]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "FULL")}
    path = os.pathsep.join([str(copy / "src"), *filter(None, [inherited.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=copy, env={**inherited, **environment, "PYTHONPATH": path},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
    )  # fmt: skip
    failed, message = "", ""
    if report.is_file():
        for case in ElementTree.parse(report).iter("testcase"):
            if (failure := case.find("failure")) is not None:
                failed, message = case.attrib["name"].partition("[")[0], failure.attrib["message"]
    return Ended(done.returncode, failed, message, done.stdout[-4000:])


def try_mutant(copy: Path, mutant: Mutant) -> Verdict:
    began = time.monotonic()
    file = mutant.edit.file
    mutant.edit.apply(copy)
    try:
        # What is compiled of the mutant must not serve the next one.
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
    """The verdicts on the mutants, after their tests have passed on the code as it is."""
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
    parser.add_argument("names", nargs="*", help="mutants to try, in place of a sample")
    names = parser.parse_args().names
    laws, mutants = read_list()
    chosen = take_sample(mutants, NUM_SAMPLED)
    if names:
        chosen = [mutant for mutant in mutants if mutant.name in names]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = try_mutants(chosen, Path(folder))
    print("\n| law | mutant | caught by | seconds |\n|---|---|---|---|")
    for one in sorted(verdicts, key=lambda verdict: verdict.mutant.law):
        law = f"{one.mutant.law}. {laws[one.mutant.law]}"
        caught = f"`{one.caught_by}`" if not one.problem else "nothing"
        print(f"| {law} | {one.mutant.name.replace('_', ' ')} | {caught} | {one.seconds:.0f} |")
    bad = [one for one in verdicts if one.problem]
    seconds = time.monotonic() - began
    print(f"\n{len(verdicts) - len(bad)} of {len(verdicts)} mutants caught in {seconds:.0f} s")
    for one in bad:
        print(f"\n{one.mutant.name} ({one.mutant.edit.file}): {one.problem}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
