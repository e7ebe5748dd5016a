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
from sightline.launch.processes import POLL_S, SECRET_VARIABLE, Processes, ProcessSpec, num_cores
from sightline.launch.trainer_watchdog import TrainerWatchdog
from sightline.run import RunDir
from sightline.wire.rank_messages import rank_process_name

if TYPE_CHECKING:
    from sightline.trainer.rendezvous import RendezvousStore


@dataclass(frozen=True)
class TorchrunContext:
    """What torchrun told this process."""

    rank: int
    size: int
    local_size: int
    host: str
    port: int
    has_store: bool
    """Whether torchrun keeps a store there; otherwise rank 0 does."""

    def apply_to(self, config: RunFile) -> RunFile:
        """The run file, for as many ranks as torchrun started."""
        if self.local_size < self.size and is_loopback(config.trainer.address):
            raise ConfigError(
                f"{self.size} ranks on several machines, and [trainer] address = "
                f"{config.trainer.address!r}",
                "set it to an address of rank 0's machine that the others reach, and a secret",
            )
        trainer = config.trainer.model_copy(update={"ranks": self.size})
        return config.model_copy(update={"trainer": trainer})


def find_context() -> TorchrunContext | None:
    """None where torchrun did not start this process."""
    said = os.environ
    if "TORCHELASTIC_RUN_ID" not in said:
        return None
    return TorchrunContext(
        rank=int(said["RANK"]),
        size=int(said["WORLD_SIZE"]),
        local_size=int(said["LOCAL_WORLD_SIZE"]),
        host=said["MASTER_ADDR"],
        port=int(said["MASTER_PORT"]),
        has_store=said.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


@cache
def get_board(context: TorchrunContext) -> RendezvousStore:
    """Kept as long as this process lives: it may be the store itself."""
    from sightline.trainer.rendezvous import RendezvousStore

    return RendezvousStore(context.host, context.port, not context.has_store and context.rank == 0)


def run_follower_rank(context: TorchrunContext) -> None:
    """Runs one rank other than 0 until the run ends."""
    meeting = get_board(context).read()
    run_dir = RunDir(Path(meeting.run_dir))
    name = rank_process_name(context.rank)
    threads = max(1, num_cores() // (2 * context.local_size))
    words = ["process", name, str(run_dir.path), "--threads", str(threads)]
    words += ["--rank", str(context.rank), "--ranks", str(context.size)]
    words += ["--meet", meeting.meet, "--channel", meeting.channel, "--parent", str(os.getpid())]
    processes = Processes(run_dir)
    # The rank ends when rank 0 says so; a signal to the whole run is for rank 0's launcher.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        stall_timeout_s = config_module.load_config(RunFile, run_dir.config).trainer.stall_timeout_s
        trainers = TrainerWatchdog(processes, [name], stall_timeout_s)
        processes.start(ProcessSpec(name, words, threads, {SECRET_VARIABLE: meeting.secret}))
        while (exit_code := processes.exit_code(name)) is None:
            time.sleep(POLL_S)
            trainers.check()
    finally:
        processes.kill()
    if exit_code:
        raise processes.explain_exit(name, exit_code)
