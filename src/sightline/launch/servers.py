"""List, add, drain and remove a run's inference servers, for `sightline servers`."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from sightline.config import RunFile
from sightline.config.load import validate_config
from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.launch.checks.servers import check_external_servers
from sightline.regular_file import read_bytes
from sightline.run import RunDir
from sightline.run.server_changes import DRAIN, REMOVE, SERVE, Wanted, change_server, list_wanted
from sightline.wire.control import ServerStatus


def add_server(run_dir: RunDir, config: RunFile, url: str) -> str:
    """Add a server to the run. Raise if it is not suitable for the run."""
    values = config.model_dump()
    values["inference"]["servers"] = [url]
    config_with_server = validate_config(RunFile, values, "the run with this server")
    family = load_family(config.model.path, **config.model.overrides())
    check_external_servers(config_with_server, family)
    change_server(run_dir, config.inference.servers, url, SERVE)
    return f"{url} gets turns once it has adopted the newest version"


def list_servers(run_dir: RunDir, config: RunFile) -> dict[str, Wanted]:
    """Return the wanted state of each server, including servers that the run started."""
    servers = list_wanted(run_dir, config.inference.servers)
    if not config.inference.servers:
        servers = {report.url: SERVE for report in read_reports(run_dir)} | servers
    return {url: state for url, state in servers.items() if state != REMOVE}


def take_server(run_dir: RunDir, config: RunFile, url: str, wanted: Wanted) -> str:
    """Drain or remove a server. Raise if no other server would be left."""
    servers = list_servers(run_dir, config)
    if url not in servers:
        names = ", ".join(servers) or "none"
        raise ConfigError(f"the run has no server {url}", f"choose from: {names}")
    if wanted == REMOVE and url not in list_wanted(run_dir, config.inference.servers):
        raise ConfigError(f"the run started {url} itself, and cannot remove it", "drain it instead")
    if not any(state == SERVE for name, state in servers.items() if name != url):
        raise ConfigError(
            f"{url} is the run's last server", "add another first: `sightline servers RUN add URL`"
        )
    change_server(run_dir, config.inference.servers, url, wanted)
    return f"{url} {'gets no further turns' if wanted == DRAIN else 'is removed'}"


def describe_servers(run_dir: RunDir, config: RunFile) -> str:
    """Return a line for each server with its last reported state, version and requests."""
    reports = {report.url: report for report in read_reports(run_dir)}
    states = list_wanted(run_dir, config.inference.servers)
    lines = []
    for url in dict.fromkeys((*states, *reports)):
        report, want = reports.get(url), states.get(url, SERVE)
        if want == REMOVE and report is None:
            continue
        state = "no report yet"
        if report is not None:
            is_known = report.version is not None and report.version >= 0
            version = f"version {report.version}" if is_known else "no version"
            state = f"{report.state}, {version}, {report.load} requests"
            state += f": {report.problem}" if report.problem else ""
        lines.append(f"{url}  {state}" + (f" ({want} requested)" if want != SERVE else ""))
    return "\n".join(lines) or "the run starts its own server"


def read_reports(run_dir: RunDir) -> list[ServerStatus]:
    """Return the orchestrator's last report on each server."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode(read_bytes(run_dir.server_report), type=list[ServerStatus])
    return []
