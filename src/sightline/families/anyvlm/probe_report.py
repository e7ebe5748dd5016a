"""The conversations of the chat template trial, and a probe's findings in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sightline.families.anyvlm.findings import Findings
from sightline.families.anyvlm.layout import RULES
from sightline.families.anyvlm.render import AnyVLMRenderer
from sightline.families.anyvlm.vision import GRID_RULES
from sightline.families.template_check import find_split
from sightline.media import MediaRef
from sightline.message import Message, TextPart, assistant, system, user


def draw_conversations() -> Iterator[tuple[list[Message], bool]]:
    """Yield conversations to render in both ways, with or without a generation prompt."""
    sizes = ((64, 64), (300, 20), (33, 95))
    one, two, three = (MediaRef(f"{i}" * 64, "image/png", *s, 1) for i, s in enumerate(sizes))
    yield [user("hi")], True
    yield [user("two\nlines", one)], True
    yield [user(two, "what is it?"), assistant("a thing."), user(" and ", three, one, "?")], True
    yield [system("be brief"), user("hi", three), assistant("ok"), user("so?")], True
    yield [user("hi"), assistant("fine \n")], False
    yield [Message(role="user", content=(TextPart("0 "), TextPart("0")))], True
    yield [user("hi"), assistant("fine", reasoning="so")], False


def describe_difference(ours: list[int], theirs: list[int], renderer: AnyVLMRenderer) -> str:
    before, we_write, they_write = find_split(renderer, ours, theirs)
    return f"after {before!r} transformers writes {they_write!r}, and our renderer {we_write!r}"


def describe_tools(renderer: AnyVLMRenderer) -> str:
    form = renderer.call_format
    if form is None:
        return f"refused, because {renderer.tools_refusal}"
    return f"calls are JSON between {form.opening} and {form.closing}"


def describe_reasoning(renderer: AnyVLMRenderer) -> str:
    form = renderer.reasoning_format
    if form is None:
        return f"refused, because {renderer.reasoning_refusal}"
    opening = form.opening_mark or "the end of a prompt"
    return f"between {opening} and {form.closing_mark}"


def describe_turns(renderer: AnyVLMRenderer) -> str:
    differences = list(filter(None, renderer.bridge_differences.values()))
    if not differences:
        return "appended to the existing tokens"
    if len(differences) == len(renderer.bridge_differences):
        return f"rendered again, because {differences[0]}"
    return (
        f"appended to the existing tokens, or rendered again if reasoning changes: {differences[0]}"
    )


def describe_images(findings: Findings, renderer: AnyVLMRenderer) -> str:
    """Describe the rule for image tokens, with the numbers of pads and of the processor's marks."""
    rule, words = findings.rule, RULES[findings.rule][1]
    counts = [sum(n for p, n in e.pieces if p == findings.pad) for e in findings.expansions]
    tokens = _describe_range(counts)
    if rule == "tiles_of_large":
        limits = findings.rule_settings
        tokens = f"{limits['min_tokens']} to {max(counts) + limits['max_tokens']}"
    if rule in GRID_RULES:
        tokens = "one token per merged patch"
    if rule == "lines":  # its description includes the marks
        return f"{words}, {tokens}"
    marks = [
        sum(n * renderer.count_tokens(p) for p, n in e.pieces if p != findings.pad)
        for e in findings.expansions
    ]
    unit = "" if rule in GRID_RULES else " tokens"
    return f"{words}, {tokens}{unit} and {_describe_range(marks)} marks"


def _describe_range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least} to {most}" if least < most else f"{most}"


def describe_findings(findings: Findings, renderer: AnyVLMRenderer, num_sizes: int) -> list[str]:
    """Return one line for each finding, with its reason."""
    images = describe_images(findings, renderer)
    stops = ", ".join(renderer.decode([i]) for i in renderer.stop_token_ids)
    return [
        f"model: {findings.model_class} of transformers {findings.transformers}",
        f"images: {images}; verified on {num_sizes} sizes",
        f"banned tokens: the pad {findings.pad} and {len(renderer.pad_token_ids) - 1} marks",
        f"stop tokens: {stops}",
        f"positions: {'one axis' if findings.num_axes == 1 else 'MRoPE'}",
        f"tools: {describe_tools(renderer)}",
        f"reasoning: {describe_reasoning(renderer)}",
        f"turns: {describe_turns(renderer)}",
    ]
