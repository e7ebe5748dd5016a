"""The processes of a run, as each launcher would start them: `sightline rl --dry-run`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sightline.cli.main import main
from sightline.config import RunFile, load_config
from sightline.launch.run_plan import Endpoints, plan_run
from sightline.run.rights import derive_rights

RUN = """
[run]
name = "Job_1"
dir = "{folder}/runs"
[model]
path = "{folder}/tiny"
[media]
root = "s3://bucket/images"
[env]
name = "vowels:Vowels"
[rollout]
workers = 2
[trainer]
publish = "store"
device = "cuda"
ranks = 2
[inference]
device = "cuda"
[eval]
tasks = 0
[launch]
num_servers = 2
address = "10.0.0.1"
[launch.resources]
"server*" = {{cpus = 8, gpus = 1, memory_gb = 64}}
trainer = {{cpus = 16}}
[launch.kubernetes]
image = "registry.example/sightline:cuda"
volume_claim = "runs"
env_from = "tokens"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    return tmp_path / "run.toml"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rl", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rl", *words, "--dry-run"]) != 0
    return capsys.readouterr().err


def test_plan_lists_placement_and_resources_of_each_process(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dry_run(capsys, str(file), "launch.num_servers=1", "--on", "ray")
    assert "server (on ray): 8 CPU, 1 GPU, 64 GB\n" in plan
    assert "trainer (on ray): 16 CPU, 2 GPU\n" in plan
    assert "worker-1 (on ray): 1 CPU, 0 GPU\n" in plan
    assert "orchestrator (here): 1 CPU, 0 GPU\n" in plan
    assert "--bundle 3 -- python3 -m sightline process worker-1" in plan
    assert not (file.parent / "runs").exists()


def test_local_plan_starts_every_process_locally(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "tiny"\n[env]\nname = "vowels"\n')
    plan = dry_run(capsys, str(tmp_path / "run.toml"), "rollout.workers=1")
    assert [line.split()[0] for line in plan.splitlines()[::2]] == [
        "server", "trainer", "worker-0", "orchestrator",
    ]  # fmt: skip
    assert plan.count("(here)") == 4


def test_plan_of_a_resume_names_the_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "elsewhere"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text('[model]\npath = "tiny"\n[env]\nname = "vowels"\n')
    plan = dry_run(capsys, "--resume", str(run_dir), "rollout.workers=1")
    assert f"process orchestrator {run_dir} " in plan


def test_patterns_match_only_remote_capable_processes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text()
    for pattern in ("*", "orchestrator", "evaluator"):
        file.write_text(f'{text}[launch.hosts]\n"{pattern}" = "ssh box"\n')
        assert "runs next to the launcher" in refuse(capsys, str(file))
    for pattern in ("trainr", "worker-2", "server-2"):
        file.write_text(f'{text}[launch.hosts]\n"{pattern}" = "ssh box"\n')
        message = refuse(capsys, str(file), "launch.num_servers=1")
        assert f"hosts: '{pattern}'" in message and "server, trainer, worker-0, worker-1" in message
    file.write_text(text.replace("trainer = {", "trainr = {"))
    assert "resources: 'trainr'" in refuse(capsys, str(file), "--on", "ray")
    file.write_text(text.replace("trainer = {", "orchestrator = {"))
    assert "resources: 'orchestrator'" in refuse(capsys, str(file), "--on", "ray")
    assert "#SBATCH --cpus-per-task=16\n" in dry_run(capsys, str(file), "--on", "slurm")


def test_remote_workers_have_their_own_interpreter(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch.num_servers=1", "rollout.python=/envs/bin/python", "--on", "ray"]
    plan = dry_run(capsys, str(file), *words)
    assert "-- /envs/bin/python -m sightline process worker-1" in plan
    assert "-- python3 -m sightline process trainer" in plan


def test_slurm_job_runs_its_processes_as_steps(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(file), "--on", "slurm", "run.steps=7", "launch.slurm.nodes=1"]
    plan = dry_run(capsys, *words)
    for option in ("requeue", "signal=B:USR1@60", "ntasks=1", "cpus-per-task=35",
                   "gres=gpu:4", "nodes=1"):  # fmt: skip
        assert f"#SBATCH --{option}\n" in plan
    assert "hetjob" not in plan and "--het-group" not in plan
    launcher = next(line for line in plan.splitlines() if line.startswith("exec "))
    assert "run.steps=7" in launcher and launcher.endswith('--job "$SLURM_JOB_ID"')
    trainer = next(line for line in plan.splitlines() if "process trainer" in line)
    assert "srun --job-name=trainer" in trainer and "--gpus=2" in trainer
    worker = next(line for line in plan.splitlines() if "process worker-0" in line)
    assert "--gres=none" in worker and "--cpus-per-task=1 " in worker
    script = plan.partition("# Job_1.sbatch\n")[2].partition("\n\nserver ")[0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_components_of_a_heterogeneous_job_have_their_own_options(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text().replace("{cpus = 16}", '{cpus = 16, slurm = "--partition=big"}')
    file.write_text(text + '[launch.slurm]\naccount = "a"\nrequeue = false\n')
    plan = dry_run(capsys, str(file), "--on", "slurm")
    parts = first, second, third = plan.split("#SBATCH hetjob\n")
    assert all("#SBATCH --account=a\n" in part for part in parts)
    assert "--ntasks=3\n" in first and "--no-requeue\n" in first and "requeue=" not in plan
    assert "--ntasks=2\n" in second and "--gpus-per-task=1\n" in second
    assert "--ntasks=1\n" in third and "#SBATCH --partition=big\n" in third
    steps = [line.partition("--het-group=")[2][0] for line in plan.splitlines() if "srun" in line]
    assert steps == ["1", "1", "2", "0", "0"]
    assert "nodes = 1" in refuse(capsys, str(file), "--on", "slurm", "launch.slurm.nodes=1")


def test_values_in_a_batch_script_are_quoted(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dry_run(capsys, str(file), "--on", "slurm", "launch.slurm.comment=a b; $(c)")
    assert "#SBATCH --comment='a b; $(c)'\n" in plan
    broken = refuse(capsys, str(file), "--on", "slurm", 'launch.slurm.comment="a\\n#SBATCH -A b"')
    assert "has a line break" in broken


def test_job_requests_exactly_its_processes_resources(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = """trainer = {cpus = 32, gpus = 8, memory_gb = 400}
"worker-*" = {cpus = 2, memory_gb = 4}"""
    file.write_text(file.read_text().replace("trainer = {cpus = 16}", table))
    plan = dry_run(capsys, str(file), "--on", "slurm", "rollout.workers=32")
    cpus, memory = 0, []
    for part in plan.split("#SBATCH hetjob\n"):
        own = dict(line[10:].split("=", 1) for line in part.splitlines() if "SBATCH --" in line
                   and "=" in line)  # fmt: skip
        cpus += int(own["ntasks"]) * int(own["cpus-per-task"])
        per_cpu = int(own.get("mem-per-cpu", "0M")[:-1]) * 2**20 / 1e9
        memory.append(round(int(own["ntasks"]) * int(own["cpus-per-task"]) * per_cpu))
    assert cpus == 1 + 2 * 8 + 32 + 32 * 2 and memory == [0, 128, 400, 128]
    steps = [line for line in plan.splitlines() if "srun" in line]
    assert "--mem=381469M" in next(line for line in steps if "process trainer" in line)
    assert "orchestrator (in the job's batch script): 1 CPU" in plan and "(here)" not in plan


def read_manifests(capsys: pytest.CaptureFixture[str], file: Path) -> list[dict[str, Any]]:
    plan = dry_run(capsys, str(file), "--on", "kubernetes")
    return list(yaml.safe_load_all(plan))


def test_manifests_have_a_job_for_each_process_and_no_secret(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = read_manifests(capsys, file)
    names = [f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in manifests]
    assert names == [
        "ConfigMap job-1-run", "Service job-1", "Job job-1-launcher", "Job job-1-server",
        "Job job-1-server-1", "Job job-1-trainer", "Job job-1-worker-0", "Job job-1-worker-1",
    ]  # fmt: skip
    by_name = {manifest["metadata"]["name"]: manifest for manifest in manifests}
    trainer = by_name["job-1-trainer"]["spec"]["template"]["spec"]["containers"][0]
    assert trainer["resources"]["limits"] == {"cpu": "16", "nvidia.com/gpu": "2"}
    assert trainer["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    for name in ("launcher", "trainer", "worker-1"):
        pod = by_name[f"job-1-{name}"]["spec"]["template"]["spec"]["containers"][0]
        source = {"secretKeyRef": {"name": "job-1-secret", "key": name}}
        assert pod["env"] == [{"name": "SIGHTLINE_SECRET", "valueFrom": source}]
    assert "tcp://job-1:7000" in trainer["command"] and "--join" in trainer["command"]
    assert by_name["job-1-run"]["data"]["run.toml"] == file.read_text()


def test_workers_elsewhere_do_not_inherit_the_tokens_of_services(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orchestrator gives each worker its own token of the media service."""
    media = 'root = "http://10.0.0.1:8100"\ntoken = "env:MEDIA_TOKEN"\ncontrol_token = "env:OWNER"'
    text = file.read_text().replace('root = "s3://bucket/images"', media)
    file.write_text(text)
    hidden = [{"name": name, "value": ""} for name in ("MEDIA_TOKEN", "OWNER")]
    for manifest in read_manifests(capsys, file)[2:]:
        name = manifest["metadata"]["name"]
        pod = manifest["spec"]["template"]["spec"]["containers"][0]
        assert pod["env"][1:] == (hidden if "-worker-" in name else []), name
        assert pod["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    config = load_config(RunFile, file, ["launch.on=slurm"])
    for spec in plan_run(config, Path(), "id", Endpoints("tcp://10.0.0.1:7000")):
        is_worker = spec.name.startswith("worker-")
        assert spec.variables == ({"MEDIA_TOKEN": "", "OWNER": ""} if is_worker else {})


SHARDED = ("engine=vllm", "tensor_parallel_size=2", "data_parallel_size=2")


@pytest.mark.parametrize(
    ("process", "needed", "words"),
    [
        ("trainer", 2, []),
        ("server*", 4, [f"inference.{word}" for word in SHARDED]),
    ],
)
def test_fewer_gpus_than_a_process_uses_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str], process: str, needed: int, words: list[str]
) -> None:
    own = '"server*" = {cpus = 8, gpus = 1, memory_gb = 64}\ntrainer = {cpus = 16}\n'
    text = file.read_text()
    assert own in text
    for on in ("ray", "slurm", "kubernetes"):
        for gpus in (0, needed - 1):
            file.write_text(text.replace(own, f'"{process}" = {{gpus = {gpus}}}\n'))
            message = refuse(capsys, str(file), "--on", on, *words)
            assert f"gpus = {gpus}" in message and f"which needs {needed} on its node" in message
            assert f"set gpus = {needed}" in message


def test_job_refused_by_sbatch_leaves_no_script(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = file.parent / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    for path, reason in ((f"{file.parent}:{os.environ['PATH']}", "invalid partition"), ("", "")):
        monkeypatch.setenv("PATH", path)
        assert main(["rl", str(file), "--on", "slurm"]) == 2
        assert f"sbatch refused the job: {reason}" in capsys.readouterr().err
    assert not list((file.parent / "runs").iterdir())


def test_settings_unusable_on_a_cluster_are_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text()
    on = ("--on", "slurm")
    assert "[media] root" in refuse(capsys, str(file), "media.root=", *on)
    assert "publish" in refuse(capsys, str(file), "trainer.publish=files", *on)
    assert "how many GPUs" in refuse(capsys, str(file), "trainer.device=auto", *on)
    assert "[eval] every" in refuse(capsys, str(file), "eval.every=2", "eval.tasks=4", *on)
    assert "one server on this machine" in refuse(capsys, str(file))
    file.write_text(text.replace("volume_claim", "namespace"))
    assert "volume_claim" in refuse(capsys, str(file), "--on", "kubernetes")
    file.write_text(text.replace("cpus = 8", "cpu = 8"))
    assert "resources" in refuse(capsys, str(file), "--on", "ray")


def test_sweep_over_clusters_or_on_kubernetes_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = [str(file), "run.seed=0,1", "launch.num_servers=1"]
    for words in (["launch.on=ray,slurm"], ["--on", "kubernetes"]):
        assert main(["rl", *sweep, *words]) != 0
        errors = capsys.readouterr().err
        assert "a sweep" in errors and f"on {words[-1].removeprefix('launch.on=')[:3]}" in errors
        assert "On Slurm" in errors
    assert main(["rl", *sweep, "-o", str(file.parent / "out")]) != 0
    assert "-o" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()


def write_files(file: Path, on: str, *words: str) -> tuple[Path, dict[str, str]]:
    """The folder of the files that `-o` writes, and the secrets among them."""
    folder = file.parent / "out"
    assert main(["rl", str(file), "--on", on, "-o", str(folder), *words]) == 0
    lines = (folder / "secrets.env").read_text().splitlines()
    return folder, dict(line.split("=", 1) for line in lines)


def test_pods_get_their_own_credentials_and_only_the_launcher_the_secret(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "out").mkdir()
    (file.parent / "out" / "secrets.env").touch(0o644)
    folder, made = write_files(file, "kubernetes", "launch.kubernetes.namespace=rl")
    text = (folder / "sightline.yaml").read_text()
    output, secret = capsys.readouterr().out, made.pop("launcher")
    assert (folder / "secrets.env").stat().st_mode & 0o777 == 0o600
    assert len(list(yaml.safe_load_all(text))) == 8 and len(secret) == 64
    assert list(made) == ["server", "server-1", "trainer", "worker-0", "worker-1"]
    for name, line in made.items():
        assert secret not in line and derive_rights(line, name) == derive_rights(secret, name)
        assert derive_rights(secret, name).channel not in text + output
    worker = derive_rights(made["worker-0"], "worker-0")
    assert not worker.control_token and not worker.ranks
    assert secret not in text + output and f"--from-env-file={folder}/secrets.env -n rl" in output
    assert write_files(file, "kubernetes")[1]["launcher"] != secret


def test_every_pod_gets_the_tolerations_pull_secrets_and_service_account(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "tolerationSeconds": 60}
    text = file.read_text() + (
        'image_pull_secrets = ["registry", "mirror"]\nservice_account = "training"\n'
        'tolerations = [{key = "nvidia.com/gpu", operator = "Exists", tolerationSeconds = 60}]\n'
    )
    file.write_text(text)
    objects = yaml.safe_load_all(dry_run(capsys, str(file), "--on", "kubernetes"))
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Job"]
    assert len(pods) == 6
    for pod in pods:
        assert pod["tolerations"] == [toleration]
        assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
        assert pod["serviceAccountName"] == "training"
    file.write_text(text.replace('["registry", "mirror"]', '"registry"'))
    assert "[launch.kubernetes] image_pull_secrets" in refuse(
        capsys, str(file), "--on", "kubernetes"
    )


def test_each_run_of_a_sweep_is_a_separate_job(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dry_run(capsys, str(file), "--on", "slurm", "run.seed=0,1,5")
    assert plan.count("#!/bin/bash") == 3
    for seed in (0, 1, 5):
        assert f"# Job_1-seed{seed}.sbatch\n" in plan
        assert f" run.seed={seed} launch.on=slurm run.name=Job_1-seed{seed} " in plan


def test_files_are_written_only_for_a_cluster(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--dry-run"], ["--on", "ray"]):
        words = [*words, "launch.num_servers=1", "-o", str(file.parent / "out")]
        assert main(["rl", str(file), *words]) != 0
        assert "requires --on slurm or kubernetes" in capsys.readouterr().err
    assert not (file.parent / "out").exists() and not (file.parent / "runs").exists()
