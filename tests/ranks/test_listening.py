"""Ranks on one machine listen only on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sightline.launch.processes import ProcessSpec, reserve_port
from sightline.launch.torchrun import build_rank_spec
from sightline.wire.rank_messages import Rendezvous

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

RANK = """
import sys, torch
from sightline.trainer.ranks import RankInfo
from sightline.trainer.parallel_dims import ParallelDims
ranks = RankInfo(int(sys.argv[1]), 2, sys.argv[2])
ParallelDims(ranks.rank, ranks.size).join(ranks, torch.device("cpu"))
torch.distributed.barrier()
print("met", flush=True)
sys.stdin.read()
"""


def list_listening(pid: int) -> set[str]:
    """The addresses at which a process listens, as /proc writes them."""
    opened = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    inodes = {match[1] for name in opened if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_ranks_on_one_machine_listen_only_on_loopback() -> None:
    at = Rendezvous("run", f"127.0.0.1:{reserve_port('127.0.0.1', 0, 'test')}", "tcp://127.0.0.1:2")
    specs = [build_rank_spec(ProcessSpec("trainer", ["process"] * 3, 1), r, 2, at) for r in (0, 1)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), at.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **spec.variables, "OMP_NUM_THREADS": "1"},
        )
        for rank, spec in enumerate(specs)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "met\n"
        addresses = set[str]().union(*(list_listening(process.pid) for process in ranks))
    finally:
        for process in ranks:
            process.communicate("")
    assert addresses and all(address.startswith("0100007F:") for address in addresses), addresses
