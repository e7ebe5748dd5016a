"""Run a process on a machine without access to the run directory, in a partial copy of it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from sightline.config import RunFile, SftFile, dump_checked_toml, load_config
from sightline.errors import ConfigError, SightlineError, clean_text
from sightline.launch.claim import SECRET_VARIABLE, read_rights, write_private
from sightline.launch.process_spec import build_local_spec
from sightline.launch.process_watch import MARK_VARIABLE, build_mark, kill_marked
from sightline.launch.processes import STOP_TIMEOUT_S, Processes, reserve_port
from sightline.launch.torchrun import build_rank_spec, open_rendezvous
from sightline.media.stored_file import open_blobs
from sightline.regular_file import is_private, open_file, read_bytes, read_text
from sightline.run import RunDir
from sightline.run.machine import build_environ
from sightline.run.mirror import COPIED, MEDIA_TOKEN, join, write_file
from sightline.run.rights import derive_rights
from sightline.transport.listen import find_own_address
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.control import FileChange, FileChanges, QuitRequest
from sightline.wire.file import write_atomic
from sightline.wire.rank_messages import Rendezvous

POLL_S = 0.2
PREFIX = "sightline-run-"


def run_elsewhere(
    name: str, hub: str, scratch: Path, arguments: Sequence[str], threads: int
) -> int:
    """Run process `name` in a copy of the files that it needs from the run at `hub`, and return
    its exit code.

    The process is a child of this one, which only watches it. When the launcher ends, the child and
    its descendants are killed.
    """
    rights = sys.stdin.readline().strip() if sys.stdin is not None else ""
    secret = os.environ.pop(SECRET_VARIABLE, "").strip()
    if not rights and not secret:
        raise ConfigError(
            f"{name} got no rights in the run",
            f"write them to standard input, or set {SECRET_VARIABLE}",
        )
    scratch.mkdir(parents=True, exist_ok=True)
    _remove_left_copies(scratch)
    run_dir = RunDir(Path(tempfile.mkdtemp(prefix=PREFIX, dir=scratch)).resolve())
    part = run_dir.path / f"{COPIED}.part"
    mark = open(part, "w")  # noqa: SIM115
    fcntl.flock(mark, fcntl.LOCK_EX)
    part.rename(run_dir.path / COPIED)

    def clean_up() -> None:
        kill_marked(run_dir.path, [name])
        shutil.rmtree(run_dir.path, ignore_errors=True)

    def wait_for_launcher() -> None:
        sys.stdin.read()
        clean_up()
        os._exit(1)

    if rights:  # started by a launcher, which keeps standard input open
        threading.Thread(target=wait_for_launcher, daemon=True, name="parent").start()
    try:
        make_copy(name, hub, run_dir, rights or derive_rights(secret, name).encode())
        code = _run_child(name, hub, run_dir, arguments, threads)
        return code if code >= 0 else 128 - code
    except Exception as error:
        traceback.print_exc()
        problem, fix = clean_text(f"{type(error).__name__}: {error}"), f"see logs/{name}.log"
        if isinstance(error, SightlineError):
            problem, fix = error.problem, error.fix
        run_dir.error_file(name).write_text(json.dumps({"problem": problem, "fix": fix}))
        return 1
    finally:
        kill_marked(run_dir.path, [name])
        if run_dir.error_file(name).exists():
            _send_error(name, hub, run_dir)
        clean_up()
        mark.close()


def _remove_left_copies(scratch: Path) -> None:
    """Remove copies that killed processes left behind. No process holds their locks."""
    for path in scratch.glob(f"{PREFIX}*/{COPIED}"):
        with suppress(OSError):
            if not is_private(path.parent):  # anybody may write to the scratch folder
                continue
            with open_file(path, follow_links=False) as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)


def make_copy(name: str, hub: str, run_dir: RunDir, rights: str) -> None:
    """Fill `run_dir` with the files that process `name` needs from the run at `hub`. The copy
    contains the process's `rights` instead of the run's secret."""
    run_dir.make()
    write_private(run_dir.secret, rights)
    files = {file.name: file for file in join(name, hub, read_rights(run_dir, name).channel)}
    for first in ("config.toml", "run_id"):
        write_file(run_dir.path, files.pop(first), None)
    config = load_config(RunFile, run_dir.config)
    if token := files.pop(MEDIA_TOKEN, None):
        path = run_dir.inside(MEDIA_TOKEN)
        write_private(path, token.data.decode())
        config = config.with_values("media", token=f"file:{path}", control_token="")
    # The trainer removes the parts that only it fetches.
    is_trainer = name.startswith("trainer")
    blobs = open_blobs(config.media.root, config.media.read_token(for_control=is_trainer))
    for change in files.values():
        write_file(run_dir.path, change, blobs)
    folder = run_dir.path / "model" / Path(config.model.path).name
    config = config.with_values("model", path=str(folder))
    write_atomic(run_dir.config, dump_checked_toml(config).encode())


def start_other_ranks(config: RunFile | SftFile, run_dir: RunDir, threads: int) -> Rendezvous:
    """Start all trainer ranks except rank 0 on this machine. If one fails, exit."""
    at, ranks = open_rendezvous(config.trainer), config.trainer.ranks
    trainer = build_local_spec("trainer", run_dir.path, threads)
    processes = Processes(run_dir)
    for rank in range(1, ranks):
        processes.start(build_rank_spec(trainer, rank, ranks, at))

    def watch() -> None:
        while not (failed := processes.failed()):
            time.sleep(POLL_S)
        time.sleep(2 * POLL_S)  # this rank may report the failure itself
        print(processes.explain_exit(*failed[0]), file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ranks").start()
    return at


def _send_error(name: str, hub: str, run_dir: RunDir) -> None:
    """Send the process's error file to the run directory, if the orchestrator listens."""
    with suppress(OSError, SightlineError):
        file = run_dir.error_file(name)
        spoke = Spoke(hub, name, read_rights(run_dir, name).channel)
        change = FileChange(f"logs/{file.name}", read_bytes(file))
        spoke.send(control.encode(FileChanges((change,))))
        spoke.close()


def _run_child(name: str, hub: str, run_dir: RunDir, args: Sequence[str], threads: int) -> int:
    """Run the process until it ends. A server reports its address and ends with the run."""
    is_server = name.startswith("server")
    address = _choose_address(name, hub, run_dir) if is_server else None
    args = ["process", name, str(run_dir.path), "--hub", hub, *args]
    args += ["--server", read_text(address)] if address is not None else []
    child = subprocess.Popen(
        [sys.executable, "-m", "sightline", *args, "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        env=build_environ(threads) | {MARK_VARIABLE: build_mark(run_dir.path, name)},
    )
    if address is None:
        return child.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    spoke = Spoke(hub, name, read_rights(run_dir, name).channel)
    change = FileChange(f"logs/{address.name}", read_bytes(address))
    spoke.send(control.encode(FileChanges((change,))))
    try:
        while (exit_code := child.poll()) is None:
            data = spoke.receive(POLL_S)
            if data and isinstance(control.decode_from("orchestrator", data), QuitRequest):
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STOP_TIMEOUT_S)
                return 0
    finally:
        child.kill()
        child.wait()
        spoke.close()
    return exit_code


def _choose_address(name: str, hub: str, run_dir: RunDir) -> Path:
    """Write the address at which other machines reach this server, and return the file."""
    inference = load_config(RunFile, run_dir.config).inference
    host = find_own_address(urlsplit(hub).hostname or "")
    port = reserve_port(host, inference.port, "[inference] port")
    path = run_dir.server_address(name)
    path.write_text(f"{inference.scheme}://{host}:{port}")
    return path
