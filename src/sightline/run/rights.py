"""What each process of a run may do: keys that are made from the run's secret, which only launcher
and orchestrator need to have."""

from __future__ import annotations

import msgspec

_MARK = "rights:"


class Rights(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The keys of one process."""

    channel: str = ""
    """Speaks to the orchestrator under the name of the process, and no other."""
    token: str = ""
    """Asks the run's own servers for turns."""
    control_token: str = ""
    """Leases these servers, and has them adopt weights; servers know it to check it."""
    ranks: str = ""
    """The secret of the channel between the ranks of the trainer."""

    def encode(self) -> str:
        """One line that stands in the place of the run's secret."""
        return _MARK + msgspec.json.encode(self).decode()


def derive_rights(secret: str, name: str) -> Rights:
    """The rights of the process called `name`; `secret` is that of the run, or those rights."""
    secret = secret.strip()
    if secret.startswith(_MARK):
        return msgspec.json.decode(secret.removeprefix(_MARK), type=Rights)
    # Not above: commands that start nothing do without ZMQ.
    from sightline.transport.zmq_channel import derive_key, derive_spoke_key

    channel, role = derive_spoke_key(secret, name), name.partition("-")[0]
    if role == "worker":
        return Rights(channel, derive_key(secret, "requests"))
    if role in ("server", "evaluator"):
        return Rights(channel, derive_key(secret, "requests"), derive_control_token(secret))
    return Rights(channel, ranks=derive_key(secret, "ranks"))


def derive_control_token(secret: str) -> str:
    from sightline.transport.zmq_channel import derive_key

    return derive_key(secret, "control")
