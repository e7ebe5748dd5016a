"""A chat template cannot exhaust time or memory, raise foreign exceptions or outlive its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sightline.errors import FamilyError
from sightline.render import ChatTemplate, TemplateError
from sightline.render.template import TemplateChild

TALK = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
LOOPS = "{% for a in range(100000) %}" * 4 + "{% endfor %}" * 4
HOSTILE = {
    "{{ 'a' * 10 ** 10 }}": "too much memory",
    "{{ messages[0].content * 10 ** 10 }}": "too much memory",
    "{{ 'a' | center(10 ** 9) }}": "too much memory",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{{ raise_exception('no ' ~ messages[0].content) }}": "no hi",
    "{{ messages[0].x.y }}": "no attribute 'x'",
    "{{ 1 + 'a' }}": "TypeError",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ messages | nofilter }}": "No filter named",
    "{% if %}": "Expected an expression",
    "{{ range(10 ** 9) | list }}": "OverflowError",
    "{% include 'x' %}": "no loader",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages[0].content * 2 ** 25 }}": "characters, above",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_template_is_an_error_and_the_next_one_renders(source: str) -> None:
    with pytest.raises(TemplateError, match=HOSTILE[source]) as raised:
        ChatTemplate(source).render(TALK)
    assert "published with the checkpoint" in raised.value.fix
    assert ChatTemplate(PLAIN).render(TALK) == "<hi>"


def test_template_that_loops_is_ended_by_the_limit_on_processor_time() -> None:
    child = TemplateChild(cpu_s=1, deadline_s=30)
    with pytest.raises(TemplateError, match="within 1 s of processor time"):
        child.ask("loops", LOOPS, {"messages": TALK})
    assert child.ask("plain", PLAIN, {"messages": TALK}) == "<hi>"


def test_child_that_was_killed_is_started_again() -> None:
    child = TemplateChild()
    assert child.ask("plain", PLAIN, {"messages": TALK}) == "<hi>"
    assert child._process is not None
    child._process.kill()
    assert child.ask("plain", PLAIN, {"messages": TALK}) == "<hi>"


def test_child_starts_below_an_inherited_limit_on_processor_time() -> None:
    """As with `ulimit -t`, or under a batch system."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (300, 300))\n"
        "from sightline.render.template import TemplateChild\n"
        "print(TemplateChild().ask('a', '{{ 1 + 1 }}', {}))"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"2\n"


def test_child_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGHTLINE_SECRET", "do-not-pass-this-on")
    child = TemplateChild()
    child.ask("plain", PLAIN, None)
    assert child._process is not None
    variables = Path(f"/proc/{child._process.pid}/environ").read_bytes()
    assert b"PYTHONPATH" in variables and b"do-not-pass-this-on" not in variables


def test_values_reach_the_template_unchanged() -> None:
    values = {
        "text": "\ud800 \u20ac\r\n",
        "big": 2**70,
        "empty": [{}, None, 0.5],
        "nan": float("nan"),
    }
    template = ChatTemplate("{{ messages[0] | tojson }}")
    assert template.render([values]) == (
        '{"text": "\ud800 \u20ac\\r\\n", "big": 1180591620717411303424, '
        '"empty": [{}, null, 0.5], "nan": NaN}'
    )


@pytest.mark.parametrize(
    "settings", ["[]", "{", '{"chat_template": [{}]}', '{"chat_template": [1]}', "[" * 100_000]
)
def test_broken_file_of_a_template_is_a_family_error(settings: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(FamilyError, match=r"tokenizer_config.json has no readable chat template"):
        ChatTemplate.find(tmp_path)


def list_children(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}


def test_child_ends_with_a_killed_parent() -> None:
    """Even in the middle of an operation that no thread of Python can interrupt."""
    code = (
        "from sightline.render.template import TemplateChild\n"
        "TemplateChild(cpu_s=60).ask('a', '{{ 10 ** (10 ** 9) }}', {})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (children := list_children(parent.pid)):
            assert parent.poll() is None
            time.sleep(0.05)
        [child] = children
        while not _has_used_cpu(child):  # more than its start takes
            time.sleep(0.05)
        parent.kill()
    _wait_for_end(child)


def _has_used_cpu(pid: int) -> bool:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) > os.sysconf("SC_CLK_TCK")


def _wait_for_end(pid: int) -> None:
    """Return when the process is gone, long before it reaches its own limits."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists():
        assert time.monotonic() < deadline, "the child outlives its parent"
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":  # nobody waits for it in a container without an init
            return
        time.sleep(0.05)
