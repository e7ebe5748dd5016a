"""Faults happen to a run on two ranks, again and again; each must cost seconds, and nothing else.

    make chaos FAULTS=200          python tests/chaos/chaos.py --faults 200 --seed 0

Real processes, and moments that the seed draws. After each fault the run goes on, or it ends with
one cause and what to do, all its processes within 10 seconds, and resumes. In the end the ledger
holds every step once, with the batch that it had when it was first written, and no version came out
with other bits.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from chaos_run import ROOT, FaultNotSurvived
from faults import Fault, Survived, deal_faults
from testbeds import Testbed, open_testbeds

sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "chaos")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    kinds = set(filter(None, args.kinds.split(",")))
    began = time.monotonic()
    done: list[tuple[Fault, Survived]] = []
    broken: list[str] = []
    with open_testbeds(args.home.resolve(), rng) as testbeds:
        faults = deal_faults(rng, args.faults, kinds, testbeds.missing)
        steps = 0
        for name in dict.fromkeys(fault.testbed for fault in faults):
            ahead = [fault for fault in faults if fault.testbed == name]
            while ahead:
                try:
                    steps += play(testbeds.open(name), ahead, done)
                except FaultNotSurvived as error:  # the others are tried on a new run
                    broken.append(f"{error}")
                    print(f"NOT SURVIVED: {error}", flush=True)
    report(done, testbeds.missing, steps, time.monotonic() - began)
    if broken:
        raise SystemExit(f"{len(broken)} of {len(faults)} were not survived; the words are above")


def play(testbed: Testbed, ahead: list[Fault], done: list[tuple[Fault, Survived]]) -> int:
    """Lets the faults happen one after another, and returns the steps of the run."""
    last = "the start"
    while ahead:
        fault = ahead.pop(0)  # first: a run that cannot start must not be tried for ever
        try:
            testbed.run.ensure_running()
            last = f"{fault.kind}, {fault.what}"
            survived = fault.happen(testbed)
            testbed.run.ledger()
        except FaultNotSurvived as error:
            testbed.run.kill_all()
            raise FaultNotSurvived(f"{last}: {error}") from None
        done.append((fault, survived))
        print(
            f"{len(done):3d}  {fault.kind}: {fault.what}: {survived.outcome} "
            f"({survived.seconds:.1f} s{', ' + survived.detail if survived.detail else ''})",
            flush=True,
        )
    return testbed.run.finish()


def report(
    done: list[tuple[Fault, Survived]], missing: dict[str, str], steps: int, seconds: float
) -> None:
    rows: dict[tuple[str, str], list[Survived]] = defaultdict(list)
    for fault, survived in done:
        rows[fault.kind, fault.what].append(survived)
    print("\n| fault | of | times | went on | ended and resumed | longest |")
    print("|---|---|---:|---:|---:|---:|")
    for (kind, what), found in sorted(rows.items()):
        went_on = sum(one.outcome == "went on" for one in found)
        print(
            f"| {kind} | {what} | {len(found)} | {went_on} | {len(found) - went_on} "
            f"| {max(one.seconds for one in found):.1f} s |"
        )
    for kind, reason in missing.items():
        print(f"\nnot tried here: {kind} ({reason})")
    print(
        f"\n{len(done)} faults in {seconds:.0f} s, {steps} steps, every one trained once and on "
        "its own batch; every version that was made again has the bits that it had"
    )


if __name__ == "__main__":
    main()
