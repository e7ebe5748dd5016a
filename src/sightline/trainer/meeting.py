"""How ranks that torchrun started learn of one run: from the store that torchrun keeps for them."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

KEY = "sightline/run"
MEET_S = 600.0
"""How long rank 0 may take to check the run file and to make the run directory."""


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run_dir: str
    meet: str
    """host:port of torch.distributed."""
    channel: str
    secret: str


class Board:
    """The store at `host:port`."""

    def __init__(self, host: str, port: int, is_master: bool) -> None:
        self._store = TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
        )

    def post(self, meeting: Meeting) -> None:
        self._store.set(KEY, msgspec.json.encode(meeting).decode())

    def read(self) -> Meeting:
        """Waits for rank 0."""
        return msgspec.json.decode(self._store.get(KEY), type=Meeting)
