import io
import re

import pytest
from rich.console import Console

from sightline.run import RunDir
from sightline.view.console import LiveView, step_line
from sightline.wire.event import Event

from .event_fixtures import T0, append, evaluation, state, step, train


class Clock:
    now = T0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run_dir(tmp_path):
    found = RunDir(tmp_path / "demo")
    found.make()
    return found


def view_of(run_dir, terminal=False, plain=False):
    file = io.StringIO()
    clock = Clock()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    return LiveView(run_dir, plain, console=console, clock=clock), file, clock


def test_a_step_fits_on_one_line():
    values = step(12, eta_s=100.0, reward=0.312).values
    assert step_line(12, values) == (
        "step  12/150  reward 0.31  lag 0.4/1  1.9k tok/s  mismatch 3.2e-08  left 1:40"
    )


def test_lines_are_rate_limited_but_include_the_first_and_last(run_dir):
    view, file, clock = view_of(run_dir)
    for k in range(1, 13):
        clock.now += 1.0
        append(run_dir, step(k, 12))
        view.update()
        view.update()
    view.close()
    view.close()
    steps = [line.split("/")[0] for line in file.getvalue().splitlines()]
    assert steps == ["step  1", "step  6", "step 11", "step 12"]


def test_lines_count_broken_and_truncated_rollouts_with_causes(run_dir):
    view, file, _ = view_of(run_dir)
    failures = {"broken": 5, "truncated": 2, "error": "ValueError: no such page"}
    append(run_dir, evaluation("start", 0.5, T0, **failures))
    dropped = {
        "reason": "EnvironmentFailed",
        "detail": "Traceback\n  ...\nValueError: no such page",
    }
    for _ in range(2):
        append(run_dir, Event(T0, "orchestrator", "dropped", 1, dropped))
    append(run_dir, step(1, 2, **failures))
    append(run_dir, step(2, 2, truncated=1, broken=0, error="too long"))
    view.close()
    lines = file.getvalue().splitlines()
    assert lines[0].endswith(
        "(256 tasks, 5 broken, 2 truncated, the first: ValueError: no such page)"
    )
    why = "(EnvironmentFailed): ValueError: no such page"
    assert lines[1] == f"step 1: dropped the first rollout {why}", "and the second says nothing"
    assert lines[2].endswith("  1 truncated"), "of the last step"


def test_plain_output_has_no_control_codes_from_hostile_text(run_dir):
    view, file, _ = view_of(run_dir, terminal=True, plain=True)
    append(run_dir, evaluation("\x1b[2Jstart\r", 0.1, T0), step(1), state("\x07x", T0))
    view.close()
    printed = file.getvalue()
    assert "start" in printed
    assert all(c.isprintable() or c == "\n" for c in printed)


def test_panel_shows_the_run_state_in_80_columns(run_dir):
    view, file, clock = view_of(run_dir, terminal=True)
    append(run_dir, state("training", T0))
    for k in range(1, 31):
        append(run_dir, train(k, loss=-0.0123), step(k, mismatch_kl=None))
    # Steps that come again after a kill take the place of those that were lost.
    append(run_dir, step(25, reward=0.77, mismatch_kl=None))
    clock.now = T0 + 60
    view.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", file.getvalue())
    assert max(map(len, shown.splitlines())) == 80
    for text in (
        "demo", "training", "step 25/150", "reward    0.770", "lag 0.4/1", "tokens/s 1.9k",
        "loss -0.0123", "mismatch KL -", "train 1.6k", "sent 9.6k", "unique 36", "1:00 elapsed",
    ):  # fmt: skip
        assert text in shown, text
    assert len(re.findall("[▁▂▃▄▅▆▇█]+", shown)[-1]) == 25


def test_blind_run_and_failed_sink_print_a_line(run_dir):
    view, file, _ = view_of(run_dir)
    looks = {"is_blind": False, "words": "The model looks."}
    blind = {"is_blind": True, "words": "Blind: exchanging the images changes nothing."}
    sink = {"words": "sink wandb: did not end in time"}
    append(
        run_dir,
        Event(time=T0, process="trainer", kind="probe", step=5, values=looks),
        Event(time=T0, process="trainer", kind="probe", step=10, values=blind),
        Event(time=T0, process="launcher", kind="sink", values=sink),
    )
    view.update()
    assert file.getvalue().splitlines() == [
        "step 10: Blind: exchanging the images changes nothing.",
        "sink wandb: did not end in time",
    ]


class Gone(io.StringIO):
    """An output that was there and is no more."""

    is_gone = False

    def write(self, text):
        if self.is_gone:
            raise OSError("the terminal is gone")
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_closed_output_does_not_end_the_run(run_dir, terminal):
    file = Gone()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    view = LiveView(run_dir, plain=False, console=console, clock=Clock())
    append(run_dir, step(1, 2))
    view.update()
    file.is_gone = True
    append(run_dir, step(2, 2), evaluation("final", 0.9, T0))
    view.update()
    view.close()
