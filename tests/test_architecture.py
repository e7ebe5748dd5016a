"""The architecture as a test: import rows, heavy libraries, sizes, settings, the import graph.

Each test collects and shows every violation.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import import_graph
import pytest
from import_graph import (
    ROOT,
    ROW_OF,
    SRC,
    Import,
    circles,
    files,
    imports_of,
    name_of,
    room_arrows,
    rooms_used,
    tree_of,
    upward_arrows,
)

import sightline
from sightline import config
from sightline.cli.config import format_markdown
from sightline.cli.main import build_parser, main
from sightline.compute import weight_transport
from sightline.rollout.engines import BUILT_IN

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

LAST_PUBLIC_ROW = ROW_OF["launch"]
"""`sightline/__init__.py` exports names from here upwards."""

TORCH_ADDRESSES = (
    "compute/*",
    "trainer/*",
    "algo/losses.py",
    "bench/*",
    "inference/torch_engine/*",
    "inference/vllm_plugin/*",
    "families/device_copy.py",
    "families/experts.py",
    "families/gated_delta_net.py",
    "families/gguf_import.py",
    "families/*/checkpoint.py",
    "families/*/forward.py",
    "families/*/packing_trial.py",
    "families/*/weights_trial.py",
    "families/*/admission.py",
    "families/*/processor.py",
    "families/*/tiny.py",
    "families/random_weights.py",
    "families/safetensors_header.py",
    "families/tiny_checkpoint.py",
    "families/transformers_forward.py",
)
ADDRESSES = {
    "torch": TORCH_ADDRESSES,
    "transformers": TORCH_ADDRESSES,
    "vllm": ("inference/vllm_plugin/symbols.py",),
    "zmq": ("transport/*",),
    "obstore": ("media/object_remote.py",),
    "av": ("media/video.py",),
    "ray": ("launch/ray_run.py",),
    "peft": ("trainer/lora.py",),
    "PIL": (
        "media/decode.py",
        "families/*/vision.py",
        "families/*/forward.py",
        "families/*/image_tokens.py",
        "families/*/admission.py",
        "families/*/processor.py",
        "families/*/weights_trial.py",
        "envs/*",
        "view/*",
        "bench/*",
    ),  # fmt: skip
}
ENVIRONMENT_READERS = (
    "launch/*", "run/machine.py", "cli/process.py", "envs/verifiers.py", "config/secret_refs.py",
    "bounded_child.py",
)  # fmt: skip
"""Files that may touch os.environ: a child's thread budget must stand there before it imports, and
verifiers takes the key of an endpoint from there alone; settings name where secrets are; children
that render templates and try models get a few harmless ones."""


def library_of(name: Import) -> str:
    """`safetensors.torch` and similar modules import the library in their name."""
    parts = name.module.split(".")
    return next((part for part in parts if part in ADDRESSES), parts[0])


def test_package_imports_only_from_higher_layers() -> None:
    assert list(upward_arrows()) == []


def test_modules_have_no_circular_imports() -> None:
    assert list(circles()) == []


def test_only_the_launcher_imports_the_run_readers() -> None:
    readers = {a for a, b in room_arrows() if b == "view"}
    assert readers <= {"launch", "bench", "cli"}


def test_only_the_command_line_imports_the_benchmarks() -> None:
    assert {a for a, b in room_arrows() if b == "bench"} == {"cli"}


def test_architecture_page_matches_the_code() -> None:
    page = import_graph.PAGE.read_text()
    drawn, written = (
        re.sub(r"[\d,]+", "#", text) for text in (import_graph.make_page(page), page)
    )  # counts of lines may be a few commits old
    assert drawn == written, "run `make docs`"


def test_every_file_is_in_a_package_of_the_design() -> None:
    rooms = {name_of(path).split("/")[0].removesuffix(".py") for path in files()}
    assert rooms - set(ROW_OF) == {"__init__", "__main__"}
    assert set(ROW_OF) - rooms == set()


def test_public_api_exposes_no_command() -> None:
    used = [room for imported in imports_of(SRC / "__init__.py") for room in rooms_used(imported)]
    assert [room for room in used if ROW_OF[room] > LAST_PUBLIC_ROW] == []


def test_one_family_does_not_import_another() -> None:
    breaches = []
    for path in (SRC / "families").glob("*/**/*.py"):
        own = path.relative_to(SRC / "families").parts[0]
        for imported in imports_of(path):
            parts = imported.module.split(".")
            other = parts[2] if parts[:2] == ["sightline", "families"] and len(parts) > 2 else own
            if other in family_folders() and other != own:
                breaches.append(str(imported))
    assert breaches == []


def test_heavy_libraries_are_imported_only_in_allowed_modules() -> None:
    breaches = [
        str(imported)
        for path in files()
        for imported in imports_of(path)
        if library_of(imported) in ADDRESSES and not imported.for_types
        if not any(fnmatch(imported.file, address) for address in ADDRESSES[library_of(imported)])
    ]
    assert breaches == []


PREFETCHING = ("feed.py", "micro_batch_pixels.py", "sft.py", "conversations.py", "bad_media.py")
"""Modules of the trainer whose threads make buffers that another thread frees."""


def test_prefetching_modules_do_not_import_torch() -> None:
    """Their buffers come from `device_copy.allocate_rows`, which says why."""
    found = [found for path in files() for found in imports_of(path)]
    names = {f"trainer/{name}" for name in PREFETCHING}
    assert names <= {one.file for one in found}
    assert [str(one) for one in found if one.file in names and library_of(one) == "torch"] == []


def family_folders() -> list[str]:
    return sorted(path.parent.name for path in (SRC / "families").glob("*/__init__.py"))


def test_no_shared_file_names_a_family() -> None:
    breaches = []
    for family in family_folders():
        word = re.compile(re.escape(family.split("_")[0]), re.IGNORECASE)
        for path in files():
            if name_of(path).startswith(f"families/{family}/"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if word.search(line):
                    breaches.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert breaches == []


ENGINE_FOLDERS = ("inference/torch_engine/", "inference/vllm_plugin/")


def test_shared_code_does_not_compare_engine_names() -> None:
    breaches = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in files()
        if not name_of(path).startswith(ENGINE_FOLDERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Compare | ast.match_case)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in BUILT_IN
    ]
    assert breaches == [], "ask the `InferenceEngine` instead"


def loaded_after(code: str, libraries: tuple[str, ...]) -> list[str]:
    script = f"import sys\n{code}\nprint([m for m in {libraries!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, timeout=60, cwd=ROOT / "tests",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(ast.literal_eval(done.stdout.splitlines()[-1]))


HEAVY = tuple(ADDRESSES)


@pytest.mark.parametrize(
    ("code", "libraries"),
    [
        ("import sightline", HEAVY),
        ("import sightline.rollout.worker", ("torch", "transformers", "vllm")),
        ("import sightline.cli.main as m; m.build_parser()", HEAVY),
        (
            "import sightline.compute.weight_transport as w; [*map(w.load_transport, w.BUILT_IN)]",
            ("torch", "transformers"),
        ),
    ],
    ids=["the public names", "an environment worker", "the command line", "transports"],
)
def test_importing_loads_no_heavy_library(code: str, libraries: tuple[str, ...]) -> None:
    assert loaded_after(code, libraries) == []


def test_shared_code_does_not_compare_weight_transport_names() -> None:
    """Shared code asks a transport what it can do. Benchmarks name those that they measure."""
    names = set(weight_transport.BUILT_IN)
    only_transports = names - {"files", "store"}
    breaches = []
    for path in files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Compare) or name_of(path).startswith("bench/"):
                continue
            words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            asks = re.search(r"\.publish\b|transport", ast.unparse(node))
            if words & only_transports or (asks and words & names):
                breaches.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert breaches == []


MESH_OWNERS = {"trainer/parallel_dims.py", "trainer/ranks.py"}


def test_only_parallel_dims_read_the_rank_count() -> None:
    words = re.compile(r"get_world_size|init_device_mesh|\branks\.size\b")
    users = {name_of(path) for path in files() if words.search(path.read_text())}
    assert {name for name in users if not name.startswith("bench/")} <= MESH_OWNERS


ACTING = {"open", "os", "print", "random", "socket", "subprocess", "threading", "torch", "warnings"}


def acts(statement: ast.stmt) -> bool:
    """Return whether a statement at the top of a module does more than define a name."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return False
        case ast.ClassDef(body=body):
            return any(acts(inner) for inner in body)
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return False
        case ast.If(test=test, body=body, orelse=orelse):
            guards = ("TYPE_CHECKING", "__name__ == '__main__'", "sys.version_info")
            guarded = any(guard in ast.unparse(test) for guard in guards)
            return not guarded or any(acts(inner) for inner in orelse)
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if value is not None:
            calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
            return any(re.split(r"\W", ast.unparse(call.func))[0] in ACTING for call in calls)
        case ast.AnnAssign():
            return False
    return True


def test_import_has_no_side_effects() -> None:
    breaches = [
        f"{name_of(path)}:{statement.lineno}: {ast.unparse(statement).splitlines()[0]}"
        for path in files()
        for statement in tree_of(path).body
        if acts(statement)
    ]
    assert breaches == []


def test_settings_are_not_passed_in_environment_variables() -> None:
    breaches = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in files()
        if not any(fnmatch(name_of(path), reader) for reader in ENVIRONMENT_READERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert breaches == []


def test_files_are_read_only_through_regular_file() -> None:
    """Other ways to open a file wait for a pipe's writer."""

    def reads(call: ast.Call) -> bool:
        if isinstance(call.func, ast.Attribute):
            return call.func.attr in ("read_bytes", "read_text")
        words = [ast.unparse(argument) for argument in call.args]
        is_new_file = words[1:] and words[1].strip("'") in ("w", "wb", "xb")
        is_checked = words[0].startswith("os.open(") if words else False
        return ast.unparse(call.func) == "open" and not is_new_file and not is_checked

    breaches = [
        f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in files()
        if name_of(path) not in ("regular_file.py", "cli/init.py")  # the package's own templates
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and reads(node)
    ]
    assert breaches == []


def test_files_and_functions_stay_small() -> None:
    breaches = []
    for path in files():
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES:
            breaches.append(f"{name_of(path)} has {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    breaches.append(f"{name_of(path)}: {node.name} has {lines} lines")
    assert breaches == []


def test_every_module_has_a_docstring() -> None:
    assert [name_of(path) for path in files() if not ast.get_docstring(tree_of(path))] == []


def test_no_module_is_named_util_or_common() -> None:
    names = {"common", "helper", "helpers", "misc", "util", "utils"}
    assert [str(path) for path in SRC.rglob("*") if path.stem in names] == []


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in files()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_todo_comments_have_an_issue_number() -> None:
    note = re.compile(r"\b(TODO|FIXME|HACK)\b(?!\s*\(#\d+\))")
    breaches = []
    for folder in ("src", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__).resolve():
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if note.search(line):
                    breaches.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert breaches == []


def every_setting() -> dict[str, str | None]:
    """`section.key` with its description."""
    return {
        f"{section}.{name}": field.description
        for kind in (config.RunFile, config.SftFile)
        for section, name, field in config.iter_settings(kind)
    }


def test_the_settings_are_frozen() -> None:
    frozen = (ROOT / "tests" / "golden" / "settings.txt").read_text().splitlines()
    assert sorted(every_setting()) == frozen, (
        "a setting was added or removed: can another one leave? Then edit tests/golden/settings.txt"
    )


def test_every_setting_is_described() -> None:
    assert [key for key, description in every_setting().items() if not description] == []


def test_every_setting_is_read_somewhere() -> None:
    read = {
        node.attr
        for path in files()
        if name_of(path) not in ("cli/config.py",) and not name_of(path).startswith("config/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    read |= {"min_pixels", "max_pixels"} if "overrides" in read else set()
    read |= {"hosts"} if "find_host" in read else set()
    read |= {"max_mismatch"} if "mismatch_limit" in read else set()
    assert [key for key in every_setting() if key.split(".")[1] not in read] == []


def test_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == format_markdown(), "run `make docs`"


def test_the_changelog_has_an_entry() -> None:
    assert "\n- " in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_match_the_design() -> None:
    design = {"MediaStore", "MediaRef", "MediaItem", "load_family", "load_renderer", "Trace"}
    assert design | {"Environment", "Chat", "SightlineError"} <= set(sightline.__all__)
    assert list(sightline.__all__) == sorted(sightline.__all__)
    assert [name for name in sightline.__all__ if not hasattr(sightline, name)] == []


def command_paths() -> list[tuple[str, ...]]:
    """Every command and subcommand, as the words that a user types."""

    def visit(parser: object, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for action in parser._actions:  # type: ignore[attr-defined]
            if isinstance(action.choices, dict):
                for name, inner in action.choices.items():
                    yield from visit(inner, (*words, name))

    return list(visit(build_parser(), ()))


def test_the_help_of_each_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_paths():
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        assert f"usage: {' '.join(('sightline', *words))}" in capsys.readouterr().out


def test_each_command_is_explained() -> None:
    listed = build_parser().format_help()
    commands = [words[0] for words in command_paths() if len(words) == 1]
    silent = [name for name in commands if not re.search(rf"^    {name}\s+\S", listed, re.M)]
    assert silent == []


PATCHED = {
    "contract/test_channel.py": "the seconds between two signs of life, and of silence",
    "gpu/test_attention_gpu.py": "shapes that earlier tests have counted",
    "gpu/test_step_gpu.py": "packs as large as cuDNN is worth its plans for",
    "unit/cli/test_eval_command.py": "the process of a server, which is a thread",
    "unit/cli/test_try_command.py": "the process of a server, which is a thread",
    "unit/compute/test_attention_cudnn.py": "a kernel that only a GPU has",
    "unit/inference/test_sampling.py": "nothing: it counts the rows that are sorted",
    "unit/media/test_stored_file.py": "the bytes of a part",
    "unit/orchestrator/test_control_router.py": "the seconds of silence of a lost process",
    "unit/trainer/test_compiled.py": "kernels that only a GPU has",
    "unit/trainer/test_exact.py": "arithmetic that varies, which a start has to see",
    "unit/trainer/test_features.py": "nothing: it notes what is copied to the device",
    "unit/trainer/test_packing_check.py": "a pack whose sequences see each other",
    "unit/trainer/test_process.py": "when an orchestrator is lost, and the seconds of its silence",
    "unit/view/test_images_in_use.py": "a writer that finishes in the middle of a search",
}
"""Tests that patch our own code, and what they patch. Faults at an exact moment
(tests/ranks/faults, tests/chaos/slow_disk) are injected by the interpreter's sitecustomize."""


def test_own_code_is_patched_only_in_listed_tests() -> None:
    tests = ROOT / "tests"
    patched = set()
    for path in tests.rglob("test_*.py"):
        text = path.read_text()
        if "monkeypatch.setattr" not in text:
            continue
        tree = ast.parse(text)
        ours = {
            alias.asname or alias.name.split(".")[-1]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).startswith("sightline")
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "setattr"
                and ast.unparse(node.func) == "monkeypatch.setattr"
                and ast.unparse(node.args[0]).split(".")[0] in ours
            ):
                patched.add(path.relative_to(tests).as_posix())
    assert patched == set(PATCHED)


WALL_CLOCK = {
    "inference": (
        "engine.py",
        "torch_engine/observer.py",
        "vllm_plugin/engine.py",
    ),
    "media": ("cache.py", "store.py"),
    "orchestrator": ("rollout_scheduler.py", "step_metrics.py"),
    "rollout": ("model_chat.py", "openai_completions.py", "player.py"),
    "render": ("template_child.py",),
    "run": ("events.py",),
    "trainer": ("loop.py", "publish.py"),
}
"""Files that read the wall clock, to show times or (in `media`) to renew files that are read often.

Only `step_metrics` asks another machine for times, and it measures the offset of that clock.
Leases, limits, heartbeats and orders use monotonic clocks, numbers and versions.
"""


def test_no_decision_depends_on_clocks_of_two_machines() -> None:
    known = {f"{room}/{file}" for room, names in WALL_CLOCK.items() for file in names}
    clock_users = {
        str(path.relative_to(SRC))
        for path in files()
        if re.search(r"\btime\.time(_ns)?\b|datetime\.now|utcnow", path.read_text())
    }
    display_files = {name for name in clock_users if name.startswith(("view/", "bench/", "cli/"))}
    assert clock_users - display_files <= known, (
        "say in WALL_CLOCK why it does no harm, or use time.monotonic"
    )
