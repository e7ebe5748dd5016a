"""Servers that a run did not start: whether they fit it, and how it gets more of them or fewer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from sightline.config import RunFile
from sightline.config.load import validate_config
from sightline.errors import ConfigError
from sightline.families import Family, load_family
from sightline.rollout.engines import load_engine
from sightline.run import RunDir
from sightline.run.server_changes import (
    DRAIN,
    REMOVE,
    SERVE,
    ServerReport,
    Wanted,
    change_server,
    list_wanted,
)
from sightline.transport.http_client import bearer

HTTP_TIMEOUT_S = 10.0


def check_external_servers(config: RunFile, family: Family) -> None:
    """Refuses one of `[inference] servers` that does not answer, or would not serve this run as it
    expects."""
    if not config.inference.servers:
        return
    if not config.media.root:
        raise ConfigError(
            "[inference] servers without [media] root: they could not find the run's images",
            "set it to the folder or address that the servers were started with",
        )
    if (way := config.trainer.publish) in ("broadcast", "ipc"):
        raise ConfigError(
            f'[trainer] publish = "{way}" with [inference] servers, which take files',
            'set publish = "files"',
        )
    token, engine = config.inference.read_token(), load_engine(config.inference.engine)
    for address in config.inference.servers:
        engine.check_server(config, family, address, partial(_get_json, address, token=token))


def leave_out_silent_servers(config: RunFile, run_dir: RunDir) -> RunFile:
    """The run file with the servers that answer, where a run goes on and some do: the others are
    taken when they do."""
    if not config.inference.servers or not run_dir.config.is_file():
        return config
    wanted = list_wanted(run_dir, config.inference.servers)
    servers = [url for url, want in wanted.items() if want != REMOVE]
    silent = [url for url in servers if not _is_answered(url)]
    if len(silent) < len(servers):
        for url in silent:
            print(f"{url} does not answer: the run goes on without it until it does")
        servers = [url for url in servers if url not in silent]
    inference = config.inference.model_copy(update={"servers": tuple(servers)})
    return config.model_copy(update={"inference": inference})


def _is_answered(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=HTTP_TIMEOUT_S).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def _get_json(address: str, path: str, token: str) -> dict[str, Any]:
    """The JSON object that is answered; an empty one for a refusal, and for anything else."""
    request = urllib.request.Request(address.rstrip("/") + path, headers=bearer(token))
    try:
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            found = json.loads(answer.read())
            return found if isinstance(found, dict) else {}
    except (urllib.error.HTTPError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 401:
            raise ConfigError(
                f"[inference] servers: {address} asks for a{'nother' * bool(token)} token",
                "name where it is in [inference] token: env:NAME or file:PATH",
            ) from error
        return {}
    except OSError as error:
        raise ConfigError(
            f"[inference] servers: {address} does not answer: {error}",
            "start it first, or correct the address",
        ) from error


def add_server(run_dir: RunDir, config: RunFile, url: str) -> str:
    """Gives the run a server, which is refused where it would not serve the run as it expects."""
    values = config.model_dump()
    values["inference"]["servers"] = [url]
    alone = validate_config(RunFile, values, "the run with this server")
    check_external_servers(alone, load_family(config.model.path, **config.model.overrides()))
    change_server(run_dir, config.inference.servers, url, SERVE)
    return f"{url} is given turns when it has adopted the newest version"


def list_servers(run_dir: RunDir, config: RunFile) -> dict[str, Wanted]:
    """The servers of the run, also those that it started, and what is wanted of each."""
    known = list_wanted(run_dir, config.inference.servers)
    own = {} if config.inference.servers else {one.url: SERVE for one in read_reports(run_dir)}
    return {name: state for name, state in (own | known).items() if state != REMOVE}


def take_server(run_dir: RunDir, config: RunFile, url: str, wanted: Wanted) -> str:
    """Has a server drained or removed; another has to be left."""
    servers = list_servers(run_dir, config)
    if url not in servers:
        raise ConfigError(
            f"the run has no server {url}: it has {', '.join(servers) or 'none'}",
            "write an address of this list",
        )
    if wanted == REMOVE and url not in list_wanted(run_dir, config.inference.servers):
        raise ConfigError(f"{url} is a server that the run started", "drain it instead")
    if not any(state == SERVE for name, state in servers.items() if name != url):
        raise ConfigError(
            f"{url} is the last server of the run that serves",
            "add another first: `sightline servers RUN add URL`",
        )
    change_server(run_dir, config.inference.servers, url, wanted)
    return f"{url} is {'given no further turns' if wanted == DRAIN else 'removed'}"


def describe_servers(run_dir: RunDir, config: RunFile) -> str:
    """A line for each server: its state, version and requests, as the run last said."""
    reports = {report.url: report for report in read_reports(run_dir)}
    wanted = list_wanted(run_dir, config.inference.servers)
    lines = []
    for url in dict.fromkeys((*wanted, *reports)):
        report, want = reports.get(url), wanted.get(url, SERVE)
        if want == REMOVE and report is None:
            continue
        state = report.state if report else "not asked yet"
        if report is not None:
            version = f"version {report.version}" if report.version >= 0 else "no version"
            state += f", {version}, {report.load} requests"
            state += f": {report.problem}" if report.problem else ""
        lines.append(f"{url}  {state}" + (f" ({want} wanted)" if want != SERVE else ""))
    return "\n".join(lines) or "the run starts a server of its own"


def read_reports(run_dir: RunDir) -> list[ServerReport]:
    """What the orchestrator last said of its servers."""
    with suppress(FileNotFoundError):
        data = run_dir.server_report.read_bytes()
        return msgspec.json.decode(data, type=list[ServerReport])
    return []
