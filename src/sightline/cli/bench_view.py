"""`sightline bench view`: what a dashboard of many rollouts costs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "view",
        help="index and page a run of many rollouts",
        description="Writes a synthetic run, indexes it, and asks for pages of it.",
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the run here, and keep it")


def run(args: argparse.Namespace) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        measure(args.keep or Path(scratch) / "synthetic-001", args.rollouts)
    return 0


def measure(path: Path, num: int) -> None:
    import time

    from sightline.monitor.dashboard import queries
    from sightline.monitor.dashboard.run import RunView
    from sightline.monitor.dashboard.synthetic import Size, write_run
    from sightline.monitor.run_dir import RunDir

    def timed(began: float, cpu: float) -> str:
        return f"{time.monotonic() - began:8.2f} s  ({time.process_time() - cpu:.2f} s of CPU)"

    began, cpu = time.monotonic(), time.process_time()
    if not path.is_dir():
        write_run(path, Size(steps=max(1, num // 500), rollouts_per_step=min(num, 500)))
        print(f"written    {num:>9,} rollouts  {timed(began, cpu)}")
    view = RunView("bench", RunDir(path))
    began, cpu = time.monotonic(), time.process_time()
    view.refresh_all()
    print(f"indexed    {num:>9,} rollouts  {timed(began, cpu)}")
    began, cpu = time.monotonic(), time.process_time()
    view.refresh()
    print(f"{'nothing new':30} {timed(began, cpu)}")
    import msgspec

    wanted = {
        "first page": (queries.RolloutFilter(), 0),
        "last page": (queries.RolloutFilter(), max(0, num - 50)),
        "by mismatch": (queries.RolloutFilter(sort="mismatch"), 0),
        "by verdict and reward": (queries.RolloutFilter(verdict="train", reward_from=0.5), 0),
        "by text": (queries.RolloutFilter(text="order confirm cancel"), 0),
        "by text that is nowhere": (queries.RolloutFilter(text="xyzzy"), 0),
    }
    for name, (chosen, offset) in wanted.items():
        began, cpu = time.monotonic(), time.process_time()
        with view.index.reads() as connection:
            found = queries.rollouts(connection, chosen, offset, 50)
        size = len(msgspec.json.encode(found))
        print(f"{name:24} {found['total']:>9,} found {size:>8,} bytes {timed(began, cpu)}")
