"""`sightline media`: manage image stores."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from rich.filesize import decimal

from sightline.config import MediaConfig
from sightline.config.load import validate_config
from sightline.config.secret_refs import read_reference, resolve_secret
from sightline.errors import ConfigError, MediaCorrupt, MediaError, MediaMissing
from sightline.media import MediaStore, open_store
from sightline.media.files import BLOBS
from sightline.media.remote import DEADLINE_S, START_DEADLINE_S, Unavailable
from sightline.media.stored_file import open_blobs
from sightline.run import RunDir
from sightline.transport.listen import add_listen_options
from sightline.view.images_in_use import collect_digests, is_run_dir
from sightline.view.run_files import RunFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="media_action", required=True, metavar="ACTION")

    put = actions.add_parser("put", help="store image files and print their references")
    put.add_argument("files", nargs="+", type=Path, metavar="FILE")
    ls = actions.add_parser("ls", help="list the stored images")
    verify = actions.add_parser(
        "verify", help="verify every image; exits with status 1 if one is damaged"
    )
    gc = actions.add_parser("gc", help="delete images and weights that none of the named runs "
                            "uses")  # fmt: skip
    gc.add_argument("--min-age-s", type=float, default=3600.0, metavar="S",
                    help="keep files used in the last S seconds (default: 3600); during a run, use "
                    "more than its longest rollout takes")  # fmt: skip
    gc.add_argument("--dry-run", action="store_true", help="only print what would be deleted")

    serve = actions.add_parser("serve", help="serve an image folder to other machines")
    serve.add_argument(
        "root", type=Path, metavar="DIR", help="folder of the store; created if missing"
    )
    add_listen_options(serve, 8100)
    serve.add_argument("--max-gb", type=float, default=None, metavar="GB",
                       help="size limit of the folder in GB; uploads beyond it, or that would "
                       "leave less than 1 GiB free on the disk, get status 507")  # fmt: skip
    serve.add_argument("--control-token", default="", metavar="REF",
                       help="reference to the token for storing weights and checkpoints and for "
                       "`media gc` (default: --token)")  # fmt: skip

    for action in (put, ls, verify, gc):
        action.add_argument("--store", metavar="ROOT", help="the store, a folder or a URL "
                            "(default: the store of --run)")  # fmt: skip
    for action in (put, ls, verify, gc, serve):
        action.add_argument("--token", default="", metavar="REF",
                            help="reference to the media service's token: env:NAME or "
                            "file:PATH")  # fmt: skip
    for action in (put, ls, verify):
        action.add_argument("--run", dest="runs", nargs=1, default=[], type=Path, metavar="RUN_DIR")
    gc.add_argument("--run", dest="runs", nargs="+", default=[], type=Path, metavar="RUN_DIR",
                    help="every run that uses the store; a run that contains the store is "
                    "always included")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the action. Return 1 if an image was refused or is damaged."""
    token = resolve_secret(read_reference(args.token), "--token")
    if args.media_action == "serve":
        from sightline.launch.media_service import serve_media

        given = {} if args.max_gb is None else {"max_gb": args.max_gb}
        section = validate_config(MediaConfig, given, "the service's settings")
        control = resolve_secret(read_reference(args.control_token), "--control-token")
        store = MediaStore(args.root, max_bytes=int(section.max_gb * 1e9) if given else None)
        serve_media(store, args.host, args.port, token, control, args.tls_cert, args.tls_key)
        return 0
    root, token = _find_store(args, token)
    # Long operations wait for a store that is briefly unavailable. Short ones fail early.
    deadline_s = START_DEADLINE_S if args.media_action in ("put", "ls") else DEADLINE_S
    store = open_store(root, token=token, deadline_s=deadline_s)
    if args.media_action != "put" and isinstance(store.root, Path) and not store.root.is_dir():
        raise ConfigError(f"no store at {store.root}", "pass an existing store with --store")
    if args.media_action == "gc":
        return _gc(store, open_blobs(store.root, token), args)
    return {"put": _put, "ls": _ls, "verify": _verify}[args.media_action](store, args)


def _find_store(args: argparse.Namespace, token: str) -> tuple[Path | str, str]:
    """Return the root and token of the given store, or of the run's store."""
    if args.store:
        return args.store, token
    if len(args.runs) != 1:
        raise ConfigError(
            "no store given", "pass one with --store ROOT, or a run with --run RUN_DIR"
        )
    run_dir = RunDir(args.runs[0])
    if not run_dir.path.is_dir():
        raise ConfigError(f"no run at {run_dir.path}", "pass a run directory with --run")
    section = RunFiles(run_dir).get_section("media")
    media = validate_config(MediaConfig, section, f"[media] of {run_dir.config}")
    if media.root and not args.token:
        token = media.read_token(for_control=args.media_action == "gc")
    return media.root or run_dir.media, token


def _put(store: MediaStore, args: argparse.Namespace) -> int:
    num_refused = 0
    for path in args.files:
        try:
            ref = store.put(path)
        except MediaError as error:
            if isinstance(error.__cause__, Unavailable):  # the other files would fail too
                raise
            num_refused += 1
            print(f"{path}: {error}", file=sys.stderr)
        else:
            print(f"{ref.url}  {ref.mime}  {ref.width}x{ref.height}  {path}")
    return 1 if num_refused else 0


def _ls(store: MediaStore, args: argparse.Namespace) -> int:
    num_images = num_bytes = num_damaged = 0
    for digest in store.digests():
        num_images += 1
        try:
            ref = store.get_ref(digest)
        except MediaMissing:  # removed since the list was made
            num_images -= 1
        except MediaCorrupt:
            num_damaged += 1
            print(f"{digest}  damaged")
        else:
            num_bytes += ref.nbytes
            print(f"{digest}  {ref.mime}  {ref.width}x{ref.height}  {ref.nbytes}")
    print(f"{num_images} images, {decimal(num_bytes)}, {num_damaged} damaged")
    return 1 if num_damaged else 0


def _verify(store: MediaStore, args: argparse.Namespace) -> int:
    report = store.verify()
    for digest in report.corrupt:
        place = digest if isinstance(store.root, str) else store.path(digest)
        print(f"damaged: {place}")
    print(f"{report.num_files} images, {decimal(report.size_bytes)}, {len(report.corrupt)} damaged")
    return 1 if report.corrupt else 0


def _gc(store: MediaStore, blobs: MediaStore, args: argparse.Namespace) -> int:
    runs, is_blobs = set(args.runs), str(store.root).endswith(f"/{BLOBS}")
    if isinstance(store.root, Path):
        home = store.root.parent if is_blobs else store.root
        runs |= {home.parent} if home.name == "media" and is_run_dir(home.parent) else set()
    if not runs:
        raise ConfigError(
            f"no run given that uses the store {store.root}, so nothing can be deleted",
            "name all runs that use it with --run RUN_DIR...",
        )
    print(f"searching {len(runs)} run(s) for images in use", file=sys.stderr)
    in_use = collect_digests(*runs)
    _gc_one(store, "parts of files" if is_blobs else "images", in_use, args)
    if not is_blobs and (isinstance(blobs.root, str) or blobs.root.is_dir()):
        _gc_one(blobs, "parts of files", in_use, args)
    return 0


def _gc_one(
    store: MediaStore, what: str, in_use: Collection[str], args: argparse.Namespace
) -> None:
    report = store.gc(in_use, args.min_age_s, dry_run=args.dry_run)
    verb = "would remove" if args.dry_run else "removed"
    if args.dry_run:
        for digest in report.removed:
            print(digest)
    print(
        f"{verb} {len(report.removed)} {what}, {decimal(report.removed_bytes)}, and "
        f"{report.num_temporary} half-written files; kept {report.num_in_use} in use and "
        f"{report.num_young} used in the last {args.min_age_s:g} s"
    )
