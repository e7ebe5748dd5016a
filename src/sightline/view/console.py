"""The live view of a run: what `metrics.jsonl` says, as it grows.

on a terminal      a panel that is drawn anew at every update
elsewhere          a line a step, at most one every few seconds, without control codes
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.cells import set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sightline.errors import summarize_traceback
from sightline.run.run_dir import RunDir
from sightline.view import formatting
from sightline.view.events import EventTail, find_number, numbers_of
from sightline.view.summary import swapped_reward
from sightline.wire.event import Event

PLAIN_INTERVAL_S = 5.0
_HISTORY = 200
_PANEL_WIDTH = 80
_SPARK_WIDTH = 44
# Every process tells its state; what the run as a whole is doing is known to these.
_PHASE_PROCESSES = ("orchestrator", "launcher")


class LiveView:
    """Call `update` a few times a second, `note` for a line of your own, `close` at the end.

    None of the three raises when the terminal or the file is gone: the run goes on unseen.
    """

    def __init__(
        self,
        run_dir: RunDir,
        plain: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._tail = EventTail(run_dir.metrics)
        self._state = _ConsoleState(run_dir.path.name, clock())
        # What a run that is resumed wrote before belongs to its history; it is no news.
        for event in self._tail.read():
            self._state.add_event(event)
        self._printed_at = float("-inf")
        self._printed_step = 0
        self._live: Live | None = None
        if not plain and _can_draw(self._console):
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self) -> None:
        """Shows what the run has written since."""
        with contextlib.suppress(OSError):
            self._update()

    def _update(self) -> None:
        for event in self._tail.read():
            line = self._state.add_event(event)
            if not line:
                continue
            if not self._live:
                self._print_step(force=True)  # what came before the line stands before it
                self.note(line)
            elif event.kind != "state":  # the panel shows the phase
                self.note(line)
        if self._live:
            self._live.update(_panel(self._state, self._clock()), refresh=True)
        else:
            self._print_step(force=False)

    def note(self, text: str) -> None:
        """Prints a line: above the panel, or among the lines."""
        text = formatting.clean(text)
        with contextlib.suppress(OSError):
            if self._live:
                self._console.print(Text(text))
            else:
                encoding = self._console.encoding
                text = text.encode(encoding, errors="replace").decode(encoding)
                print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Shows the newest state a last time. May be called more than once."""
        self.update()
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            # The panel stays as it is on the screen: the step in it is not to be repeated.
            self._printed_step = self._state.step
        else:
            self._print_step(force=True)

    def _print_step(self, force: bool) -> None:
        step = self._state.step
        if not step or step == self._printed_step:
            return
        is_last = step == self._state.steps_total
        if force or is_last or self._clock() - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = self._clock()
            self._printed_step = step
            self.note(step_line(step, self._state.values))


def _can_draw(console: Console) -> bool:
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and console.encoding.lower().startswith("utf")
    )


def step_line(step: int, values: dict[str, Any]) -> str:
    """A `step` event on one line."""
    total = find_number(values, "steps_total")
    of_total = f"{step:>{len(f'{total:.0f}')}}/{total:.0f}" if total else f"{step}"
    return "  ".join(
        (
            f"step {of_total}",
            f"reward {formatting.fixed(find_number(values, 'reward'))}",
            f"lag {_format_lag(values)}",
            f"{formatting.count(find_number(values, 'tokens_per_s'))} tok/s",
            f"mismatch {_format_mismatch(values)}",
            f"left {formatting.duration(find_number(values, 'eta_s'))}",
            *format_failures(values, only_broken=True),
        )
    )


def eval_line(values: dict[str, Any]) -> str:
    """An `eval` event on one line."""
    tasks = find_number(values, "tasks")
    line = f"eval {values.get('name', '')}"
    if (reward := find_number(values, "reward")) is not None:
        line += f"  reward {reward:.3f}"
    line += "".join(f"  {name} {part:.3f}" for name, part in numbers_of(values, "parts").items())
    if (swapped := swapped_reward(values)) is not None:
        line += f"  with swapped images {swapped:.3f}"
    counts = [f"{tasks:.0f} tasks"] if tasks else []
    return line + (f"  ({', '.join(counts + format_failures(values))})" if counts else "")


def format_failures(values: dict[str, Any], only_broken: bool = False) -> list[str]:
    """How many rollouts broke or were cut short, and why the first of them did.

    With `only_broken` the reason is left out where rollouts were cut short alone.
    """
    found = []
    for name in ("broken", "truncated"):
        if count := find_number(values, name):
            found.append(f"{count:.0f} {name}")
    if found and values.get("error") and (find_number(values, "broken") or not only_broken):
        found[-1] += f", the first: {values['error']}"
    return found


def goal_line(step: int, values: dict[str, Any]) -> str:
    """A `goal` event on one line."""
    reward, stop_at, held_out = (
        formatting.fixed(find_number(values, name), 3) for name in ("reward", "stop_at", "held_out")
    )
    line = f"step {step}: the rollouts earned {reward}, which is [run] stop_at = {stop_at}; "
    if find_number(values, "held_out") is None:
        return line + "the run ends here ([eval] tasks = 0: nothing was held out)"
    if values.get("is_reached"):
        return line + f"held-out tasks confirm it with {held_out}: the run ends here"
    return line + f"held-out tasks earned {held_out}: it trains on"


class _ConsoleState:
    """What the events so far amount to; its size does not grow with the run."""

    def __init__(self, name: str, started: float) -> None:
        self.name = name
        self.started = started
        self.phase = "starting"
        self.step = 0
        self.steps_total = 0
        self.step_time = started
        self.values: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        self.evals: dict[str, float | None] = {}
        self.drops: dict[str, int] = {}
        self.rewards: deque[tuple[int, float]] = deque(maxlen=_HISTORY)

    def add_event(self, event: Event) -> str:
        """Counts the event in; what is left is a line to print, if any."""
        if event.kind == "step":
            self._add_step(event)
        elif event.kind == "train":
            self.train = event.values
        elif event.kind == "eval":
            name = formatting.clean(event.values.get("name", ""))
            self.evals[name] = find_number(event.values, "reward")
            return eval_line(event.values)
        elif event.kind == "goal":
            return goal_line(event.step, event.values)
        elif event.kind == "dropped":
            reason = formatting.clean(event.values.get("reason", ""))
            self.drops[reason] = self.drops.get(reason, 0) + 1
            if self.drops[reason] == 1:
                detail = summarize_traceback(str(event.values.get("detail", "")))
                return (
                    f"step {event.step}: the first rollout is dropped ({reason}): {detail}"
                    if detail
                    else ""
                )
        elif event.kind == "lost":
            name, why = event.values.get("worker", ""), event.values.get("reason", "")
            return f"{name} was replaced ({why})"
        elif event.kind == "probe" and event.values.get("is_blind"):
            return f"step {event.step}: {event.values.get('words', '')}"
        elif event.kind in ("sink", "process"):
            return str(event.values.get("words", ""))
        elif event.kind == "state" and event.process in _PHASE_PROCESSES:
            return self._update_phase(event.values.get("phase"))
        return ""

    def _add_step(self, event: Event) -> None:
        self.step, self.values, self.step_time = event.step, event.values, event.time
        self.steps_total = int(find_number(event.values, "steps_total") or 0)
        # A step that comes again takes the place of the one that was lost, and of all behind it.
        while self.rewards and self.rewards[-1][0] >= event.step:
            self.rewards.pop()
        reward = find_number(event.values, "reward")
        if reward is not None:
            self.rewards.append((event.step, reward))

    def _update_phase(self, phase: object) -> str:
        if not isinstance(phase, str) or phase == self.phase:
            return ""
        self.phase = phase
        return phase


def describe_events(events: Iterable[Event]) -> tuple[str, list[tuple[float, str]]]:
    """The phase that a run has come to; and what happened beside its steps, each with its time."""
    state = _ConsoleState("", 0.0)
    lines = [(event.time, state.add_event(event)) for event in events]
    return state.phase, [(when, line) for when, line in lines if line]


def _panel(state: _ConsoleState, now: float) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="bold", no_wrap=True, width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, text in _panel_rows(state):
        grid.add_row(label, text)
    title = Text.assemble((f" {set_cell_size(formatting.clean(state.name), 40).strip()} ", "bold"))
    phase = Text(f" {formatting.clean(state.phase)} ", style="cyan")
    return Panel(
        Group(_progress(state, now), Text(), grid),
        title=title,
        title_align="left",
        subtitle=phase,
        subtitle_align="right",
        box=box.ROUNDED,
        width=_PANEL_WIDTH,
        padding=(0, 1),
    )


def _progress(state: _ConsoleState, now: float) -> RenderableType:
    total = state.steps_total
    left = find_number(state.values, "eta_s")
    if left is not None:
        left = max(0.0, left - (now - state.step_time))
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(
        f"step {state.step}/{total or '?'}",
        ProgressBar(total=max(total, 1), completed=state.step, complete_style="green"),
        f"{formatting.duration(now - state.started)} gone, {formatting.duration(left)} left",
    )
    return row


def _panel_rows(state: _ConsoleState) -> list[tuple[str, RenderableType]]:
    values, train = state.values, state.train
    rewards = [reward for _, reward in state.rewards]
    reward = Text(f"{formatting.fixed(find_number(values, 'reward'), 3):<8}", style="bold green")
    reward.append(formatting.sparkline(rewards, _SPARK_WIDTH), style="green")
    parts = _join_table(numbers_of(values, "parts"), lambda value: formatting.fixed(value, 3))
    rows: list[tuple[str, RenderableType]] = [("reward", reward)]
    if parts:
        rows.append(("", Text(parts, style="dim")))
    if len(envs := _rewards_by_env(values)) > 1:
        rows.append(
            ("", Text(_join_table(envs, lambda value: formatting.fixed(value, 3)), style="dim"))
        )
    rows += [
        (
            "sampler",
            _cells(
                f"tokens/s {formatting.count(find_number(values, 'tokens_per_s'))}",
                f"lag {_format_lag(values)}",
                f"groups ahead {formatting.count(find_number(values, 'groups_ahead'))}",
            ),
        ),
        (
            "trainer",
            _cells(
                f"loss {formatting.short(find_number(train, 'loss'))}",
                f"entropy {formatting.short(find_number(train, 'entropy'))}",
                f"mismatch KL {_format_mismatch(values)}",
            ),
        ),
        (
            "images",
            _cells(
                f"shown {formatting.count(find_number(values, 'images_shown'))}",
                f"stored {formatting.count(find_number(values, 'images_stored'))}",
                f"bad {formatting.count(find_number(values, 'bad_media'))}",
            ),
        ),
        (
            "groups",
            _cells(
                f"no signal {formatting.percent(find_number(values, 'no_signal_rate'))}",
                f"replaced {formatting.count(find_number(values, 'groups_replaced'))}",
                f"truncated {formatting.count(find_number(values, 'truncated'))}",
            ),
        ),
        (
            "in flight",
            _cells(
                f"rollouts {formatting.count(find_number(values, 'in_flight'))}",
                f"waiting {formatting.count(find_number(values, 'waiting'))}",
                f"MB {_format_megabytes(values, 'bytes_in_flight')}",
            ),
        ),
        (
            "verdicts",
            Text(
                _join_table(numbers_of(values, "verdicts"), formatting.count) or formatting.NOTHING
            ),
        ),
    ]
    if state.drops:
        rows.append(("dropped", Text(_join_table(state.drops, formatting.count), style="yellow")))
    if state.evals:
        rows.append(
            ("eval", Text(_join_table(state.evals, lambda value: formatting.fixed(value, 3))))
        )
    return rows


def _cells(*texts: str) -> Text:
    """Texts under one another's in all rows, so that the eye finds them again."""
    return Text("".join(set_cell_size(text, 20) for text in texts).rstrip())


def _join_table(table: dict[str, Any], how: Callable[[Any], str]) -> str:
    return " · ".join(f"{formatting.clean(name)} {how(value)}" for name, value in table.items())


def _rewards_by_env(values: dict[str, Any]) -> dict[str, float | None]:
    envs = values.get("envs")
    if not isinstance(envs, dict):
        return {}
    return {name: find_number(env, "reward") for name, env in envs.items() if isinstance(env, dict)}


def _format_megabytes(values: dict[str, Any], name: str) -> str:
    size = find_number(values, name)
    return formatting.NOTHING if size is None else f"{size / 1e6:.1f}"


def _format_lag(values: dict[str, Any]) -> str:
    """Mean and greatest lag of the trained tokens."""
    greatest = find_number(values, "lag_max")
    if greatest is None:
        return formatting.NOTHING
    return f"{formatting.fixed(find_number(values, 'lag_mean'), 1)}/{greatest:.0f}"


def _format_mismatch(values: dict[str, Any]) -> str:
    mismatch = find_number(values, "mismatch_kl")
    return formatting.NOTHING if mismatch is None else f"{mismatch:.1e}"
