from __future__ import annotations

from loop.conftest import home, warm_home

__all__ = ["home", "warm_home"]
