"""How ranks that torchrun started learn of one run: from the store that torchrun keeps for them."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

from sightline.wire.rank_messages import Rendezvous

STORE_KEY = "sightline/run"
RENDEZVOUS_TIMEOUT_S = 600.0
"""How long rank 0 may take to check the run file and to make the run directory."""


class RendezvousStore:
    def __init__(self, host: str, port: int, is_master: bool) -> None:
        self._store = TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )

    def post(self, meeting: Rendezvous) -> None:
        self._store.set(STORE_KEY, msgspec.json.encode(meeting).decode())

    def read(self) -> Rendezvous:
        """Waits for rank 0."""
        return msgspec.json.decode(self._store.get(STORE_KEY), type=Rendezvous)
