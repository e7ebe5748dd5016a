"""Inject faults into a run on two ranks. Each may cost seconds and nothing else.

    make chaos FAULTS=200
    python tests/chaos/chaos.py --faults 200 --seed 0

The processes are real, and the seed determines the moments. After each fault the run continues, or
ends within 10 seconds with one cause and a fix, and resumes. At the end, the ledger contains every
step once with its original batch, and no version was recomputed with other bits.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from pathlib import Path

from chaos_run import ROOT, FaultNotSurvived
from faults import Fault, Survived, deal_faults
from testbeds import Testbed, open_testbeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--kinds", default="", help="only these, as 'kill,disk full: logs'")
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
    last, is_compared = "the start", ahead[0].testbed == "compared"
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
    steps = testbed.run.finish()
    if is_compared:
        testbed.run.compare_with_undisturbed()
        print(f"the {steps} steps of a killed run equal those of one that was never killed")
    return steps


def report(
    done: list[tuple[Fault, Survived]], missing: dict[str, str], steps: int, seconds: float
) -> None:
    rows: dict[tuple[str, str], list[Survived]] = defaultdict(list)
    for fault, survived in done:
        rows[fault.kind, fault.what].append(survived)
    print("\n| fault | target | count | run continued | run ended and resumed | longest |")
    print("|---|---|---:|---:|---:|---:|")
    for (kind, what), outcomes in sorted(rows.items()):
        went_on = sum(outcome.outcome == "went on" for outcome in outcomes)
        print(
            f"| {kind} | {what} | {len(outcomes)} | {went_on} | {len(outcomes) - went_on} "
            f"| {max(outcome.seconds for outcome in outcomes):.1f} s |"
        )
    for kind, reason in missing.items():
        print(f"\nnot tried here: {kind} ({reason})")
    print(
        f"\n{len(done)} faults in {seconds:.0f} s, {steps} steps, every one trained once and on "
        "its own batch; every version that was made again has the bits that it had"
    )


if __name__ == "__main__":
    main()
