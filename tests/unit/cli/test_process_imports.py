"""Imports of a run's processes: only the launcher imports the modules that read runs."""

from __future__ import annotations

from tests.import_graph import SRC, files, imports_of, module_of


def list_reachable(start: str) -> set[str]:
    """Return the modules that `start` imports, directly or indirectly, also inside functions.

    The package's lazy public names are not included.
    """
    paths = {
        module_of(path): path for path in files() if path.parent != SRC or path.stem == "errors"
    }
    reachable, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in reachable or name not in paths:
            continue
        reachable.add(name)
        for imported in imports_of(paths[name]):
            if not imported.for_types:
                waiting += [
                    imported.module,
                    *(f"{imported.module}.{part}" for part in imported.names),
                ]
    return reachable


def test_run_processes_do_not_import_run_readers() -> None:
    reached = list_reachable("sightline.cli.process")
    assert {"sightline.orchestrator.loop", "sightline.trainer.loop"} <= reached
    assert not [name for name in reached if name.startswith("sightline.view")]


def test_launcher_imports_the_console() -> None:
    assert "sightline.view.console" in list_reachable("sightline.launch.jobs")
