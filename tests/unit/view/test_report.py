import json
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image

from sightline.media import MediaStore
from sightline.message import assistant, user
from sightline.run import RunDir
from sightline.trace import Trace, write_traces
from sightline.trace.node import Node, int32_array
from sightline.view.gallery import MAX_SIDE, Gallery
from sightline.view.report import write_report
from sightline.view.summary import summarize
from sightline.view.templating import escape_markdown, fence_text
from sightline.wire.event import Event

from .event_fixtures import HOSTILE, T0, append, step, trace_of, write_run


class Tags(HTMLParser):
    """Every tag and attribute of a page, as a browser would find them."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def names(self):
        return {tag for tag, _ in self.found}

    def images(self):
        return [attrs for tag, attrs in self.found if tag == "img"]


def test_the_report_shows_figures_curves_and_rollouts_with_their_images(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    summarize(run_dir)
    page = write_report(run_dir)
    assert page == run_dir.report / "index.html"
    text = page.read_text()
    for words in (
        "0.11 → 0.96", "with swapped images", "Held-out tasks", "Verdicts", "no_signal",
        "Server and trainer at once", "83%", "4 of 20 steps", "Step 1<", "Step 20<", "seed = 3",
        "probability 0.497", ">y</span>",
    ):  # fmt: skip
        assert words in text, words
    tags = Tags(text)
    # Three rollouts at each end, two turns each, an image a turn.
    assert len(tags.images()) == 12
    assert all(image["src"].startswith("data:image/png;base64,") for image in tags.images())
    assert text.count("<svg") == 8
    for picture in run_dir.report.glob("*.svg"):
        ElementTree.parse(picture)


def test_markdown_names_its_pictures_and_they_are_there(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    write_report(run_dir)
    text = (run_dir.report / "report.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert {"reward.svg", "mismatch.svg", "lag.svg", "timeline.svg"} <= set(pictures)
    assert len([picture for picture in pictures if picture.startswith("images/")]) == 12
    assert all((run_dir.report / picture).is_file() for picture in pictures)


@pytest.mark.parametrize("blind", [False, True])
def test_what_the_probe_says_stands_in_both_forms_of_the_report(tmp_path, blind):
    run_dir = write_run(tmp_path / "demo", steps=4)
    for number, words in ((2, "The model looks."), (4, "Blind: nothing <changes>.")):
        values = {"is_blind": blind and number == 4, "words": words}
        append(run_dir, Event(T0, "trainer", "probe", number, values))
    page, text = write_report(run_dir).read_text(), (run_dir.report / "report.md").read_text()
    assert "Blind: nothing &lt;changes&gt;." in page
    assert ("Blind in 1 of 2 probes." in page) == blind
    assert "Blind: nothing" in text


def test_hostile_text_runs_nothing(tmp_path):
    run_dir = write_run(tmp_path / "demo", text=HOSTILE)
    values = {"reason": HOSTILE, "rollout_id": HOSTILE, "detail": HOSTILE}
    append(run_dir, Event(time=T0, process="orchestrator", kind="dropped", values=values))
    append(run_dir, step(21, parts={HOSTILE: 1.0}, verdicts={HOSTILE: 3}))
    append(
        run_dir,
        Event(
            time=T0, process="orchestrator", kind="eval",
            values={"name": HOSTILE, "metric": 0.5, "parts": {HOSTILE: 0.1}},
        ),
    )  # fmt: skip
    run_dir.config.write_text(run_dir.config.read_text() + f"# {HOSTILE.splitlines()[0]}\n")
    text = write_report(run_dir).read_text()
    assert "&lt;script&gt;" in text
    tags = Tags(text)
    assert "script" not in tags.names()
    assert all(image["src"].startswith("data:image/") for image in tags.images())
    for _, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in text
    markdown = (run_dir.report / "report.md").read_text()
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", markdown, flags=re.S | re.M)
    assert "<script" not in outside
    assert "<img" not in outside


def test_markdown_text_stays_text():
    assert escape_markdown("a|b <i> *x* `y`\n# z") == r"a\|b &lt;i&gt; \*x\* \`y\` \# z"
    assert fence_text("```\nx") == "````text\n```\nx\n````"


def test_a_run_without_anything_has_a_report(tmp_path):
    page = write_report(RunDir(tmp_path / "empty"))
    assert "nothing measured" in page.read_text()


def test_a_missing_image_is_said_to_be_missing(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    store = MediaStore(run_dir.media)
    for digest in list(store.digests()):
        store.path(digest).unlink()
    text = write_report(run_dir).read_text()
    assert not Tags(text).images()
    assert text.count("is not in the store") == 12


def test_a_damaged_trace_file_is_named_and_the_rest_is_shown(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    file = run_dir.traces_of(20)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    text = write_report(run_dir).read_text()
    assert "ends inside trace" in text
    assert len(Tags(text).images()) >= 6


def test_the_written_summary_counts_until_the_run_goes_on(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    summarize(run_dir, stopped_by="Ctrl-C", reward_final=0.5)
    assert "stopped by Ctrl-C" in write_report(run_dir).read_text()
    later = run_dir.summary.stat().st_mtime + 1
    append(run_dir, step(21))
    os.utime(run_dir.metrics, (later, later))
    assert "0.11 → 0.96" in write_report(run_dir).read_text()
    assert json.loads(run_dir.summary.read_text())["reward_final"] == 0.5


def test_a_large_image_is_shown_small_and_a_small_one_as_it_is(tmp_path):
    store = MediaStore(tmp_path / "media")
    large = store.put(Image.effect_noise((640, 360), 80).convert("RGB"))
    small = store.put(Image.new("RGB", (32, 32)))
    gallery = Gallery(store, tmp_path / "images")
    with Image.open(tmp_path / "images" / gallery.get_image(large).file) as shown:
        assert max(shown.size) == MAX_SIDE
    assert (tmp_path / "images" / gallery.get_image(small).file).read_bytes() == store.get(small)


def test_a_long_conversation_shows_its_two_ends(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=1)
    nodes = [
        Node(
            id=i,
            parent=i - 1,
            message=user(f"word{i}") if i % 2 == 0 else assistant(f"word{i}"),
            token_ids=int32_array([1, 2]),
            sampled_start=2,
        )
        for i in range(40)
    ]
    write_traces(run_dir.traces_of(1), [Trace(id="long", nodes=nodes, error="it broke")])
    text = write_report(run_dir).read_text()
    assert "word5" in text and "word34" in text and "word20" not in text
    assert "28 messages left out" in text
    assert "it broke" in text


def test_only_one_rollout_of_a_group_is_shown(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=1)
    store = MediaStore(run_dir.media)
    traces = [trace_of(store, 0, False), trace_of(store, 0, True), trace_of(store, 1, True)]
    write_traces(run_dir.traces_of(1), traces)
    text = write_report(run_dir).read_text()
    assert text.count('class="card"') == 2
