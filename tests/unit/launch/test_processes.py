"""What a process of a run is started with."""

from __future__ import annotations

import time
from pathlib import Path

from sightline.launch.processes import Processes, Spec, environment
from sightline.monitor import RunDir

CAPS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def test_native_thread_pools_are_capped_before_a_process_starts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    processes = Processes(run_dir)
    processes.start(Spec("worker-0", ["bench", "rollout", "--serve", "http://127.0.0.1:0"], 1))
    try:
        folder = Path(f"/proc/{processes.pid('worker-0')}")
        while b"sightline" not in (folder / "cmdline").read_bytes():
            time.sleep(0.01)  # forked, and not yet the program that it becomes
        held = (folder / "environ").read_bytes().decode().split("\0")
        assert {f"{name}=1" for name in CAPS} <= set(held) and "MALLOC_ARENA_MAX=2" in held
    finally:
        processes.kill()


def test_the_caps_are_the_threads_of_the_process() -> None:
    assert {environment(3)[name] for name in CAPS} == {"3"}
