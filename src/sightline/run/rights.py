"""Keys for a run's processes, derived from the run's secret.

Only the launcher and the orchestrator need the secret itself."""

from __future__ import annotations

import msgspec

_MARK = "rights:"


class Rights(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The keys of one process."""

    channel: str = ""
    """Authenticates the process to the orchestrator under its name."""
    token: str = ""
    """Lets the process send generate requests to the run's servers."""
    control_token: str = ""
    """Lets the process lease servers and update their weights."""
    ranks: str = ""
    """Secret for the channel between the trainer's ranks."""

    def encode(self) -> str:
        """Encode the rights as one line, which a process gets instead of the run's secret."""
        return _MARK + msgspec.json.encode(self).decode()


def derive_rights(secret: str, name: str) -> Rights:
    """Return the rights of process `name`. `secret` is the run's secret or encoded rights."""
    secret = secret.strip()
    if secret.startswith(_MARK):
        return msgspec.json.decode(secret.removeprefix(_MARK), type=Rights)
    # Imported here, because most commands do not need ZMQ.
    from sightline.transport.zmq_channel import derive_key, derive_spoke_key

    channel, role = derive_spoke_key(secret, name), name.partition("-")[0]
    if role == "worker":
        return Rights(channel, derive_key(secret, "requests"))
    if role in ("server", "evaluator"):
        return Rights(channel, derive_key(secret, "requests"), derive_key(secret, "control"))
    return Rights(channel, ranks=derive_key(secret, "ranks"))
