"""Ranks that torchrun starts: `torchrun --standalone --nproc-per-node N -m sightline rl FILE`.

    torchrun ── sightline rl (rank 0) ── server · trainer · worker-0.. · orchestrator
             ── sightline rl (rank k) ── trainer-k
      rank k waits for: the run directory and where to meet    unblocked by: rank 0

Rank 0 is the launcher of the run; every other one starts its own rank of the trainer and nothing
else. What ends one ends its `sightline rl`, and torchrun ends the others.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sightline import config as config_module
from sightline.config import RunFile
from sightline.config.trainer import is_loopback
from sightline.errors import ConfigError
from sightline.launch.processes import POLL_S, SECRET, Processes, Spec, num_cores
from sightline.launch.trainers import Trainers
from sightline.monitor import RunDir
from sightline.wire.share import name_of_rank

if TYPE_CHECKING:
    from sightline.trainer.meeting import Board


@dataclass(frozen=True)
class Place:
    """What torchrun told this process."""

    rank: int
    size: int
    local_size: int
    host: str
    port: int
    has_store: bool
    """Whether torchrun keeps a store there; otherwise rank 0 does."""

    def of(self, config: RunFile) -> RunFile:
        """The run file, for as many ranks as torchrun started."""
        if self.local_size < self.size and is_loopback(config.trainer.address):
            raise ConfigError(
                f"{self.size} ranks on several machines, and [trainer] address = "
                f"{config.trainer.address!r}",
                "set it to an address of rank 0's machine that the others reach, and a secret",
            )
        trainer = config.trainer.model_copy(update={"ranks": self.size})
        return config.model_copy(update={"trainer": trainer})


def find_place() -> Place | None:
    """None where torchrun did not start this process."""
    said = os.environ
    if "TORCHELASTIC_RUN_ID" not in said:
        return None
    return Place(
        rank=int(said["RANK"]),
        size=int(said["WORLD_SIZE"]),
        local_size=int(said["LOCAL_WORLD_SIZE"]),
        host=said["MASTER_ADDR"],
        port=int(said["MASTER_PORT"]),
        has_store=said.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


@cache
def board_of(place: Place) -> Board:
    """Kept as long as this process lives: it may be the store itself."""
    from sightline.trainer.meeting import Board

    return Board(place.host, place.port, not place.has_store and place.rank == 0)


def follow(place: Place) -> None:
    """Runs one rank other than 0 until the run ends."""
    meeting = board_of(place).read()
    run_dir = RunDir(Path(meeting.run_dir))
    name = name_of_rank(place.rank)
    threads = max(1, num_cores() // (2 * place.local_size))
    words = ["process", name, str(run_dir.path), "--threads", str(threads)]
    words += ["--rank", str(place.rank), "--ranks", str(place.size)]
    words += ["--meet", meeting.meet, "--channel", meeting.channel, "--parent", str(os.getpid())]
    processes = Processes(run_dir)
    # The rank ends when rank 0 says so; a signal to the whole run is for rank 0's launcher.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        limit_s = config_module.load(RunFile, run_dir.config).trainer.stuck_after_s
        trainers = Trainers(processes, [name], limit_s)
        processes.start(Spec(name, words, threads, {SECRET: meeting.secret}))
        while (code := processes.code(name)) is None:
            time.sleep(POLL_S)
            trainers.check()
    finally:
        processes.kill()
    if code:
        raise processes.explain(name, code)
