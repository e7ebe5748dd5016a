"""A run in a notebook: `sightline.open_run(path)`, and the live view of `train`.

It uses the dashboard's index, so that tables of many rollouts are fast. Traces are read on demand.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError, MediaError
from sightline.media import MediaRef
from sightline.message import ImagePart, Message, TextPart
from sightline.run import RunDir
from sightline.trace import Trace
from sightline.view import formatting
from sightline.view.chart import Series, line_chart, smooth
from sightline.view.dashboard import queries, rollout_page, thumbnails, trace_files
from sightline.view.dashboard.run_view import RunView
from sightline.view.run_files import get_run_dir
from sightline.view.templating import get_template

if TYPE_CHECKING:
    import pandas
    from PIL.Image import Image

_SHOWN_SIDE = 240
_MOST_SHOWN = 12
_LIVE_INTERVAL_S = 2.0
_SMOOTHED_STEPS = 10


def import_pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tables need the package pandas, which is not installed",
            "pip install 'sightline-rl[notebook]'",
        ) from error
    return pandas


def open_run(path: str | Path) -> Run:
    """Open a run directory, live or finished."""
    run_dir = get_run_dir(Path(path))
    return Run(RunView(run_dir.path.resolve().name, run_dir))


class Run:
    def __init__(self, view: RunView) -> None:
        self._view = view
        self.refresh()

    def refresh(self) -> None:
        """Read what the run has written since."""
        self._view.refresh_all()

    @property
    def name(self) -> str:
        return self._view.key

    @property
    def path(self) -> Path:
        return self._view.run_dir.path

    @property
    def settings(self) -> dict[str, Any]:
        return self._view.settings

    @property
    def problems(self) -> list[str]:
        """Missing and unreadable files."""
        return self._view.problems()

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per step. Nested tables become columns with dotted names."""
        pandas = import_pandas()

        history = self._view.history.since(0)
        frame = pandas.DataFrame(history["columns"], index=history["step"], dtype="float64")
        return frame.rename_axis("step")

    @property
    def evals(self) -> pandas.DataFrame:
        pandas = import_pandas()

        return pandas.DataFrame(self._view.history.evals)

    @property
    def rollouts(self) -> pandas.DataFrame:
        """One row per rollout, including evaluations. `rollout` takes its `file` and `number`."""
        pandas = import_pandas()

        with self._view.index.connect_readonly() as connection:
            frame = pandas.read_sql_query(
                "SELECT * FROM rollouts ORDER BY step, file, number", connection
            )
        return frame.drop(columns=["id", "start", "size"])

    @property
    def images(self) -> pandas.DataFrame:
        """One row per distinct image, with the number of its uses."""
        pandas = import_pandas()

        with self._view.index.connect_readonly() as connection:
            return pandas.read_sql_query(
                "SELECT * FROM images ORDER BY num_shown DESC, digest", connection
            )

    def mismatch(self, fresh: bool = True) -> pandas.DataFrame:
        """Return KL and ratio between sampler and trainer, by dimension and bucket.

        `fresh` selects tokens that were sampled by the version that trained on them.
        """
        pandas = import_pandas()

        with self._view.index.connect_readonly() as connection:
            found = queries.sum_mismatch(connection, None, None, fresh)["dimensions"]
        rows = [{"dimension": name, **cell} for name, cells in found.items() for cell in cells]
        return pandas.DataFrame(rows)

    def find(self, limit: int = 20, **wanted: Any) -> list[Rollout]:
        """Find rollouts by the dashboard's filters: step_from, verdict, text, sort ..."""
        with self._view.index.connect_readonly() as connection:
            found = queries.list_rollouts(connection, queries.RolloutFilter(**wanted), 0, limit)
        return [self.rollout(row["file"], row["number"]) for row in found["rows"]]

    def rollout(self, file: str, number: int) -> Rollout:
        """Return a rollout by the `file` and `number` of `rollouts`."""
        found = rollout_page.find_trace(self._view, file, number)
        if found is None:
            raise ConfigError(
                f"{self.name} has no rollout {number} in {file}", "take both from `run.rollouts`"
            )
        return Rollout(self._view, *found)

    def traces(self, step: int) -> Iterator[Trace]:
        """Yield the traces of a step. Unreadable ones are skipped."""
        for record in trace_files.read_records(self._view.run_dir.traces_of(step)):
            if not isinstance(record, str):
                yield record.trace

    def image(self, image: MediaRef | str) -> Image:
        """Return the image of a ref or digest as models see it: RGB and upright."""
        digest = image.digest if isinstance(image, MediaRef) else image
        return self._view.store.image(self._view.store.get_ref(digest))

    def __repr__(self) -> str:
        return f"<run {self.name}: {self._view.state}, step {self._view.history.last_step}>"

    def _repr_html_(self) -> str:
        found = self._view.overview()
        rows = [
            ("state", found["state"]),
            ("step", f"{found['step']} of {formatting.whole(found['steps_total'])}"),
            ("reward", formatting.fixed(found["reward"], 3)),
            ("mismatch KL", formatting.short(found["mismatch_kl"])),
            ("rollouts", formatting.whole(found["rollouts"])),
            ("images", formatting.whole(found["images"])),
            *(("missing", problem) for problem in found["problems"]),
        ]
        if found["probe"]:
            rows.append(("probe", found["probe"].get("words", "")))
        template: Any = get_template("notebook.html.jinja").module
        return str(template.run(self.name, rows)) + self._draw_curve()

    def _draw_curve(self) -> str:
        """Draw the reward, or the loss if there is no reward, as SVG."""
        found = self._view.history.since(0)
        name = "reward" if "reward" in found["columns"] else "loss"
        points = list(zip(found["step"], found["columns"].get(name, ()), strict=False))
        curves = [
            Series(name, points, "faint"),
            Series(f"mean of {_SMOOTHED_STEPS} steps", smooth(points, _SMOOTHED_STEPS)),
        ]
        if name == "reward" and (evals := self._view.history.evals):
            held_out = [(one["step"], one.get("reward")) for one in evals]
            curves.append(Series("held-out tasks", held_out, "dots", colour=1))
        return line_chart(name, curves) if points else ""


class NotebookView:
    """The live view of a run in the notebook cell that started it."""

    def __init__(self, run_dir: RunDir) -> None:
        from IPython.display import display

        self._run_dir = run_dir
        self._run: Run | None = None
        self._drawn_at = float("-inf")
        self._handle = display(display_id=True)

    def update(self) -> None:
        if time.monotonic() - self._drawn_at >= _LIVE_INTERVAL_S:
            self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._run = self._run or open_run(self._run_dir.path)
        self._run.refresh()
        self._handle.update(self._run)


def find_notebook_view(run_dir: RunDir) -> NotebookView | None:
    """Return the live view if this process runs a notebook, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return NotebookView(run_dir) if hasattr(shell, "kernel") else None


@dataclass(frozen=True)
class Rollout:
    """A rollout with its trace. A notebook shows its conversation and images."""

    view: RunView
    row: dict[str, Any]
    trace: Trace

    @property
    def images(self) -> list[MediaRef]:
        """Its images in order; for each video step, the file or the frames."""
        return [ref for node in self.trace.nodes for s in node.slots for ref in s.item.refs]

    @property
    def tokens(self) -> pandas.DataFrame:
        """One row per token of every node, with the scores of sampler and trainer."""
        pandas = import_pandas()

        scored = rollout_page.read_node_scores(self.view, self.row["step"], self.trace)
        frames = []
        for node in self.trace.nodes:
            first, score = node.sampled_start, scored.get(node.id)
            frame = pandas.DataFrame({"node": node.id, "token_id": node.token_ids.numpy()})
            frame["sampled"] = frame.index >= first
            if self.view.tokenizer is not None:
                frame["text"] = [self.view.tokenizer.decode([i]) for i in frame["token_id"]]
            for name, values in (
                ("sampler", node.logprobs.numpy()),
                ("trainer", None if score is None else score.logprobs),
                ("ratio", None if score is None else score.ratios),
                ("advantage", None if score is None else score.advantages),
            ):
                frame[name] = float("nan")
                if values is not None and len(values):
                    frame.loc[first:, name] = values.astype("float64")
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def _repr_html_(self) -> str:
        rows = [
            ("rollout", self.trace.id),
            ("verdict", self.row["verdict"] or "not judged"),
            ("reward", formatting.fixed(self.trace.reward, 3)),
            *((name, formatting.short(value)) for name, value in self.trace.rewards.items()),
        ]
        leaf = self.trace.turns[-1].id if self.trace.turns else len(self.trace.nodes) - 1
        path = self.trace.path(leaf) if self.trace.nodes else []
        shown = [self.trace.nodes[number].message for number in path[:_MOST_SHOWN]]
        messages = [(message.role, self._parts(message)) for message in shown]
        template: Any = get_template("notebook.html.jinja").module
        return str(template.rollout(rows, messages, len(path) - len(shown)))

    def _parts(self, message: Message) -> list[tuple[str, str]]:
        """Return the parts of a message: a kind, and a text or the URL of an image."""
        parts = [("text", message.reasoning)] if message.reasoning else []
        for part in message.content:
            if isinstance(part, ImagePart):
                parts.append(self._image_part(part.ref))
            elif isinstance(part, TextPart):
                parts.append(("text", part.text))
            elif part.ref is not None:
                parts.append(("text", f"[video {part.ref.digest[:12]}]"))
            else:
                parts += [self._image_part(frame.ref) for frame in part.frames]
        return parts + [("call", f"{c.name}({c.arguments})") for c in message.tool_calls]

    def _image_part(self, ref: MediaRef) -> tuple[str, str]:
        try:
            data, mime = thumbnails.make_thumbnail(self.view.store, ref.digest, _SHOWN_SIDE)
        except MediaError as error:
            return ("text", error.problem)
        return ("image", f"data:{mime};base64,{base64.b64encode(data).decode()}")
