"""Find and print an environment's problems, from the rollouts of `sightline try`."""

from __future__ import annotations

import pickle
import random
import re
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image, Resampling

import sightline
from sightline.envs import Environment, Task
from sightline.errors import SightlineError
from sightline.media import MediaRef, MediaStore
from sightline.message import put_images
from sightline.render import Renderer
from sightline.rollout.model_chat import ModelChat
from sightline.rollout.player import RolloutPlayer
from sightline.trace import Trace
from sightline.view.formatting import clean
from sightline.view.transcript import format_transcript
from sightline.wire.control import RolloutRequest


@dataclass
class PreviewPlayer(RolloutPlayer):
    """A player that records environments' exceptions by rollout id."""

    raised: dict[str, BaseException] = field(default_factory=dict)

    async def _run_user_code(self, request: RolloutRequest, chat: ModelChat) -> Any:
        try:
            return await super()._run_user_code(request, chat)
        except Exception as error:  # user code
            self.raised[request.rollout_id] = error
            raise


def print_preview(
    env: Environment,
    traces: Sequence[Trace],
    raised: Mapping[str, BaseException],
    store: MediaStore,
    renderer: Renderer,
    max_model_len: int,
) -> int:
    """Print each rollout with its problems, and return the number of problems."""
    num_problems = 0
    for trace in traces:
        print_trace(trace, store)
        if about := describe_task(env, trace):
            print(f"  {about}\n", flush=True)
        task_problems = find_problems(env, trace, raised)
        others = find_demonstration_problems(env, trace.task, store, renderer, max_model_len)
        for what, problems in (("task", task_problems), ("demonstration", others)):
            for problem in problems:
                print(f"problem in {what} {trace.task}: {problem}\n", flush=True)
                num_problems += 1
        for name in find_image_names(trace):
            print(
                f"warning in task {trace.task}: {name!r} is sent as text, but it names a "
                f"file\n  fix: to send the image, pass pathlib.Path({name!r}) to user(...)\n",
                flush=True,
            )
    print(f"tasks: {len(traces)}, problems: {num_problems}")
    return num_problems


def describe_task(env: Environment, trace: Trace) -> str:
    """Return what the environment says about a trace's task; nothing if it raises."""
    played, index = env.choose_environment(trace.task, trace.split)
    try:
        return clean(played.describe_task(played.task(index, trace.split)))
    except Exception:  # already reported as the rollout's error
        return ""


def print_trace(trace: Trace, store: MediaStore) -> None:
    """Print the conversation without errors. Draw images if the output is a terminal."""

    def draw(ref: MediaRef) -> list[str]:
        return draw_image(store.image(ref))

    width = shutil.get_terminal_size().columns
    pictures = draw if sys.stdout.isatty() else None
    lines = format_transcript(trace, width, draw=pictures, shows_errors=False)
    print("\n".join(lines), end="\n\n", flush=True)


def draw_image(image: Image, columns: int = 32, rows: int = 12) -> list[str]:
    """Draw an image as half blocks in 24-bit colour, in lines of at most `columns`."""
    scale = min(1.0, columns / image.width, 2 * rows / image.height)
    width = max(1, round(image.width * scale))
    height = max(2, round(image.height * scale / 2) * 2)
    small = image.convert("RGB").resize((width, height), Resampling.BOX)

    def draw_cell(x: int, y: int) -> str:
        upper, lower = (";".join(map(str, small.getpixel((x, at)))) for at in (y, y + 1))  # type: ignore[arg-type]
        return f"\x1b[38;2;{upper}m\x1b[48;2;{lower}m▀"

    return ["".join(draw_cell(x, y) for x in range(width)) + "\x1b[0m" for y in range(0, height, 2)]


def find_problems(
    env: Environment, trace: Trace, raised: Mapping[str, BaseException]
) -> Iterator[str]:
    """Yield the problems of a rollout and its task. `raised` maps trace ids to exceptions."""
    played, index = env.choose_environment(trace.task, trace.split)
    if trace.error:
        cause = raised.get(trace.id)
        yield describe_exception(cause) if cause else trace.error
    elif trace.limit:
        yield (
            f"{trace.limit}\n  fix: smaller images (--max-pixels, in a run file [model] max_pixels)"
            ", a window of the history, fewer turns, or a larger limit (--max-model-len)"
        )
    elif not trace.turns:
        yield "the rollout did not call the model\n  fix: await chat.send([user(...)])"
    elif played.shows_media and not trace.num_images_shown:
        yield (
            "no image was sent, but shows_media is True\n"
            "  fix: pass images to user(...), or set shows_media = False"
        )
    try:
        first, second = (played.task(index, trace.split) for _ in range(2))
    except Exception:  # already reported as the rollout's error
        return
    if _differ(first, second):
        yield (
            f"two calls of task() differ: {first} and {second}\n"
            "  fix: draw it from self.task_rng(index, split): siblings must play the same task"
        )


def find_image_names(trace: Trace) -> list[str]:
    """Return existing image files whose names are in the text of user messages."""
    texts = " ".join(node.message.text for node in trace.nodes if node.message.role == "user")
    names = dict.fromkeys(re.findall(r"[^\s?:\"'<>]+?\.(?:png|jpe?g|webp|gif|bmp)", texts))
    return [name for name in names if Path(name).is_file()]


def _differ(first: Task, second: Task) -> bool:
    try:
        return bool(first != second) and pickle.dumps(first) != pickle.dumps(second)
    except Exception:  # comparing arrays or pickling may fail
        return False


def find_demonstration_problems(
    env: Environment, index: int, store: MediaStore, renderer: Renderer, max_model_len: int
) -> Iterator[str]:
    """Yield the problems of a demonstration, if the environment has demonstrations."""
    env, index = env.choose_environment(index, "sft")
    if not env.has_demonstrations:
        return
    try:
        messages = env.demonstration(env.task(index, "sft"), store.put, random.Random(index))
        messages = put_images(messages, store.put)
        rendered = renderer.render(messages, env.tools, generation_prompt=False)
    except Exception as error:  # user code
        yield describe_exception(error)
        return
    if not rendered.trained:
        yield "it has no assistant message\n  fix: end it with assistant(...)"
    if (size := len(rendered.token_ids)) > max_model_len:
        yield f"it has {size} tokens, but the limit is {max_model_len}\n  fix: make it shorter"


def describe_exception(error: BaseException) -> str:
    """Describe an error, followed by the lines of the user's files that led to it."""
    others = (str(Path(sightline.__file__).parent), sysconfig.get_paths()["stdlib"], "<")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(others) and "site-packages" not in frame.filename
    ]
    message = str(error)
    if not isinstance(error, SightlineError):
        message = "".join(traceback.format_exception_only(error)).strip()
    lines = [f"    {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    return "\n".join([message, *lines])
