"""Try the types in processes of their own, and write the table.

    python -m tests.transformers_types               every type without a result, and the table
    python -m tests.transformers_types --again T...  these types again

Results are kept in `build/transformers_types`, one file per type, until the tried code changes. An
interrupted run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.transformers_types.trial import ERROR, NATIVE, REFUSED, TRAINS, UNBUILT, Answer, try_type

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformers_types.md"
SOURCE = ROOT / "src" / "sightline"
TRIED = [SOURCE / name for name in ("families", "compute", "pixels", "render", "bounded_child.py")]
RESULTS = ROOT / "build" / "transformers_types"
MARKS = ("<!-- begin: made by `make types` -->", "<!-- end -->")
LIMIT_S = 300
"""Processor time of a type. It may take ten times as long by the clock."""
MEMORY_BYTES = 16 << 30
TOLERANCE = 1e-4
"""Maximum difference of a logprob in float32."""


def list_types() -> list[str]:
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def list_tried_files() -> list[Path]:
    """Return the files that decide the results."""
    tried = (*TRIED, Path(__file__).parent)
    files = (f for path in tried for f in (path.rglob("*.*") if path.is_dir() else [path]))
    return sorted(f for f in files if f.is_file() and f.suffix != ".pyc")


def get_folder() -> Path:
    """Return the folder of results, by the version of transformers and the code that was tried."""
    digest = hashlib.sha256()
    for file in list_tried_files():
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return RESULTS / f"{transformers.__version__}-{digest.hexdigest()[:12]}"


def find_answer(kind: str) -> Answer | None:
    """Return the stored answer for the installed transformers, or None."""
    file = get_folder() / f"{kind}.json"
    return msgspec.json.decode(file.read_bytes(), type=Answer) if file.is_file() else None


def try_in_process(kind: str, limit_s: float = LIMIT_S) -> Answer:
    """Try a type in a forked process with limits on time and memory. Store the answer."""
    folder = get_folder()
    work = folder / f"{kind}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
            log = os.open(work / "log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            answer = try_type(kind, work)
            (work / "answer.json").write_bytes(msgspec.json.encode(answer))
        finally:
            os._exit(0)
    deadline = time.monotonic() + 10 * limit_s  # it may run at a low priority, or stall
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    if (work / "answer.json").is_file():
        answer = msgspec.json.decode((work / "answer.json").read_bytes(), type=Answer)
    else:
        answer = Answer(
            kind, UNBUILT, f"its process needed over {limit_s:.0f} s or {MEMORY_BYTES >> 30} GiB"
        )
    (folder / f"{kind}.json").write_bytes(msgspec.json.encode(answer))
    shutil.rmtree(work, ignore_errors=True)
    return answer


def is_wrong(answer: Answer) -> bool:
    """Return whether a type raised a raw error, could not be tried, or trains with other
    logprobs."""
    return answer.result in (ERROR, UNBUILT) or (answer.difference or 0.0) > TOLERANCE


def format_table(answers: list[Answer]) -> str:
    counts = ", ".join(
        f"{number} {name}"
        for name in (TRAINS, NATIVE, REFUSED, UNBUILT, ERROR)
        if (number := sum(answer.result == name for answer in answers))
    )
    lines = [f"transformers {transformers.__version__}, {len(answers)} types: {counts}.", ""]
    lines += ["| type | result | why or how | largest difference |", "|---|---|---|---:|"]
    for answer in answers:
        reason = " ".join(answer.reason.split()).replace("|", "\\|").replace("<", "&lt;")
        difference = "" if answer.difference is None else f"{answer.difference:.1e}"
        lines.append(f"| `{answer.kind}` | {answer.result} | {reason} | {difference} |")
    return "\n".join(lines)


def write_page(answers: list[Answer]) -> None:
    before, rest = PAGE.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n{format_table(answers)}\n{MARKS[1]}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="only these types; the page is not written")
    parser.add_argument("--again", action="store_true", help="ignore stored results")
    args = parser.parse_args()
    answers = []
    for kind in args.types or list_types():
        answer = None if args.again else find_answer(kind)
        answer = answer or try_in_process(kind)
        print(answer.kind, answer.result, answer.reason, answer.difference, flush=True)
        answers.append(answer)
    if not args.types:
        write_page(answers)
    return int(any(map(is_wrong, answers)))


if __name__ == "__main__":
    sys.exit(main())
