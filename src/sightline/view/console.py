"""Live view of a run in the terminal: a panel, or plain lines if a panel cannot be drawn.

It only reads `metrics.jsonl` and has no other connection to the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sightline.errors import summarize_traceback
from sightline.run.run_dir import RunDir
from sightline.view.events import EventTail, find_number, numbers_of
from sightline.view.formatting import clean, count, duration, fixed, percent, short, sparkline
from sightline.view.summary import swapped_reward
from sightline.wire.event import Event

PLAIN_INTERVAL_S = 5.0
_PANEL_WIDTH = 80
_SPARK_WIDTH = 44
# Every process reports its own state. Only these two report the state of the whole run.
_PHASE_PROCESSES = ("orchestrator", "launcher")


class LiveView:
    """A live view. Call `update` a few times per second, and `close` at the end.

    No method raises if the terminal or the file is gone. The run continues without a view.
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
        # Do not print events from before a resume again.
        for event in self._tail.read():
            self._state.add_event(event)
        self._printed_at = float("-inf")
        self._printed_step = 0
        self._live: Live | None = None
        is_dumb = self._console.is_dumb_terminal or not self._console.encoding.startswith("utf")
        if self._console.is_terminal and not plain and not is_dumb:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self) -> None:
        """Show all events since the last call."""
        with contextlib.suppress(OSError):
            for event in self._tail.read():
                line = self._state.add_event(event)
                if line and not self._live:
                    self._print_step(force=True)  # print earlier steps before the event's line
                if line and not (self._live and event.kind == "state"):  # the panel shows the phase
                    self._print(line)
            if self._live:
                self._live.update(_build_panel(self._state, self._clock()), refresh=True)
            else:
                self._print_step(force=False)

    def close(self) -> None:
        """Show the newest state one last time. May be called more than once."""
        self.update()
        with contextlib.suppress(OSError):
            if self._live:
                self._printed_step = self._state.step  # the panel stays on the screen
                self._live.stop()
            else:
                self._print_step(force=True)
        self._live = None

    def _print(self, line: str) -> None:
        """Print a line, above the panel if there is one."""
        encoding = self._console.encoding
        line = clean(line).encode(encoding, errors="replace").decode(encoding)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_step(self, force: bool) -> None:
        step = self._state.step
        is_last = step == self._state.steps_total
        is_due = force or is_last or self._clock() - self._printed_at >= PLAIN_INTERVAL_S
        if step and step != self._printed_step and is_due:
            self._printed_at, self._printed_step = self._clock(), step
            self._print(step_line(step, self._state.values))


def step_line(step: int, values: dict[str, Any]) -> str:
    """Format a `step` or `sft` event as one line."""
    total = find_number(values, "steps_total")
    of_total = f"{step:>{len(f'{total:.0f}')}}/{total:.0f}" if total else f"{step}"
    left = f"left {duration(find_number(values, 'eta_s'))}"
    if "reward" not in values and "loss" in values:
        loss = fixed(find_number(values, "loss"), 4)
        return f"sft step {of_total}  loss {loss}  {left}"
    return "  ".join(
        (
            f"step {of_total}",
            f"reward {fixed(find_number(values, 'reward'))}",
            f"lag {_format_lag(values)}",
            f"{count(find_number(values, 'tokens_per_s'))} tok/s",
            f"mismatch {short(find_number(values, 'mismatch_kl'))}",
            left,
            *_format_failures(values, only_broken=True),
        )
    )


def _eval_line(values: dict[str, Any]) -> str:
    tasks = find_number(values, "tasks")
    line = f"eval {values.get('name', '')}"
    if (reward := find_number(values, "reward")) is not None:
        line += f"  reward {reward:.3f}"
    line += "".join(f"  {name} {part:.3f}" for name, part in numbers_of(values, "parts").items())
    if (swapped := swapped_reward(values)) is not None:
        line += f"  with swapped images {swapped:.3f}"
    counts = [f"{tasks:.0f} tasks"] if tasks else []
    return line + (f"  ({', '.join(counts + _format_failures(values))})" if counts else "")


def _format_failures(values: dict[str, Any], only_broken: bool = False) -> list[str]:
    """Describe how many rollouts broke or were truncated, with the first reason.

    With `only_broken`, the reason is omitted if rollouts were truncated but none broke.
    """
    names = ("broken", "truncated")
    texts = [f"{num:.0f} {name}" for name in names if (num := find_number(values, name))]
    if texts and values.get("error") and (find_number(values, "broken") or not only_broken):
        texts[-1] += f", the first: {values['error']}"
    return texts


def _goal_line(step: int, values: dict[str, Any]) -> str:
    reward, stop_at, held_out = (
        fixed(find_number(values, name), 3) for name in ("reward", "stop_at", "held_out")
    )
    line = f"step {step}: training reward {reward} reached [run] stop_at = {stop_at}; "
    if find_number(values, "held_out") is None:
        return line + "the run ends here ([eval] tasks = 0: nothing is held out)"
    if values.get("is_reached"):
        return line + f"held-out reward {held_out} confirms it: the run ends here"
    return line + f"held-out reward {held_out} does not: training continues"


class _ConsoleState:
    """The state of a run after the events so far."""

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
        self.rewards: dict[int, float] = {}
        self._dropped: set[str] = set()

    def add_event(self, event: Event) -> str:
        """Add an event and return a line to print, or an empty string."""
        step, values = event.step, event.values
        match event.kind:
            case "step" | "sft":
                self._add_step(event)
                # Supervised training has no orchestrator to report its phase.
                if event.kind == "sft" and self.phase == "starting":
                    self.phase = "training"
            case "train":
                self.train = values
            case "eval":
                self.evals[clean(values.get("name", ""))] = find_number(values, "reward")
                return _eval_line(values)
            case "goal":
                return _goal_line(step, values)
            case "dropped":
                return self._describe_first_drop(step, values)
            case "lost":
                return f"{values.get('worker', '')} was replaced ({values.get('reason', '')})"
            case "probe" if values.get("is_blind") or values.get("is_weak"):
                return f"step {step}: {values.get('words', '')}"
            case "sink" | "process":
                return str(values.get("words", ""))
            case "state" if event.process in _PHASE_PROCESSES:
                before, self.phase = self.phase, str(values.get("phase", ""))
                return self.phase if self.phase != before else ""
            case "sft_eval":
                loss = fixed(find_number(values, "loss"), 4)
                return f"held out, after step {step:4d}  loss {loss}"
        return ""

    def _add_step(self, event: Event) -> None:
        self.step, self.values, self.step_time = event.step, event.values, event.time
        self.steps_total = int(find_number(event.values, "steps_total") or 0)
        # A replayed step replaces the lost one and all later ones.
        recent = (step for step in self.rewards if event.step - _SPARK_WIDTH < step < event.step)
        self.rewards = {step: self.rewards[step] for step in recent}
        if (reward := find_number(event.values, "reward")) is not None:
            self.rewards[event.step] = reward

    def _describe_first_drop(self, step: int, values: dict[str, Any]) -> str:
        reason = str(values.get("reason", ""))
        detail = summarize_traceback(str(values.get("detail", "")))
        if reason in self._dropped or not detail:
            return ""
        self._dropped.add(reason)
        return f"step {step}: dropped the first rollout ({reason}): {detail}"


def describe_events(events: Iterable[Event]) -> tuple[str, list[tuple[float, str]]]:
    """Return the current phase, and lines with times for all events other than steps."""
    state = _ConsoleState("", 0.0)
    lines = [(event.time, state.add_event(event)) for event in events]
    return state.phase, [(when, line) for when, line in lines if line]


def _build_panel(state: _ConsoleState, now: float) -> Panel:
    total, left = state.steps_total, find_number(state.values, "eta_s")
    if left is not None:
        left = max(0.0, left - (now - state.step_time))
    progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
    progress.add_column(no_wrap=True)
    progress.add_column(ratio=1)
    progress.add_column(no_wrap=True)
    progress.add_row(
        f"step {state.step}/{total or '?'}",
        ProgressBar(total=max(total, 1), completed=state.step, complete_style="green"),
        f"{duration(now - state.started)} elapsed, {duration(left)} left",
    )
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="bold", no_wrap=True, width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, text in _list_panel_rows(state):
        grid.add_row(label, Text(clean(text)))
    return Panel(
        Group(progress, Text(), grid),
        title=Text(f" {clean(state.name)[:40]} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {clean(state.phase)} ", style="cyan"),
        subtitle_align="right",
        width=_PANEL_WIDTH,
    )


def _list_panel_rows(state: _ConsoleState) -> Iterable[tuple[str, str]]:
    values, train = state.values, state.train

    def cell(name: str, how: Callable[[float | None], str] = count) -> str:
        return how(find_number(values, name))

    def join(table: dict[str, Any], how: Callable[[Any], str]) -> str:
        return " · ".join(f"{name} {how(value)}" for name, value in table.items())

    three_digits = partial(fixed, digits=3)
    spark = sparkline(list(state.rewards.values()), _SPARK_WIDTH)
    yield "reward", f"{cell('reward', three_digits):<8}{spark}"
    if components := numbers_of(values, "parts"):
        yield "", join(components, three_digits)
    loss, entropy = (short(find_number(train, name)) for name in ("loss", "entropy"))
    rows = {
        "sampler": {"tokens/s": cell("tokens_per_s"), "lag": _format_lag(values)},
        "trainer": {"loss": loss, "entropy": entropy, "mismatch KL": cell("mismatch_kl", short)},
        "images": {
            "sent": cell("images_shown"), "unique": cell("images_stored"),
            "failed": cell("bad_media"),
        },
        "groups": {
            "no signal": cell("no_signal_rate", percent), "replaced": cell("groups_replaced"),
        },
        "verdicts": {name: count(num) for name, num in numbers_of(values, "verdicts").items()},
        "eval": {name: three_digits(reward) for name, reward in state.evals.items()},
    }  # fmt: skip
    for label, cells in rows.items():
        if cells:
            yield label, join(cells, str)


def _format_lag(values: dict[str, Any]) -> str:
    """Format the mean and the maximum lag of the trained tokens."""
    mean, maximum = (find_number(values, name) for name in ("lag_mean", "lag_max"))
    return f"{fixed(mean, 1)}/{fixed(maximum, 0)}"
