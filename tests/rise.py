"""Check that a run has learned: `python tests/rise.py RUN [--by 0.1]` fails unless its reward rose.

It reads the evaluations at the start and at the end from the run's summary.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--by", type=float, default=0.1, help="least rise; default: %(default)s")
    args = parser.parse_args()
    summary = json.loads((args.run / "summary.json").read_text())
    start, final = summary["reward_start"], summary["reward_final"]
    if start is None or final is None:
        return _fail(f"{args.run} was not evaluated at its start and its end; set [eval] tasks")
    if final - start < args.by:
        return _fail(
            f"the reward of {args.run} went from {start:.3f} to {final:.3f}, which is no rise of "
            f"{args.by:g}; look at the curves of its report"
        )
    print(f"the reward rose by {final - start:.3f}, from {start:.3f} to {final:.3f}")
    return 0


def _fail(problem: str) -> int:
    print(problem, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
