"""Start a trainer's ranks as processes on this machine, or use those that torchrun starts with
`torchrun --standalone --nproc-per-node N -m sightline rl FILE`, or `sft FILE`.

    torchrun ── sightline rl (rank 0) ── server · trainer · worker-0.. · orchestrator
             ── sightline rl (rank k) ── trainer-k
      rank k waits for: the run directory and the rendezvous    unblocked by: rank 0

Rank 0 launches the run. Every other process starts only its own trainer rank. If one ends, torchrun
ends the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from sightline.config import AnyRun, TrainerConfig
from sightline.errors import ConfigError
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.processes import reserve_port
from sightline.run import RunDir
from sightline.transport.listen import is_loopback
from sightline.wire.rank_messages import Rendezvous, rank_process_name

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RENDEZVOUS_KEY = "sightline/run"
RENDEZVOUS_TIMEOUT_S = 600.0
"""Maximum time for rank 0 to check the run file and create the run directory."""


@dataclass(frozen=True)
class TorchrunContext:
    """Settings that torchrun passes to this process."""

    rank: int
    size: int
    local_size: int
    host: str
    port: int
    has_store: bool
    """Whether torchrun hosts the store. Otherwise rank 0 hosts it."""

    def apply_to(self, config: AnyRun) -> AnyRun:
        """Return the run file with the number of ranks that torchrun started."""
        if self.local_size < self.size and is_loopback(config.trainer.address):
            raise ConfigError(
                f"{self.size} ranks on several machines cannot reach [trainer] address = "
                f"{config.trainer.address!r}",
                "set it to an address of rank 0's machine that the others reach",
            )
        return config.with_values("trainer", ranks=self.size)


def find_context() -> TorchrunContext | None:
    """Return torchrun's settings, or None if torchrun did not start this process."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    return TorchrunContext(
        rank=int(variables["RANK"]),
        size=int(variables["WORLD_SIZE"]),
        local_size=int(variables["LOCAL_WORLD_SIZE"]),
        host=variables["MASTER_ADDR"],
        port=int(variables["MASTER_PORT"]),
        has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


@cache
def get_rendezvous_store(context: TorchrunContext) -> TCPStore:
    """Return torchrun's store. It exists as long as this process, which may host it."""
    from sightline.compute.tcp_store import connect_store, listen_store

    if context.has_store or context.rank:
        return connect_store(f"{context.host}:{context.port}", RENDEZVOUS_TIMEOUT_S)
    return listen_store(context.host, context.port, RENDEZVOUS_TIMEOUT_S)


def read_rendezvous(context: TorchrunContext) -> Rendezvous:
    """Wait until rank 0 has posted the run's rendezvous, and return it."""
    return msgspec.json.decode(get_rendezvous_store(context).get(RENDEZVOUS_KEY), type=Rendezvous)


def open_rendezvous(settings: TrainerConfig, run_dir: str = "") -> Rendezvous:
    here = settings.address
    ports = [reserve_port(here, 0, "[trainer] address") for _ in range(2)]
    return Rendezvous(run_dir, f"{here}:{ports[0]}", f"tcp://{here}:{ports[1]}")


def build_rank_spec(trainer: ProcessSpec, rank: int, ranks: int, at: Rendezvous) -> ProcessSpec:
    """Return the spec of one rank. Its name is NAME for rank 0, then NAME-1 and so on."""
    name = rank_process_name(rank, trainer.name)
    arguments = [trainer.arguments[0], name, *trainer.arguments[2:]]
    arguments += ["--rank", str(rank), "--ranks", str(ranks)]
    arguments += ["--rendezvous", at.address, "--channel", at.channel]
    is_local = is_loopback(at.address.rpartition(":")[0])
    # By default, each rank would also listen on a network address.
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if is_local else ()
    variables = {name: "lo" for name in names if name not in os.environ}
    return replace(trainer, name=name, arguments=arguments, variables=variables)


def build_local_specs(
    trainer: ProcessSpec, settings: TrainerConfig, run_dir: RunDir, context: TorchrunContext | None
) -> list[ProcessSpec]:
    """Return the ranks that this launcher starts, and post the rendezvous for torchrun's ranks."""
    if settings.ranks == 1:
        return [trainer]
    at, ranks = open_rendezvous(settings, str(run_dir.path.resolve())), range(settings.ranks)
    if context is not None and context.size > 1:
        get_rendezvous_store(context).set(RENDEZVOUS_KEY, msgspec.json.encode(at).decode())
        ranks = range(1)
    return [build_rank_spec(trainer, rank, settings.ranks, at) for rank in ranks]
