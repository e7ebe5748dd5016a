"""The processes of a trainer, one for each rank."""

from __future__ import annotations

import secrets
from dataclasses import replace

from sightline.config import TrainerConfig
from sightline.launch.processes import ProcessSpec, reserve_port
from sightline.wire.rank_messages import SECRET_VARIABLE, Rendezvous, rank_process_name


def open_rendezvous(settings: TrainerConfig, run_dir: str = "") -> Rendezvous:
    here = settings.address
    ports = [reserve_port(here, 0, "[trainer] address") for _ in range(2)]
    secret = settings.secret or secrets.token_hex(16)
    return Rendezvous(run_dir, f"{here}:{ports[0]}", f"tcp://{here}:{ports[1]}", secret)


def build_rank_spec(trainer: ProcessSpec, rank: int, ranks: int, at: Rendezvous) -> ProcessSpec:
    """One rank of `trainer`, whose own name is rank 0's; NAME-1 and so on are the others'."""
    name = rank_process_name(rank, trainer.name)
    words = [trainer.arguments[0], name, *trainer.arguments[2:]]
    words += ["--rank", str(rank), "--ranks", str(ranks)]
    words += ["--rendezvous", at.address, "--channel", at.channel]
    return replace(trainer, name=name, arguments=words, variables={SECRET_VARIABLE: at.secret})


def build_trainer_specs(trainer: ProcessSpec, settings: TrainerConfig) -> list[ProcessSpec]:
    """All ranks of `trainer`, on this machine."""
    if settings.ranks == 1:
        return [trainer]
    at = open_rendezvous(settings)
    return [build_rank_spec(trainer, rank, settings.ranks, at) for rank in range(settings.ranks)]
