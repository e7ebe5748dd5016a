"""The live view of a run in the terminal: a panel, or plain lines where a panel cannot be drawn.

It reads `metrics.jsonl` and holds no other connection to the run.
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
from sightline.view.events import EventTail, find_number, numbers_of
from sightline.view.formatting import (
    NOTHING,
    clean,
    count,
    duration,
    fixed,
    percent,
    short,
    sparkline,
)
from sightline.view.summary import swapped_reward
from sightline.wire.event import Event

PLAIN_INTERVAL_S = 5.0
_HISTORY = 200
_PANEL_WIDTH = 80
_SPARK_WIDTH = 44
# Every process reports its own state. These two know the state of the whole run.
_PHASE_PROCESSES = ("orchestrator", "launcher")


class LiveView:
    """Call `update` a few times per second, `note` to print a line, and `close` at the end.

    No method raises when the terminal or the file is gone: the run continues without a view.
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
        # Events from before a resume are history, and are not printed again.
        for event in self._tail.read():
            self._state.add_event(event)
        self._printed_at = float("-inf")
        self._printed_step = 0
        self._live: Live | None = None
        if not plain and _can_draw(self._console):
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self) -> None:
        """Show what the run has written since the last call."""
        with contextlib.suppress(OSError):
            self._update()

    def _update(self) -> None:
        for event in self._tail.read():
            line = self._state.add_event(event)
            if not line:
                continue
            if not self._live:
                self._print_step(force=True)  # steps before the event come before its line
                self.note(line)
            elif event.kind != "state":  # the panel shows the phase
                self.note(line)
        if self._live:
            self._live.update(_panel(self._state, self._clock()), refresh=True)
        else:
            self._print_step(force=False)

    def note(self, text: str) -> None:
        """Print a line, above the panel if there is one."""
        text = clean(text)
        with contextlib.suppress(OSError):
            if self._live:
                self._console.print(Text(text))
            else:
                encoding = self._console.encoding
                text = text.encode(encoding, errors="replace").decode(encoding)
                print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        """Show the newest state one last time. May be called more than once."""
        self.update()
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None
            # The panel stays on the screen and already shows this step.
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
    is_utf = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.is_dumb_terminal and is_utf


def step_line(step: int, values: dict[str, Any]) -> str:
    """Return a `step` event as one line."""
    total = find_number(values, "steps_total")
    of_total = f"{step:>{len(f'{total:.0f}')}}/{total:.0f}" if total else f"{step}"
    return "  ".join(
        (
            f"step {of_total}",
            f"reward {fixed(find_number(values, 'reward'))}",
            f"lag {_format_lag(values)}",
            f"{count(find_number(values, 'tokens_per_s'))} tok/s",
            f"mismatch {_format_mismatch(values)}",
            f"left {duration(find_number(values, 'eta_s'))}",
            *format_failures(values, only_broken=True),
        )
    )


def eval_line(values: dict[str, Any]) -> str:
    """Return an `eval` event as one line."""
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
    """Return how many rollouts broke or were truncated, with the first reason.

    With `only_broken` the reason is left out if rollouts were truncated but none broke.
    """
    texts = [
        f"{number:.0f} {name}"
        for name in ("broken", "truncated")
        if (number := find_number(values, name))
    ]
    if texts and values.get("error") and (find_number(values, "broken") or not only_broken):
        texts[-1] += f", the first: {values['error']}"
    return texts


def goal_line(step: int, values: dict[str, Any]) -> str:
    """Return a `goal` event as one line."""
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
    """The state of a run after some events. Its size does not grow with the run."""

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
        """Add the event and return a line to print, or an empty text."""
        values = event.values
        if event.kind == "step":
            self._add_step(event)
        elif event.kind == "train":
            self.train = values
        elif event.kind == "eval":
            self.evals[clean(values.get("name", ""))] = find_number(values, "reward")
            return eval_line(values)
        elif event.kind == "goal":
            return goal_line(event.step, values)
        elif event.kind == "dropped":
            return self._add_drop(event)
        elif event.kind == "lost":
            return f"{values.get('worker', '')} was replaced ({values.get('reason', '')})"
        elif event.kind == "probe" and values.get("is_blind"):
            return f"step {event.step}: {values.get('words', '')}"
        elif event.kind in ("sink", "process"):
            return str(values.get("words", ""))
        elif event.kind == "state" and event.process in _PHASE_PROCESSES:
            return self._update_phase(values.get("phase"))
        return ""

    def _add_step(self, event: Event) -> None:
        self.step, self.values, self.step_time = event.step, event.values, event.time
        self.steps_total = int(find_number(event.values, "steps_total") or 0)
        # A replayed step replaces the lost one and all later ones.
        while self.rewards and self.rewards[-1][0] >= event.step:
            self.rewards.pop()
        reward = find_number(event.values, "reward")
        if reward is not None:
            self.rewards.append((event.step, reward))

    def _add_drop(self, event: Event) -> str:
        reason = clean(event.values.get("reason", ""))
        self.drops[reason] = self.drops.get(reason, 0) + 1
        detail = summarize_traceback(str(event.values.get("detail", "")))
        if self.drops[reason] > 1 or not detail:
            return ""
        return f"step {event.step}: dropped the first rollout ({reason}): {detail}"

    def _update_phase(self, phase: object) -> str:
        if not isinstance(phase, str) or phase == self.phase:
            return ""
        self.phase = phase
        return phase


def describe_events(events: Iterable[Event]) -> tuple[str, list[tuple[float, str]]]:
    """Return the current phase, and the lines of events other than steps with their times."""
    state = _ConsoleState("", 0.0)
    lines = [(event.time, state.add_event(event)) for event in events]
    return state.phase, [(when, line) for when, line in lines if line]


def _panel(state: _ConsoleState, now: float) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="bold", no_wrap=True, width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, text in _panel_rows(state):
        grid.add_row(label, text)
    return Panel(
        Group(_progress(state, now), Text(), grid),
        title=Text(f" {set_cell_size(clean(state.name), 40).strip()} ", style="bold"),
        title_align="left",
        subtitle=Text(f" {clean(state.phase)} ", style="cyan"),
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
        f"{duration(now - state.started)} elapsed, {duration(left)} left",
    )
    return row


def _panel_rows(state: _ConsoleState) -> list[tuple[str, RenderableType]]:
    values, train = state.values, state.train

    def cell(label: str, name: str, how: Callable[[float | None], str] = count) -> str:
        return f"{label} {how(find_number(values, name))}"

    reward = Text(f"{fixed(find_number(values, 'reward'), 3):<8}", style="bold green")
    rewards = [reward for _, reward in state.rewards]
    reward.append(sparkline(rewards, _SPARK_WIDTH), style="green")
    rows: list[tuple[str, RenderableType]] = [("reward", reward)]
    if components := numbers_of(values, "parts"):
        rows.append(("", Text(_join_table(components, _three_digits), style="dim")))
    if len(envs := _rewards_by_env(values)) > 1:
        rows.append(("", Text(_join_table(envs, _three_digits), style="dim")))
    sampler = cell("tokens/s", "tokens_per_s"), f"lag {_format_lag(values)}"
    loss, entropy = (f"{name} {short(find_number(train, name))}" for name in ("loss", "entropy"))
    images = cell("sent", "images_shown"), cell("unique", "images_stored")
    groups = cell("no signal", "no_signal_rate", percent), cell("replaced", "groups_replaced")
    in_flight = cell("rollouts", "in_flight"), cell("waiting", "waiting")
    rows += [
        ("sampler", _cells(*sampler, cell("groups ahead", "groups_ahead"))),
        ("trainer", _cells(loss, entropy, f"mismatch KL {_format_mismatch(values)}")),
        ("images", _cells(*images, cell("failed", "bad_media"))),
        ("groups", _cells(*groups, cell("truncated", "truncated"))),
        ("in flight", _cells(*in_flight)),
        ("verdicts", Text(_join_table(numbers_of(values, "verdicts"), count) or NOTHING)),
    ]
    if state.drops:
        rows.append(("dropped", Text(_join_table(state.drops, count), style="yellow")))
    if state.evals:
        rows.append(("eval", Text(_join_table(state.evals, _three_digits))))
    return rows


def _cells(*texts: str) -> Text:
    """Align the texts in columns of one width."""
    return Text("".join(set_cell_size(text, 20) for text in texts).rstrip())


def _join_table(table: dict[str, Any], how: Callable[[Any], str]) -> str:
    return " · ".join(f"{clean(name)} {how(value)}" for name, value in table.items())


def _rewards_by_env(values: dict[str, Any]) -> dict[str, float | None]:
    envs = values.get("envs")
    if not isinstance(envs, dict):
        return {}
    return {name: find_number(env, "reward") for name, env in envs.items() if isinstance(env, dict)}


def _three_digits(value: float | None) -> str:
    return fixed(value, 3)


def _format_lag(values: dict[str, Any]) -> str:
    """Return the mean and the maximum lag of the trained tokens."""
    maximum = find_number(values, "lag_max")
    if maximum is None:
        return NOTHING
    return f"{fixed(find_number(values, 'lag_mean'), 1)}/{maximum:.0f}"


def _format_mismatch(values: dict[str, Any]) -> str:
    mismatch = find_number(values, "mismatch_kl")
    return NOTHING if mismatch is None else f"{mismatch:.1e}"
