import json
import os
import re

from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trace import write_traces
from sightline.view.dashboard import export
from sightline.view.report import write_report
from sightline.view.summary import summarize
from sightline.wire.event import Event

from .event_fixtures import HOSTILE, T0, append, step, trace_of, write_run


def report_of(run_dir):
    write_report(run_dir)
    return (run_dir.report / "report.md").read_text()


def read_export(page):
    """The data embedded in an exported page."""
    text = page.read_text()
    embedded = re.search(r'<script type="application/json" id="exported">(.*?)</script>', text)
    return json.loads(embedded[1])


def test_report_shows_metrics_and_rollouts(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    summarize(run_dir)
    text = report_of(run_dir)
    for words in (
        "0.11", "0.96", "images swapped", "Held-out tasks", "Verdicts", "no\\_signal", "83%",
        "### Step 000001", "### Step 000020", "seed = 3",
    ):  # fmt: skip
        assert words in text, words
    assert text.count("\ntrace ") == 6


def test_hostile_text_executes_no_script(tmp_path):
    run_dir = write_run(tmp_path / "demo", text=HOSTILE)
    values = {"reason": HOSTILE, "rollout_id": HOSTILE, "detail": HOSTILE}
    append(run_dir, Event(time=T0, process="orchestrator", kind="dropped", values=values))
    append(run_dir, step(21, parts={HOSTILE: 1.0}, verdicts={HOSTILE: 3}))
    values = {"name": HOSTILE, "metric": 0.5, "parts": {HOSTILE: 0.1}}
    append(run_dir, Event(time=T0, process="orchestrator", kind="eval", values=values))
    run_dir.config.write_text(run_dir.config.read_text() + f"# {HOSTILE.splitlines()[0]}\n")
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", report_of(run_dir), flags=re.S | re.M)
    assert "<script" not in outside
    assert "<img" not in outside
    page = (run_dir.report / "index.html").read_text()
    # The page has only our three script elements: text cannot open or close one.
    assert page.count("<script") == page.count("</script") == 3
    assert "default-src 'none'" in page


def test_empty_run_has_a_report(tmp_path):
    run_dir = RunDir(tmp_path / "empty")
    assert report_of(run_dir).startswith("# empty")
    assert read_export(run_dir.report / "index.html")["answers"]["rollouts"]["rows"] == []


def test_written_summary_is_used_until_the_run_continues(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    summarize(run_dir, stopped_by="Ctrl-C", reward_final=0.5)
    assert "Ctrl-C" in report_of(run_dir)
    later = run_dir.summary.stat().st_mtime + 1
    append(run_dir, step(21))
    os.utime(run_dir.metrics, (later, later))
    assert "Ctrl-C" not in report_of(run_dir)
    assert json.loads(run_dir.summary.read_text())["reward_final"] == 0.5


def test_a_damaged_trace_file_is_named_and_the_rest_is_shown(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    file = run_dir.traces_of(20)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    text = report_of(run_dir)
    assert "ends inside trace" in text
    assert text.count("\ntrace ") >= 3
    problems = read_export(run_dir.report / "index.html")["answers"]["runs"][0]["problems"]
    assert any("ends inside trace" in problem for problem in problems)


def test_only_one_rollout_of_a_group_is_in_the_markdown(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=1)
    store = MediaStore(run_dir.media)
    traces = [trace_of(store, 0, False), trace_of(store, 0, True), trace_of(store, 1, True)]
    write_traces(run_dir.traces_of(1), traces)
    assert report_of(run_dir).count("\ntrace ") == 2


def test_the_export_has_the_first_and_the_last_step_with_their_images(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=20)
    data = read_export(write_report(run_dir))
    rows = data["answers"]["rollouts"]["rows"]
    assert {row["step"] for row in rows} == {1, 20}
    assert len(data["answers"]["metrics"]["step"]) == 20
    for row in rows:
        place = f"{row['file']}/{row['number']}"
        rollout = data["answers"][f"rollout/{place}"]
        for node in rollout["nodes"]:
            assert (f"tokens/{place}/{node['id']}" in data["answers"]) == (node["num_sampled"] > 0)
            for part in node["parts"]:
                assert "image" not in part or data["media"][part["image"]].startswith("data:image/")


def test_a_missing_image_is_left_out_of_the_export(tmp_path):
    run_dir = write_run(tmp_path / "demo")
    store = MediaStore(run_dir.media)
    for digest in list(store.digests()):
        store.path(digest).unlink()
    data = read_export(write_report(run_dir))
    assert data["media"] == {}
    images = [p for n in next(iter(rollouts(data)))["nodes"] for p in n["parts"] if "image" in p]
    assert images and all(part["missing"] for part in images)


def rollouts(data):
    return (answer for path, answer in data["answers"].items() if path.startswith("rollout/"))


def test_oversized_export_has_fewer_rollouts(tmp_path):
    run_dir = write_run(tmp_path / "demo", steps=2)
    store = MediaStore(run_dir.media)
    for number in (1, 2):
        write_traces(run_dir.traces_of(number), [trace_of(store, i, True) for i in range(100)])
    page = write_report(run_dir)
    assert sum(1 for _ in rollouts(read_export(page))) == export.MAX_ROLLOUTS
    limit = page.stat().st_size - 50_000
    export.export_run(run_dir, page, limit)
    assert page.stat().st_size <= limit
    assert 0 < sum(1 for _ in rollouts(read_export(page))) < export.MAX_ROLLOUTS
