"""Sink for trackio, which stores runs on this machine. Requires the `trackio` package."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sightline.view.sinks import RolloutRow, RunIdentity


class Trackio:
    def __init__(self, folder: Path, run: RunIdentity, offline: bool) -> None:
        import trackio

        self._trackio: Any = trackio
        self._lost = ""
        self._record_warnings()
        # trackio identifies runs by name.
        trackio.init(project="sightline", name=run.unique_name, config=run.settings, resume="allow")

    def _record_warnings(self) -> None:
        """Record trackio's warnings, because it reports lost entries only in those."""
        show = warnings.showwarning

        def record(message: Warning | str, *where: Any, **more: Any) -> None:
            if str(message).startswith("trackio"):
                self._lost = self._lost or str(message)
            show(message, *where, **more)

        warnings.showwarning = record

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._trackio.log({n.replace(".", "/"): v for n, v in values.items()}, step=step)

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        import pandas

        most = max((len(sample.thumbs) for sample in samples), default=0)
        rows = []
        for s in samples:
            row: dict[str, Any] = {
                "rollout": s.trace_id, "verdict": s.verdict, "reward": s.reward, "text": s.text,
            }  # fmt: skip
            for place in range(most):
                thumb = s.thumbs[place] if place < len(s.thumbs) else None
                row[f"image {place}"] = None if thumb is None else self._trackio.Image(thumb)
            rows.append(row)
        table = self._trackio.Table(dataframe=pandas.DataFrame(rows))
        self._trackio.log({"samples": table}, step=step)

    def close(self) -> None:
        self._trackio.finish()
        if self._lost:
            raise OSError(self._lost)
