"""A Slurm of this machine: a controller and two nodes, in a network namespace of their own, since
they listen on all interfaces."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("n1", "n2")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def namespace() -> Iterator[list[str]]:
    """Return the words that run a command in a separate network without connections."""
    name = f"sightline-launchers-{os.getpid()}"
    completed = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if completed.returncode:
        pytest.skip("needs the right to make network namespaces")
    try:
        # Not `ip netns exec`, which hides control groups.
        enter = ["nsenter", f"--net=/var/run/netns/{name}"]
        link = ["link", "add", "own0", "type", "veth", "peer", "name", "own1"]
        # An address in addition to loopback: without one, names are not resolved.
        address = ["address", "add", "10.78.0.1/24", "dev", "own0"]
        up = [["link", "set", device, "up"] for device in ("lo", "own0", "own1")]
        for words in (link, address, *up):
            subprocess.run([*enter, "ip", *words], check=True)
        yield enter
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@dataclass
class Slurm:
    folder: Path
    enter: list[str]

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self.enter, *words], env=self.environ, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        parts = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return next(word for word in parts if word.startswith("JobState=")).partition("=")[2]

    def wait(self, job: str, states: tuple[str, ...], log: Path, timeout_s: float = 240.0) -> None:
        deadline, num_ended = time.monotonic() + timeout_s, 0
        while (state := self.state(job)) not in states:
            log_text = log.read_text() if log.exists() else ""
            # A requeued job is briefly in the state CANCELLED.
            num_ended = num_ended + 1 if state in ("FAILED", "CANCELLED", "NODE_FAIL") else 0
            if num_ended >= 25 or time.monotonic() > deadline:
                logs = (self.folder / "slurmctld.log", *self.folder.glob("slurmd-*.log"))
                tails = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)
                pytest.fail(f"the job is {state}: {log_text[-4000:]}\n{tails}")
            time.sleep(0.2)

    def wait_for_steps(self, timeout_s: float = 120.0) -> None:
        """Returns when nothing runs on the nodes any more, the controller has heard of it, and what
        it starts now is distinguished by its second from what has ended."""
        deadline = time.monotonic() + timeout_s
        while subprocess.run(["pgrep", "-f", "^slurmstepd: "], capture_output=True).stdout or set(
            self.call("sinfo", "--noheader", "--Node", "--format=%T").split()
        ) != {"idle"}:
            assert time.monotonic() < deadline, "steps of the job do not end"
            time.sleep(0.2)
        time.sleep(3.0)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    if shutil.which("slurmctld") is None or shutil.which("munged") is None:
        pytest.skip("needs Slurm: apt-get install slurmctld slurmd slurm-client munge")
    with namespace() as enter:
        folder.mkdir()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        (key := folder / "munge.key").write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        nodes = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={17001 + number} CPUs=4 RealMemory=4000 State=UNKNOWN"
            for number, name in enumerate(NODES)
        ]
        text = CONFIG.format(folder=folder, host=socket.gethostname(), nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        cluster = Slurm(folder, enter)
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munge += [f"--key-file={key}", f"--pid-file={folder}/munge.pid"]
        munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        daemons = []
        try:
            for words in (munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", n] for n in NODES)):
                log = open(folder / f"{words[0]}-{len(daemons)}.out", "w")  # noqa: SIM115
                with log:
                    daemons.append(
                        subprocess.Popen(
                            [*enter, *words], env=cluster.environ, stdout=log, stderr=log
                        )
                    )
                if words is munge:
                    _wait(lambda: (folder / "munge.socket").exists())
            idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
            _wait(lambda: cluster.call(*idle, check=False) == "2")
            yield cluster
        finally:
            if len(daemons) > 1:
                cluster.call("scancel", "--full", "--user=root", check=False)
                time.sleep(1.0)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)


def _wait(there: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not there():  # type: ignore[operator]
        assert time.monotonic() < deadline, "Slurm does not start"
        time.sleep(0.1)
