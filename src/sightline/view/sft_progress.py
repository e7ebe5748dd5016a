"""The progress of supervised training: one line every few steps, and one per evaluation."""

from __future__ import annotations

from sightline.run import RunDir
from sightline.view.events import EventTail
from sightline.wire.event import Event

PRINT_EVERY_STEPS = 20


class SftProgress:
    def __init__(self, run_dir: RunDir, steps: int) -> None:
        self._tail = EventTail(run_dir.metrics)
        self._steps = steps

    def update(self) -> None:
        for event in self._tail.read():
            if line := self._describe(event):
                print(line, flush=True)

    def close(self) -> None: ...

    def _describe(self, event: Event) -> str:
        step, loss = event.step, event.values.get("loss")
        if loss is None:
            return ""
        if event.kind == "sft_eval":
            return f"held out, after step {step:4d}  loss {loss:.4f}"
        if event.kind == "sft" and (step % PRINT_EVERY_STEPS == 0 or step == self._steps):
            return f"sft step {step:4d}/{self._steps}  loss {loss:.4f}"
        return ""
