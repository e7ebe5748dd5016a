import io
import re

import pytest
from rich.console import Console

from sightline.run import RunDir
from sightline.view.console import LiveView, describe_events, step_line
from sightline.view.events import read_events
from sightline.wire.event import Event

from .event_fixtures import T0, append, evaluation, state, step, train


class Clock:
    now = T0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run_dir(tmp_path):
    new_run_dir = RunDir(tmp_path / "demo")
    new_run_dir.make()
    return new_run_dir


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


def test_supervised_run_shows_its_progress_with_the_time_left(run_dir):
    view, file, clock = view_of(run_dir, plain=True)
    for k in range(1, 13):
        clock.now += 1.0
        values = {"loss": 1 / k, "steps_total": 12, "eta_s": 12.0 - k}
        append(run_dir, Event(time=clock.now, process="sft", kind="sft", step=k, values=values))
        view.update()
    view.close()
    assert file.getvalue().splitlines() == [
        "sft step  1/12  loss 1.0000  left 0:11",
        "sft step  6/12  loss 0.1667  left 0:06",
        "sft step 11/12  loss 0.0909  left 0:01",
        "sft step 12/12  loss 0.0833  left 0:00",
    ]
    assert describe_events(read_events(run_dir.metrics)) == ("training", [])


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
    # Steps that are replayed after a kill replace the lost ones.
    append(run_dir, step(25, reward=0.77, mismatch_kl=None))
    clock.now = T0 + 60
    view.close()
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", file.getvalue())
    assert max(map(len, screen.splitlines())) == 80
    for text in (
        "demo", "training", "step 25/150", "reward    0.770", "lag 0.4/1", "tokens/s 1.9k",
        "loss -0.0123", "mismatch KL -", "train 1.6k", "sent 9.6k", "unique 36", "1:00 elapsed",
    ):  # fmt: skip
        assert text in screen, text
    assert len(re.findall("[▁▂▃▄▅▆▇█]+", screen)[-1]) == 25


def test_blind_run_and_failed_sink_print_a_line(run_dir):
    view, file, _ = view_of(run_dir)
    looks = {"is_blind": False, "words": "The model looks."}
    weak = {"is_blind": False, "is_weak": True, "words": "The model barely uses its images."}
    blind = {"is_blind": True, "words": "Blind: exchanging the images changes nothing."}
    sink = {"words": "sink wandb: did not end in time"}
    append(
        run_dir,
        Event(time=T0, process="trainer", kind="probe", step=5, values=looks),
        Event(time=T0, process="trainer", kind="probe", step=7, values=weak),
        Event(time=T0, process="trainer", kind="probe", step=10, values=blind),
        Event(time=T0, process="launcher", kind="sink", values=sink),
    )
    view.update()
    assert file.getvalue().splitlines() == [
        "step 7: The model barely uses its images.",
        "step 10: Blind: exchanging the images changes nothing.",
        "sink wandb: did not end in time",
    ]


class Gone(io.StringIO):
    """An output stream that was closed."""

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
