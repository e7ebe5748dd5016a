"""The ranks of a trainer, one process each; on one machine, or as torchrun starts them:
`torchrun --standalone --nproc-per-node N -m sightline rl FILE`, or `sft FILE`.

    torchrun ── sightline rl (rank 0) ── server · trainer · worker-0.. · orchestrator
             ── sightline rl (rank k) ── trainer-k
      rank k waits for: the run directory and where to meet    unblocked by: rank 0

Rank 0 is the launcher of the run; every other one starts its own rank of the trainer and nothing
else. What ends one ends its `sightline rl`, and torchrun ends the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from sightline.config import AnyRun, TrainerConfig
from sightline.errors import ConfigError
from sightline.launch.process_spec import ProcessSpec
from sightline.launch.processes import reserve_port
from sightline.run import RunDir
from sightline.transport.listen import is_loopback
from sightline.wire.rank_messages import Rendezvous, rank_process_name

if TYPE_CHECKING:
    from sightline.compute.tcp_store import RendezvousStore


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

    def apply_to(self, config: AnyRun) -> AnyRun:
        """The run file, for as many ranks as torchrun started."""
        if self.local_size < self.size and is_loopback(config.trainer.address):
            raise ConfigError(
                f"{self.size} ranks on several machines, and [trainer] address = "
                f"{config.trainer.address!r}",
                "set it to an address of rank 0's machine that the others reach",
            )
        trainer = config.trainer.model_copy(update={"ranks": self.size})
        return config.model_copy(update={"trainer": trainer})


def find_context() -> TorchrunContext | None:
    """None where torchrun did not start this process."""
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
def get_rendezvous_store(context: TorchrunContext) -> RendezvousStore:
    """The store of torchrun; kept as long as this process lives, for it may be the store itself."""
    from sightline.compute.tcp_store import RendezvousStore

    return RendezvousStore(context.host, context.port, not context.has_store and context.rank == 0)


def open_rendezvous(settings: TrainerConfig, run_dir: str = "") -> Rendezvous:
    here = settings.address
    ports = [reserve_port(here, 0, "[trainer] address") for _ in range(2)]
    return Rendezvous(run_dir, f"{here}:{ports[0]}", f"tcp://{here}:{ports[1]}")


def build_rank_spec(trainer: ProcessSpec, rank: int, ranks: int, at: Rendezvous) -> ProcessSpec:
    """One rank of `trainer`, whose own name is rank 0's; NAME-1 and so on are the others'."""
    name = rank_process_name(rank, trainer.name)
    words = [trainer.arguments[0], name, *trainer.arguments[2:]]
    words += ["--rank", str(rank), "--ranks", str(ranks)]
    words += ["--rendezvous", at.address, "--channel", at.channel]
    is_local = is_loopback(at.address.rpartition(":")[0])
    # By itself each would listen at an address of the network, too.
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if is_local else ()
    variables = {name: "lo" for name in names if name not in os.environ}
    return replace(trainer, name=name, arguments=words, variables=variables)


def build_trainer_specs(trainer: ProcessSpec, settings: TrainerConfig) -> list[ProcessSpec]:
    """All ranks of `trainer`, on this machine."""
    if settings.ranks == 1:
        return [trainer]
    at = open_rendezvous(settings)
    return [build_rank_spec(trainer, rank, settings.ranks, at) for rank in range(settings.ranks)]


def build_local_specs(
    trainer: ProcessSpec, settings: TrainerConfig, run_dir: RunDir, context: TorchrunContext | None
) -> list[ProcessSpec]:
    """The ranks that this launcher starts; torchrun starts the others, and is told where."""
    if context is None or context.size == 1:
        return build_trainer_specs(trainer, settings)
    at = open_rendezvous(settings, str(run_dir.path.resolve()))
    get_rendezvous_store(context).post(at)
    return [build_rank_spec(trainer, 0, settings.ranks, at)]
