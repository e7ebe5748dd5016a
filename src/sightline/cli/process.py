"""`sightline process`: run one process of a run (used by the launcher)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import uvloop

from sightline import config
from sightline.bounded_child import die_with_parent
from sightline.config import RunFile, SftFile
from sightline.errors import SightlineError, clean_text
from sightline.launch.claim import read_rights, read_secret
from sightline.run import RunDir
from sightline.run.last_words import leave_last_words, reserve_last_words
from sightline.wire.file import FULL_DISK_CODES, build_disk_full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="server, evaluator, trainer, orchestrator, worker-N or sft")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--hub", default="", help="address of the orchestrator's channel")
    parser.add_argument("--server", nargs="+", default=[""], help="addresses of the servers")
    parser.add_argument("--evaluator", default="", help="address of the evaluation server")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--rank", type=int, default=0, help="rank of the trainer process")
    parser.add_argument("--ranks", type=int, default=1, help="number of trainer ranks")
    parser.add_argument("--rendezvous", default="", help="host:port of the rendezvous of the ranks")
    parser.add_argument("--channel", default="", help="address of rank 0's channel")
    parser.add_argument(
        "--parent", type=int, default=0, help="process id; this process ends with it"
    )
    parser.add_argument("--join", action="store_true",
                        help="fetch the run from the orchestrator and work in a copy of it; "
                        "credentials come from standard input, whose end ends the process, "
                        "or from SIGHTLINE_SECRET")  # fmt: skip
    parser.add_argument("--replaces", default="", help="how the replaced worker ended")


def run(args: argparse.Namespace) -> int:
    if args.join:
        return _run_elsewhere(args)
    run_dir = RunDir(args.run_dir.absolute())
    if args.parent:
        _end_with_parent(args.parent)
    if args.name.startswith(("trainer", "worker")):
        # Only the launcher and the orchestrator react to signals. They end the run cleanly.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    error_file = run_dir.error_file(args.name)
    reserved = reserve_last_words(error_file)
    try:
        _run_process(args, run_dir)
    except Exception as error:  # the launcher reports it as the cause
        if isinstance(error, OSError) and error.errno in FULL_DISK_CODES:
            # An error without a file name comes from `print`. All other writers name their file.
            path = error.filename or run_dir.logs / f"{args.name}.log"
            error = build_disk_full(Path(path), error)
        report = {"problem": clean_text(f"{type(error).__name__}: {error}")}
        report["fix"] = f"see {run_dir.logs / args.name}.log"
        if isinstance(error, SightlineError):
            report = {"problem": error.problem, "fix": error.fix}
        leave_last_words(reserved, error_file, report)
        with contextlib.suppress(OSError):  # a full disk
            traceback.print_exc()
        if args.name.startswith(("trainer", "sft")):
            # Native threads may still run. If the interpreter stops them at exit, they abort the
            # process, and the exit status is lost.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return 1
    finally:
        with contextlib.suppress(OSError):  # a read-only disk
            reserved.unlink(missing_ok=True)
    return 0


def _run_elsewhere(args: argparse.Namespace) -> int:
    """Run the process in a copy of the run on another machine."""
    from sightline.launch.remote import run_elsewhere

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process ends with its input or with the run
    arguments = ["--threads", str(args.threads)]
    if args.name.startswith("worker"):
        arguments += ["--server", *args.server, "--replaces", args.replaces]
    return run_elsewhere(args.name, args.hub, args.run_dir.absolute(), arguments, args.threads)


def _run_process(args: argparse.Namespace, run_dir: RunDir) -> None:
    if args.name.startswith("sft"):
        _run_trainer(args, config.load_config(SftFile, run_dir.config), run_dir)
        return
    file = config.load_config(RunFile, run_dir.config)
    media_root = file.media.root or run_dir.media
    if args.name.startswith("worker"):
        from sightline.rollout import worker
        from sightline.run.mirror import is_copy

        uvloop.run(
            worker.main(
                file, args.name, args.hub, args.server, media_root, run_dir.heartbeat(args.name),
                args.replaces, read_rights(run_dir, args.name), is_copy(run_dir),
            )
        )  # fmt: skip
    elif args.name.startswith(("server", "evaluator")):
        _run_server(args, file, run_dir, media_root)
    elif args.name.startswith("trainer"):
        _run_trainer(args, file, run_dir)
    else:
        from sightline.orchestrator import process as orchestrator

        uvloop.run(
            orchestrator.main(
                file, run_dir, media_root, args.hub, args.server, args.evaluator,
                read_secret(run_dir),
            )
        )  # fmt: skip


def _run_trainer(args: argparse.Namespace, file: RunFile | SftFile, run_dir: RunDir) -> None:
    from sightline.run.mirror import is_copy
    from sightline.trainer import process as trainer
    from sightline.trainer.ranks import RankInfo

    if is_copy(run_dir) and args.rank == 0 and file.trainer.ranks > 1:
        from sightline.launch.remote import start_other_ranks

        at = start_other_ranks(file, run_dir, args.threads)
        args.ranks, args.rendezvous, args.channel = file.trainer.ranks, at.address, at.channel
    rights = read_rights(run_dir, args.name)
    ranks = RankInfo(
        args.rank, args.ranks, args.rendezvous, args.channel, rights.ranks, rights.channel
    )
    trainer.run(file, run_dir, ranks, args.name, args.hub)


def _run_server(
    args: argparse.Namespace, file: RunFile, run_dir: RunDir, media_root: Path | str
) -> None:
    from sightline.inference.server_spec import ServerSpec
    from sightline.rollout.engines import load_engine
    from sightline.run.machine import runs_on_cpu

    server = args.evaluator if args.name == "evaluator" else args.server[0]
    host, _, port = server.partition("://")[2].rpartition(":")
    placed = {"host": host, "port": int(port), "threads": args.threads}
    rights = read_rights(run_dir, args.name)
    # Set it only for this process and for a server that it may exec.
    os.environ["SIGHTLINE_TOKEN"] = rights.token
    os.environ["SIGHTLINE_CONTROL_TOKEN"] = rights.control_token
    placed |= {"token": "env:SIGHTLINE_TOKEN", "control_token": "env:SIGHTLINE_CONTROL_TOKEN"}
    if not runs_on_cpu(file.inference.device):
        placed["gpu_memory_utilization"] = file.server_memory_share
    spec = ServerSpec(
        model=file.model,
        inference=file.inference.model_copy(update=placed),
        media_roots=(str(media_root),),
        media_token=file.media.token,
        media_cache_dir=file.media.cache_dir,
        media_cache_gb=file.media.cache_gb,
        weights_root=run_dir.weights,
        run_id=run_dir.read_id(),
        max_media_gb=file.media.max_gb,
    )
    load_engine(file.inference.engine).serve(spec)


def _end_with_parent(parent: int) -> None:
    """End this process when the launcher dies.

    Linux sends a signal. A thread also checks, for launchers that died before this call and for
    other systems.
    """
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
