"""The table of checks, and the commands that run them.

sightline check    SETTINGS, then RL or SFT, then REHEARSAL and STORE
start of a run     SETTINGS, then RL or SFT, then STORE; the first problem raises
sightline doctor   machine.MACHINE without a run, the stages of a run directory with one; every
                   problem is reported
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from sightline.config import RunFile, SftFile, load_config
from sightline.errors import SightlineError, format_command
from sightline.families import Family
from sightline.launch.checks import Check, Finding, machine, model, run_files, servers, settings
from sightline.media import MediaStore, open_store
from sightline.run import RunDir
from sightline.trainer.checkpoint import CheckpointStore, ResumePoint, read_ledger
from sightline.view.run_status import FINISHED, PREVIEW, RUNNING, RunStatus, get_status
from sightline.wire.sample import Batch
from sightline.wire.weights import read_history

SETTINGS, RL, SFT, REHEARSAL, STORE = "settings", "rl", "sft", "rehearsal", "store"
FILES, RUN, TRAINED_RUN, RL_RUN = "files", "run", "trained run", "rl run"
"""Stages for a run directory: before reading, for all runs, for training runs, for rl runs."""


class Facts:
    """The input of checks. Each fact is read when a check first needs it."""

    def __init__(self, run_dir: RunDir, config: RunFile | SftFile | None = None) -> None:
        self.run_dir = run_dir
        if config is not None:
            self.config = config

    @cached_property
    def config(self) -> RunFile | SftFile:
        kind: type[RunFile] | type[SftFile] = SftFile if self.status.command == "sft" else RunFile
        return load_config(kind, self.run_dir.config)

    @cached_property
    def family(self) -> Family:
        return model.find_family(self.config)

    @cached_property
    def status(self) -> RunStatus:
        return get_status(self.run_dir)

    @cached_property
    def checkpoints(self) -> ResumePoint:
        return CheckpointStore(self.run_dir.checkpoints, keep=1).choose()

    @cached_property
    def store(self) -> MediaStore:
        try:
            media = self.config.media
        except SightlineError:  # the settings check reports it
            return open_store(self.run_dir.media)
        return open_store(media.root or self.run_dir.media, **media.store_options())

    @cached_property
    def batches(self) -> list[Batch]:
        return run_files.read_waiting_batches(self.run_dir, self.checkpoints)


CHECKS = (
    *machine.MACHINE_CHECKS,
    Check("extras", (SETTINGS,), "config", settings.check_extras),
    Check("devices", (SETTINGS,), "config", settings.check_devices),
    Check("model", (RL, SFT), "config family", lambda c, f: f"{f.name}: {c.model.path}"),
    Check("algorithm", (RL,), "config", settings.check_algorithm),
    Check("settings", (RL,), "config", settings.check_settings),
    Check("engine", (RL,), "config family run_dir", servers.check_engine),
    Check("ports", (RL,), "config", settings.check_port),
    Check("memory", (RL, SFT), "config", model.check_memory),
    Check("disk", (RL, SFT), "config run_dir", model.check_disk),
    Check("prompts", (REHEARSAL,), "config", model.check_prompts),
    Check("store", (STORE,), "config run_dir", model.check_store),
    Check("state", (FILES,), "status", run_files.check_state),
    Check("file types", (FILES,), "run_dir", run_files.check_file_types),
    Check("model", (RUN,), "run_dir config", run_files.check_run_model),
    Check("batches", (RL_RUN,), "batches store", run_files.check_batches),
    Check("best", (RL_RUN,), "run_dir", run_files.check_best),
    Check("checkpoints", (RUN,), "run_dir status checkpoints", run_files.check_checkpoints),
    Check("ledger", (RL_RUN,), "run_dir checkpoints",
          lambda d, c: f"the ledger of {len(read_ledger(d.ledger, c.step))} steps"),
    Check("history", (RL_RUN,), "run_dir",
          lambda d: f"the history of {len(read_history(d.weights))} versions"),
    Check("traces", (RL_RUN,), "run_dir", run_files.check_traces),
    Check("images", (RL_RUN,), "run_dir store", run_files.check_trace_images),
    Check("identity", (TRAINED_RUN,), "run_dir", run_files.check_identity),
    Check("metrics", (TRAINED_RUN,), "run_dir status", run_files.check_metrics),
    Check("export", (RUN,), "status checkpoints", run_files.check_export),
    Check("disk", (RUN,), "run_dir", run_files.check_run_disk),
    Check("processes", (RUN,), "run_dir status", run_files.check_orphans),
)  # fmt: skip

Report = Callable[[str, Finding], None]
"""Called with a check's name and one of its findings."""


def run_checks(facts: Facts, stage: str, report: Report = lambda *finding: None) -> None:
    """Run a stage's checks in order. Raise for a problem that prevents a start."""
    for check in CHECKS:
        if stage in check.stages:
            for finding in check.run(facts):
                report(check.name, finding)


@dataclass
class Diagnosis:
    """The result of `sightline doctor RUN`."""

    state: str
    problems: list[Finding] = field(default_factory=list)
    intact: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """Commands to type, each with a comment."""

    def add(self, name: str, finding: Finding) -> None:
        if not finding.fix:
            self.intact.append(finding.text)
        elif finding.text not in {problem.text for problem in self.problems}:
            self.problems.append(finding)


def examine_run(run_dir: RunDir) -> Diagnosis:
    """Check all files that a resume would read, the results, and leftover processes."""
    facts = Facts(run_dir)
    status = facts.status
    diagnosis = Diagnosis(f"{status.state} at step {status.step} of {status.steps_total or '?'}")
    run_checks(facts, FILES, diagnosis.add)
    if any(problem.blocks for problem in diagnosis.problems):
        return diagnosis
    stages = {RUN} | ({TRAINED_RUN} if status.command != PREVIEW else set())
    stages |= {RL_RUN} if status.command == "rl" else set()
    for check in CHECKS:
        if stages & set(check.stages):
            try:
                for finding in check.run(facts):
                    diagnosis.add(check.name, finding)
            except SightlineError as error:
                diagnosis.add(check.name, Finding(error.problem, error.fix, blocks=True))
    launcher, step = status.launcher, facts.checkpoints.step
    if launcher is not None and launcher.is_stopped:
        diagnosis.commands.append(f"kill -CONT {launcher.pid}    # continue the launcher")
    elif status.state == RUNNING:
        command = format_command("sightline", "status", run_dir.path)
        diagnosis.commands.append(f"{command}    # it is running")
    elif status.state != FINISHED and not any(problem.blocks for problem in diagnosis.problems):
        diagnosis.commands.append(f"{status.resume_command}    # continue after step {step}")
    if facts.checkpoints.path is not None:
        command = format_command("sightline", "export", run_dir.path, "DIR")
        diagnosis.commands.append(f"{command}    # the model of step {step}")
    return diagnosis
