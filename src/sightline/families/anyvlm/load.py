"""Reads what was found about a checkpoint, or has it found out.

It is found out anew when a file of the folder that it was found from has changed, or when another
transformers is installed, or another torchvision, where that makes the pixels. Where the folder
cannot be written to, each process asks for itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from sightline.errors import FamilyError
from sightline.families.anyvlm.findings import (
    FILE,
    Findings,
    ProbeAnswer,
    digest_sources,
    find_version,
)
from sightline.families.anyvlm.vision import AnyVLMFamily

TIMEOUT_S = 600


def load_family(path: Path, overrides: dict[str, int]) -> AnyVLMFamily:
    if overrides:
        raise FamilyError(
            f"{', '.join(sorted(overrides))} for {path}, whose images the checkpoint's own "
            "processor lays out",
            "remove them from [model] of the run file, and set what the processor knows in "
            "preprocessor_config.json",
        )
    return AnyVLMFamily(path, load_findings(path))


def load_findings(path: Path) -> Findings:
    """What is written down about the checkpoint; where nothing is, it is asked for."""
    for name in ("tokenizer.json", "preprocessor_config.json"):
        nested = name == "preprocessor_config.json" and (path / "processor_config.json").is_file()
        if not (path / name).is_file() and not (nested and _has_nested_processor(path)):
            raise FamilyError(
                f"{path} has no {name}", "copy it from the checkpoint: a probe needs whole folders"
            )
    source, installed = digest_sources(path), find_version("transformers")
    with suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode((path / FILE).read_bytes(), type=Findings)
        is_same = installed in ("", found.transformers)
        if found.torchvision:
            is_same = is_same and find_version("torchvision") in ("", found.torchvision)
        if found.source == source and is_same:
            return found
    if not installed:
        raise FamilyError(
            f"{path}: nothing is known about this checkpoint, and transformers, which has its code,"
            " is not installed here",
            "run `sightline check` on a run file that names the folder, where transformers is "
            f"installed: it leaves {FILE} there",
        )
    return _ask(path)


def _has_nested_processor(path: Path) -> bool:
    return b'"image_processor"' in (path / "processor_config.json").read_bytes()


def _ask(path: Path) -> Findings:
    """Asks the probe, whose answer is written down where the folder can be written to."""
    if "transformers" in sys.modules:
        from sightline.families.anyvlm.probe import run_trials

        answer = run_trials(path)
    else:
        answer = _ask_process(path)
    if answer.findings is None:
        raise FamilyError(f"{path}: {answer.problem}", answer.fix)
    with suppress(OSError):
        part = path / f".{FILE}.{os.getpid()}"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(answer.findings), indent=1))
        part.replace(path / FILE)
    return answer.findings


def _ask_process(path: Path) -> ProbeAnswer:
    """Asks a process that imports torch and transformers, which this one does not."""
    words = [sys.executable, "-m", "sightline.families.anyvlm.probe", str(path)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FamilyError(
            f"{path}: the probe of the checkpoint gave no answer within {TIMEOUT_S} s",
            f"run `{' '.join(words)}` to see where it hangs",
        ) from error
    try:
        return msgspec.json.decode(done.stdout.rpartition("\n\n")[2], type=ProbeAnswer)
    except msgspec.MsgspecError as error:
        raise FamilyError(
            f"{path}: the probe of the checkpoint failed: {done.stderr[-2000:]}",
            f"run `{' '.join(words)}` to see all of it",
        ) from error
