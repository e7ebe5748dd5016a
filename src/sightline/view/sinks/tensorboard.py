"""Event files for TensorBoard. Requires the `tensorboard` package, but not TensorFlow."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from sightline.view.run_files import flatten_settings
from sightline.view.sinks import RolloutRow, RunIdentity

_STRING = 7  # DT_STRING of its protocol


class TensorBoard:
    def __init__(self, folder: Path, run: RunIdentity, offline: bool) -> None:
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=5)
        settings = {
            name: value
            if isinstance(value, bool | int | float | str)
            else json.dumps(value, default=str)
            for name, value in flatten_settings(run.settings)
        }
        summary = hparams_pb(settings, trial_id=run.unique_name)
        self._writer.add_event(Event(wall_time=time.time(), summary=summary))

    def _write(self, step: int, values: list[Summary.Value]) -> None:
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()  # delivered entries must survive a kill

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._write(
            step,
            [Summary.Value(tag=n.replace(".", "/"), simple_value=v) for n, v in values.items()],
        )

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        values = []
        for place, sample in enumerate(samples):
            for number, thumb in enumerate(sample.thumbs):
                encoded = io.BytesIO()
                thumb.save(encoded, format="PNG")
                image = Summary.Image(
                    height=thumb.height, width=thumb.width, colorspace=3,
                    encoded_image_string=encoded.getvalue(),
                )  # fmt: skip
                values.append(Summary.Value(tag=f"samples/{place}/{number}", image=image))
        rows = ["| rollout | verdict | reward | text |", "|---|---|---|---|"]
        rows += [
            f"| {_cell(s.trace_id)} | {s.verdict} | {s.reward} | {_cell(s.text)} |" for s in samples
        ]
        values.append(_text("samples/table", "\n".join(rows)))
        self._write(step, values)

    def close(self) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    """Return the text as a code span, so that Markdown and HTML are not interpreted."""
    plain = text.replace("`", "'").replace("|", "¦").replace("\n", " ")
    return f"`{plain}`" if plain else ""


def _text(tag: str, text: str) -> Summary.Value:
    data = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(
        dtype=_STRING,
        string_val=[text.encode(errors="replace")],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data), tensor=tensor)
