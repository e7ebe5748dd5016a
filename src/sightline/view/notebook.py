"""A run in Python: `sightline.open_run(path)`, with tables as pandas data frames.

It uses the dashboard's index, so tables of many rollouts are fast. Traces are read on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError
from sightline.media import MediaRef
from sightline.trace import Trace
from sightline.trace.codec import TraceRecord, read_records
from sightline.view.dashboard import queries, rollout_page
from sightline.view.dashboard.run_view import RunView
from sightline.view.run_files import get_run_dir
from sightline.view.transcript import format_transcript

if TYPE_CHECKING:
    import pandas
    from PIL.Image import Image


def _import_pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tables need the package pandas, which is not installed",
            "run `pip install 'sightline-rl[notebook]'`",
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
        """Read new data from the run."""
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
        pandas = _import_pandas()
        history = self._view.history.since(0)
        frame = pandas.DataFrame(history["columns"], index=history["step"], dtype="float64")
        return frame.rename_axis("step")

    @property
    def evals(self) -> pandas.DataFrame:
        pandas = _import_pandas()
        return pandas.DataFrame(self._view.history.evals)

    @property
    def rollouts(self) -> pandas.DataFrame:
        """One row per rollout, including evaluations. `rollout` takes its `file` and `number`."""
        frame = self._query("SELECT * FROM rollouts ORDER BY step, file, number")
        return frame.drop(columns=["id", "start", "size"])

    @property
    def images(self) -> pandas.DataFrame:
        """One row per distinct image, with its number of uses."""
        return self._query("SELECT * FROM images ORDER BY num_shown DESC, digest")

    def _query(self, sql: str) -> pandas.DataFrame:
        with self._view.index.connect_readonly() as connection:
            return _import_pandas().read_sql_query(sql, connection)

    def mismatch(self, fresh: bool = True) -> pandas.DataFrame:
        """Return the KL and ratio between sampler and trainer, by dimension and bucket.

        `fresh` selects tokens that were sampled by the version that trained on them.
        """
        pandas = _import_pandas()
        dimensions = self._view.index.query(queries.sum_mismatch, None, None, fresh)["dimensions"]
        rows = [{"dimension": name, **cell} for name, cells in dimensions.items() for cell in cells]
        return pandas.DataFrame(rows)

    def find(self, limit: int = 20, **wanted: Any) -> list[Rollout]:
        """Find rollouts with the dashboard's filters: step_from, verdict, text, sort ..."""
        query = queries.RolloutFilter(**wanted)
        page = self._view.index.query(queries.list_rollouts, query, 0, limit)
        return [self.rollout(row["file"], row["number"]) for row in page["rows"]]

    def rollout(self, file: str, number: int) -> Rollout:
        """Return a rollout by its `file` and `number` in `rollouts`."""
        row_and_trace = rollout_page.find_trace(self._view, file, number)
        if row_and_trace is None:
            raise ConfigError(
                f"{self.name} has no rollout {number} in {file}", "take both from `run.rollouts`"
            )
        return Rollout(self._view, *row_and_trace)

    def traces(self, step: int) -> Iterator[Trace]:
        """Yield the traces of a step. Unreadable ones are skipped."""
        for record in read_records(self._view.run_dir.traces_of(step)):
            if isinstance(record, TraceRecord):
                yield record.trace

    def image(self, image: MediaRef | str) -> Image:
        """Return the image for a ref or digest as models see it: in RGB and upright."""
        digest = image.digest if isinstance(image, MediaRef) else image
        return self._view.store.image(self._view.store.get_ref(digest))

    def __repr__(self) -> str:
        return f"<run {self.name}: {self._view.state}, step {self._view.history.last_step}>"


@dataclass(frozen=True, repr=False)
class Rollout:
    """A rollout with its trace. Printing it shows the conversation."""

    view: RunView
    row: dict[str, Any]
    trace: Trace

    @property
    def images(self) -> list[MediaRef]:
        """The rollout's images in order, and for each video step the file or the frames."""
        return [ref for node in self.trace.nodes for s in node.slots for ref in s.item.refs]

    @property
    def tokens(self) -> pandas.DataFrame:
        """One row per token of every node, with the scores of sampler and trainer."""
        pandas = _import_pandas()
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

    def __repr__(self) -> str:
        return "\n".join(format_transcript(self.trace))
