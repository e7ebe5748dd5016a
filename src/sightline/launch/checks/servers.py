"""Check the engine, and inference servers that the run did not start."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from sightline.compute.weight_transport import find_transport
from sightline.config import RunFile
from sightline.config.secret_refs import resolve_secret
from sightline.errors import ConfigError, format_command
from sightline.families import Family, load_family, load_renderer
from sightline.families.checkpoint_files import resolve_checkpoint
from sightline.launch.checks.model import draw_test_image
from sightline.media import MediaStore, is_address, open_store
from sightline.media.remote import START_DEADLINE_S
from sightline.orchestrator.teacher import LEASE as TEACHER_LEASE
from sightline.render import check_vocabularies
from sightline.rollout.engines import load_engine
from sightline.run import RunDir
from sightline.run.server_changes import REMOVE, list_wanted
from sightline.transport.http_client import bearer
from sightline.wire.codec import check_release

HTTP_TIMEOUT_S = 10.0
IMAGE_TIMEOUT_S = 300.0
"""Time limit for requests with an image. The first may load the server's media library."""


def check_engine(config: RunFile, family: Family, run_dir: RunDir) -> str:
    """Raise if the engine is not installed or cannot serve the family, or if one of `[inference]
    servers` is not suitable for this run."""
    answering = leave_out_silent_servers(config, run_dir)
    load_engine(config.inference.engine).check(answering, family)
    check_external_servers(answering, family)
    check_server_files(answering, family, run_dir)
    if config.algorithm.teacher:
        check_teacher(config, family)
    return ", ".join(config.inference.servers) or config.inference.engine


def check_external_servers(config: RunFile, family: Family) -> None:
    """Raise if a server does not answer, or its model, engine or limits differ from the run's."""
    if not config.inference.servers:
        return
    if not config.media.root:
        raise ConfigError(
            "[inference] servers cannot find the run's images without [media] root",
            "set it to the folder or address that the servers were started with",
        )
    token, engine = config.inference.read_token(), load_engine(config.inference.engine)
    for address in config.inference.servers:
        engine.check_server(config, family, address, partial(_request_json, address, token=token))


def check_teacher(config: RunFile, family: Family) -> None:
    """Raise if the teacher has another vocabulary, or if its server does not suit the run."""
    settings, where = config.algorithm, "[algorithm] teacher_server"
    teacher = load_family(path := resolve_checkpoint(settings.teacher))
    with tempfile.TemporaryDirectory(prefix="sightline-check-") as folder:
        store = MediaStore(Path(folder))
        check_vocabularies(
            load_renderer(config.model.path, store, family),
            load_renderer(path, store, teacher),
            f"[algorithm] teacher = {settings.teacher!r}",
        )
    if not settings.teacher_server:
        return
    address = settings.teacher_server
    token = resolve_secret(settings.teacher_token, "[algorithm] teacher_token")
    health = _request_json(address, "/health", token, where=where)
    if "fingerprint" not in health:
        raise ConfigError(
            f"{where} = {address!r} is not a Sightline server, or requires another token",
            "start it with `sightline serve`, and set [algorithm] teacher_token",
        )
    check_release(str(health.get("release", "")), f"{where} {address}")
    problem = ""
    if health.get("fingerprint") != teacher.fingerprint:
        problem = f"it has fingerprint {health.get('fingerprint')}, not {teacher.fingerprint}"
    elif health.get("leased_to") not in ("", TEACHER_LEASE):
        problem = f"it is leased to run {health.get('leased_to')}, which trains its weights"
    elif family.shows_media and not config.media.root:
        problem = "it cannot find the run's images without [media] root"
    if problem:
        raise ConfigError(
            f"{where} = {address!r} does not serve this run: {problem}",
            f"start it with `{format_command('sightline', 'serve', settings.teacher)} --media ROOT`"
            ", and set [media] root to the same ROOT",
        )


def leave_out_silent_servers(config: RunFile, run_dir: RunDir) -> RunFile:
    """Return a resumed run's file without silent servers, if other servers answer. The run adds
    them again when they answer."""
    if not config.inference.servers or not run_dir.config.is_file():
        return config
    states = list_wanted(run_dir, config.inference.servers)
    servers = [url for url, state in states.items() if state != REMOVE]
    silent = [url for url in servers if not _answers(url)]
    if len(silent) < len(servers):
        for url in silent:
            print(f"{url} does not answer: the run continues without it until it does")
        servers = [url for url in servers if url not in silent]
    return config.with_values("inference", servers=tuple(servers))


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=HTTP_TIMEOUT_S).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def check_server_files(config: RunFile, family: Family, run_dir: RunDir) -> None:
    """Raise if a server is leased to another run, refuses weights from this run's folder, or does
    not find an image from this run's store."""
    if not config.inference.servers:
        return
    token, control_token = (config.inference.read_token(control) for control in (False, True))
    run_id = run_dir.read_id() if run_dir.id_file.is_file() else ""
    options = config.media.store_options()
    store = open_store(config.media.root, deadline_s=START_DEADLINE_S, **options)
    # Append random bytes to the picture, so that no other store has this file.
    image = store.put(draw_test_image() + os.urandom(16))
    part = {"type": "image_url", "image_url": {"url": image.url}}
    chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    # This version does not exist. A server that may not read the folder refuses the path first.
    version = {"manifest": str(run_dir.path / "none" / "manifest.json")}
    try:
        for address in config.inference.servers:
            where = f"[inference] servers: {address}"
            holder = _request_json(address, "/health", token).get("leased_to", "")
            if holder not in ("", run_id):
                fix = "end that run, or use another server"
                raise ConfigError(f"{where} is leased to run {holder}", fix)
            answer = _request_json(address, "/sightline/v1/adopt", control_token, version)
            fix = str(answer.get("error", {}).get("fix"))
            if not find_transport(config).sends_manifest and "--weights-root" in fix:
                raise ConfigError(f"{where} takes no weights from {run_dir.path}", fix)
            if not family.shows_media:
                continue
            error = _request_json(address, "/v1/chat/completions", token, chat).get("error", {})
            if str(error.get("code")).startswith("media_"):
                raise ConfigError(
                    f"{where} cannot read an image that is in [media] root = {store.root}: "
                    f"{error.get('message')}",
                    "start it with --media (and --media-token) of this store, or set [media] root "
                    "to its own",
                )
    finally:
        if not is_address(config.media.root):  # in remote stores, gc removes it
            store.path(image.digest).unlink(missing_ok=True)


def _request_json(
    address: str, path: str, token: str, body: object = None, where: str = "[inference] servers"
) -> dict[str, Any]:
    """Return the JSON object of an answer or error, or an empty object for any other response."""
    data = None if body is None else json.dumps(body).encode()
    headers = bearer(token) | {"content-type": "application/json"}
    request = urllib.request.Request(address.rstrip("/") + path, data, headers)
    try:
        timeout = HTTP_TIMEOUT_S if body is None else IMAGE_TIMEOUT_S
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(
                f"{where}: {address} requires a{'nother' * bool(token)} token",
                "name where it is in [inference] token: env:NAME or file:PATH",
            ) from error
        with error:
            text = error.read()
    except OSError as error:
        raise ConfigError(
            f"{where}: {address} does not answer: {error}",
            "start it first, or correct the address",
        ) from error
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
