"""The generic family: any image-and-text or causal language model of transformers that no other
family claims.

At the first load, `admission` runs trials on the checkpoint's own processor, chat template and
model code, in a process that has transformers. It writes its `findings` into the folder, or refuses
the checkpoint and names the trial that failed. `image_tokens` chooses the rule in `layout` that
maps image sizes to tokens. `vision` defines the family and `render` the renderer. `processor`,
`forward` and `admission` import transformers. This file does not.

The trials run again when a checkpoint file or the transformers version changes. The same applies to
torchvision if it processes the images. If the folder is read-only, every process runs the trials.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from sightline.bounded_child import build_command, build_variables
from sightline.errors import FamilyError, format_command
from sightline.families.anyvlm.findings import (
    FILE,
    AdmissionAnswer,
    Findings,
    digest_sources,
)
from sightline.families.anyvlm.render import AnyVLMRenderer
from sightline.families.anyvlm.vision import AnyVLMFamily
from sightline.regular_file import read_bytes
from sightline.wire.codec import find_version

IS_FALLBACK = True
"""Use this family only if no other family claims a checkpoint."""
TIMEOUT_S = 600


def claims(config: dict[str, Any]) -> bool:
    is_text = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
    return is_text or isinstance(config.get("vision_config"), dict)


def load_family(path: Path, overrides: dict[str, int]) -> AnyVLMFamily:
    if overrides:
        raise FamilyError(
            f"[model] {', '.join(sorted(overrides))} cannot be set for {path}, whose own processor "
            "decides image sizes",
            "remove the setting, and change preprocessor_config.json instead",
        )
    return AnyVLMFamily(path, load_findings(path))


def load_findings(path: Path) -> Findings:
    """Return the findings stored in the folder, or run the trials and store their findings."""
    if not (path / "tokenizer.json").is_file():
        raise FamilyError(f"{path} has no tokenizer.json", "copy it from the checkpoint")
    source, installed = digest_sources(path), find_version("transformers")
    with suppress(OSError, msgspec.MsgspecError):
        findings = msgspec.json.decode(read_bytes(path / FILE), type=Findings)
        is_same = installed in ("", findings.transformers)
        if findings.torchvision:
            is_same = is_same and find_version("torchvision") in ("", findings.torchvision)
        if findings.source == source and is_same:
            return findings
    if not installed:
        raise FamilyError(
            f"{path} has not been tested yet, and transformers is not installed here",
            "run `sightline check` with this [model] path where transformers is installed. It "
            f"writes {FILE} into the folder",
        )
    return _admit(path)


def _admit(path: Path) -> Findings:
    """Run the trials, and write their findings into the folder if possible."""
    if "transformers" in sys.modules:
        from sightline.families.anyvlm.admission import run_trials

        answer = run_trials(path)
    else:
        answer = _try_in_process(path)
    if answer.findings is None:
        raise FamilyError(f"{path}: {answer.problem}", answer.fix)
    with suppress(OSError):
        part = path / f".{FILE}.{os.getpid()}"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(answer.findings), indent=1))
        part.replace(path / FILE)
    return answer.findings


def _try_in_process(path: Path) -> AdmissionAnswer:
    """Run the trials in a subprocess, which imports torch and transformers."""
    command = format_command(sys.executable, "-m", "sightline.families.anyvlm.admission", path)
    file = Path(__file__).with_name("admission.py")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    child = build_command(file, str(path), cpu_s=TIMEOUT_S, memory_bytes=memory_bytes)
    try:
        done = subprocess.run(
            child,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=build_variables("HF_HOME", "HF_HUB_OFFLINE", "HOME", "OMP_NUM_THREADS", "TMPDIR"),
        )
    except subprocess.TimeoutExpired as error:
        problem = f"{path}: the trials did not finish within {TIMEOUT_S} s"
        raise FamilyError(problem, f"run `{command}` to see where it stalls") from error
    try:
        return msgspec.json.decode(done.stdout.rpartition("\n\n")[2], type=AdmissionAnswer)
    except msgspec.MsgspecError as error:
        problem = f"{path}: the trials crashed: {done.stderr[-2000:]}"
        raise FamilyError(problem, f"run `{command}` to see the whole output") from error


load_renderer = AnyVLMRenderer.load
