"""Format a trace as text for a terminal, branch by branch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from sightline.media import MediaRef
from sightline.message import ImagePart, VideoPart
from sightline.trace import Node, Trace
from sightline.view import formatting
from sightline.wire import Slot

INDENT = " " * 6
MOST_LINES = 12


def format_transcript(
    trace: Trace,
    width: int = 80,
    is_full: bool = False,
    draw: Callable[[MediaRef], list[str]] | None = None,
    shows_errors: bool = True,
) -> Iterator[str]:
    """Yield lines of at most `width` characters. Long messages are shortened unless `is_full`.

    Images are named by digest and size. With `draw`, they are also drawn, as lines.
    """
    yield from _head(trace, width, shows_errors)
    credits = dict(zip((node.id for node in trace.turns), trace.per_turn or (), strict=False))
    branches, printed = trace.branches(), set[int]()
    for number, path in enumerate(branches):
        new = [node for node in path if node not in printed]
        printed.update(new)
        yield ""
        if len(branches) > 1:
            parent = trace.nodes[new[0]].parent
            start = "from the beginning" if parent < 0 else f"continues node {parent}"
            yield f"--- branch {number + 1} of {len(branches)}, {start}"
        for node in new:
            current = trace.nodes[node]
            prompt = trace.end(node) - current.num_sampled
            yield from _message(current, prompt, credits.get(node), width, is_full)
            if draw is not None:
                for ref in (r for r in current.message.refs if not r.is_video):
                    yield from (INDENT + line for line in draw(ref))


def describe_trace(trace: Trace) -> str:
    """Describe a trace in one line."""
    reward = "no reward" if trace.reward is None else f"reward {trace.reward:.3f}"
    broken = f", broken: {trace.error_kind}" if trace.error else ""
    return (
        f"{trace.id}  {trace.env} task {trace.task}  {formatting.whole(len(trace.turns))} turns, "
        f"{formatting.whole(trace.num_tokens)} tokens, {reward}{broken}"
    )


def _head(trace: Trace, width: int, shows_errors: bool) -> Iterator[str]:
    yield _fit(f"trace {trace.id}", width)
    facts = [
        f"{trace.env or 'no environment'}, task {trace.task} of {trace.split}, seed {trace.seed}",
        f"{_num(len(trace.turns), 'turn')} in {_num(len(trace.branches()), 'branch', 'branches')}",
        f"{_num(trace.num_tokens, 'token')}, {formatting.whole(trace.num_sampled)} sampled",
        _num(trace.num_images_shown, "image"),
    ]
    if trace.policies:
        facts.append(f"versions {trace.oldest_version} to {trace.newest_version}")
    if trace.forks:
        forks = ", ".join(f"{reason} {count}" for reason, count in sorted(trace.forks.items()))
        facts.append(f"forks: {forks}")
    if trace.ended:
        facts.append(f"{trace.ended - trace.started:.1f} s")
    yield from _wrap("; ".join(facts), width, "  ")
    parts = "".join(f", {name} {value:.3f}" for name, value in trace.rewards.items())
    reward = "no reward" if trace.reward is None else f"reward {trace.reward:.3f}"
    yield from _wrap(f"{reward}{parts}{', truncated' if trace.truncated else ''}", width, "  ")
    if trace.limit and shows_errors:
        yield from _wrap(trace.limit, width, "  ")
    for error in (trace.error, *trace.refused_requests):
        if error and shows_errors:
            yield from _wrap(f"error: {error}", width, "  ")


def _message(
    node: Node, num_prompt: int, credit: float | None, width: int, is_full: bool
) -> Iterator[str]:
    facts = [_num(len(node.token_ids), "token")]
    if node.is_turn:
        first, last = node.versions[0].version, node.versions[-1].version
        facts = [f"prompt {num_prompt}", f"{node.num_sampled} sampled", node.finish_reason]
        facts.append(f"version {first}" + (f" to {last}" if last != first else ""))
    if credit is not None:
        facts.append(f"credit {credit:+.3f}")
    yield _fit(f"{node.id:4d}  {node.message.role}  ({', '.join(facts)})", width)
    lines = [line for text in _texts(node) for line in _wrap(text, width, INDENT)]
    left_out = 0 if is_full else len(lines) - MOST_LINES
    if left_out > 1:
        lines = [*lines[: MOST_LINES - 3], f"{INDENT}... {left_out} lines left out", *lines[-3:]]
    yield from lines


def _texts(node: Node) -> Iterator[str]:
    message, slots = node.message, iter(node.slots)
    if message.reasoning:
        yield f"(reasoning) {message.reasoning}"
    for part in message.content:
        if isinstance(part, ImagePart):
            slot = next(slots)
            yield (
                f"[image {part.ref.digest[:12]} {part.ref.width}x{part.ref.height}, "
                f"{slot.length} tokens]"
            )
        elif isinstance(part, VideoPart):
            yield describe_video(part, slots)
        else:
            yield part.text
    for call in message.tool_calls:
        yield f"-> {call.name}({call.arguments})"


def describe_video(part: VideoPart, slots: Iterator[Slot]) -> str:
    """Describe a video in one line, and consume its steps from `slots`."""
    steps = take_steps(slots)
    first = part.refs[0]
    what = f"{first.num_frames} frames" if first.is_video else f"{len(part.frames)} images"
    return (
        f"[video {first.digest[:12]} {first.width}x{first.height}, {what}, {len(steps)} steps of "
        f"{steps[0].length if steps else 0} tokens]"
    )


def take_steps(slots: Iterator[Slot]) -> list[Slot]:
    """Consume and return the slots of the next video."""
    steps: list[Slot] = []
    for slot in slots:
        steps.append(slot)
        if (step := slot.item.step) is None or step.number + 1 >= step.num_steps:
            break
    return steps


def _wrap(text: str, width: int, indent: str) -> list[str]:
    """Remove terminal control characters and wrap the text."""
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            formatting.clean(line), width, initial_indent=indent, subsequent_indent=indent
        ) or [""]
    return lines


def _fit(line: str, width: int) -> str:
    line = formatting.clean(line)
    return line if len(line) <= width else line[: width - 3] + "..."


def _num(count: int, one: str, many: str = "") -> str:
    return f"{formatting.whole(count)} {one if count == 1 else many or one + 's'}"
