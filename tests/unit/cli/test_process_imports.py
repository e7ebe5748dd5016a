"""Imports of a run's processes: only the launcher imports the modules that read runs."""

from __future__ import annotations

from tests.import_graph import SRC, files, imports_of, module_of


def list_reachable(start: str) -> set[str]:
    """Modules that `start` imports, directly or around corners, inside functions too. The package's
    public face, which loads its names when they are asked for, is left out."""
    paths = {
        module_of(path): path for path in files() if path.parent != SRC or path.stem == "errors"
    }
    found, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in found or name not in paths:
            continue
        found.add(name)
        for one in imports_of(paths[name]):
            if not one.for_types:
                waiting += [one.module, *(f"{one.module}.{part}" for part in one.names)]
    return found


def test_run_processes_do_not_import_run_readers() -> None:
    reached = list_reachable("sightline.cli.process")
    assert {"sightline.orchestrator.loop", "sightline.trainer.loop"} <= reached
    assert not [name for name in reached if name.startswith("sightline.view")]


def test_launcher_imports_the_console() -> None:
    assert "sightline.view.console" in list_reachable("sightline.launch.jobs")
