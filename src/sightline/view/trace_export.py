"""Export traces as JSON lines: one line per branch, with messages in OpenAI's format.

Images stay references. `copy_images` copies their files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sightline.media import MediaRef, MediaStore
from sightline.message import Message, to_openai_message
from sightline.trace import Trace
from sightline.wire.file import write_atomic

_COPIED = ("env", "task", "split", "seed", "reward", "rewards", "truncated", "error")
"""Fields of a record that are a trace's attributes."""


def branch_records(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield one record per branch. Shared nodes have the same id in all branches."""
    credits = dict(zip((node.id for node in trace.turns), trace.per_turn or (), strict=False))
    for number, path in enumerate(trace.branches()):
        nodes = [trace.nodes[n] for n in path]
        yield {
            "trace": trace.id,
            "group": trace.group_id,
            "branch": number,
            **{name: getattr(trace, name) for name in _COPIED},
            "messages": [openai_message(node.message) for node in nodes],
            "nodes": [
                {
                    "id": node.id,
                    "num_tokens": len(node.token_ids),
                    "num_sampled": node.num_sampled,
                    "finish_reason": node.finish_reason,
                    "credit": credits.get(node.id),
                }
                for node in nodes
            ],
            "images": {
                ref.digest: image_file_name(ref) for node in nodes for ref in node.message.refs
            },
        }


def openai_message(message: Message) -> dict[str, Any]:
    """Convert a message to OpenAI's format, with `media:` URLs for images and videos."""
    call_ids = [call.id for call in message.tool_calls]
    return to_openai_message(message, lambda ref: ref.url, call_ids)


def image_file_name(ref: MediaRef) -> str:
    return f"{ref.digest}.{ref.mime.partition('/')[2]}"


def copy_images(traces: Iterable[Trace], store: MediaStore, folder: Path) -> int:
    """Write each image and video in `traces` once, and return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    refs = {ref.digest: ref for t in traces for node in t.nodes for ref in node.message.refs}
    for ref in refs.values():
        write_atomic(folder / image_file_name(ref), store.get(ref))
    return len(refs)
