"""`sightline serve MODEL`: an inference server on one checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import ConfigError

if TYPE_CHECKING:
    from sightline.inference.settings import ServeSettings

ENGINES = ("torch", "vllm")
MEBIBYTE = 2**20


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="serve a checkpoint")
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument("--engine", default="torch", help=f"one of: {', '.join(ENGINES)}")
    parser.add_argument(
        "--python", default="", metavar="PATH",
        help="interpreter that has vLLM, for --engine vllm; default: this one",
    )  # fmt: skip
    parser.add_argument(
        "--media", type=Path, action="append", required=True, metavar="DIR",
        help="a store root; may be given again for further ones",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences in flight or kept")
    parser.add_argument("--max-model-len", type=int, default=2048, help="most tokens of a sequence")
    parser.add_argument(
        "--prefill-chunk-tokens", type=int, default=512, help="prompt tokens at once"
    )
    parser.add_argument("--pixel-cache-mb", type=int, default=256, help="patches kept")
    parser.add_argument("--feature-cache-mb", type=int, default=256, help="image features kept")
    parser.add_argument("--pixel-threads", type=int, default=0, help="0 follows the cores")
    parser.add_argument("--max-waiting", type=int, default=4096, help="requests that may wait")
    parser.add_argument("--max-waiting-mb", type=int, default=4096, help="their size in memory")
    parser.add_argument("--keep-kv-over-updates", action="store_true", help="do not prefill again")
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="forget a turn when it ends"
    )
    parser.add_argument("--min-pixels", type=int, help="overrides the checkpoint's")
    parser.add_argument("--max-pixels", type=int, help="overrides the checkpoint's")
    parser.add_argument(
        "--otel", default="", metavar="TO",
        help="OpenTelemetry spans: the address of an OTLP/HTTP collector, or a file",
    )  # fmt: skip
    parser.add_argument("--weights", type=Path, help="manifest of the weights to begin with")


def run(args: argparse.Namespace) -> int:
    if args.engine not in ENGINES:
        raise ConfigError(
            f"no engine {args.engine!r}", f"choose one that is available: {', '.join(ENGINES)}"
        )
    settings = _build_settings(args)
    if args.engine == "vllm":
        from sightline.launch.vllm_server import serve_vllm

        serve_vllm(settings, args.python)
    else:
        from sightline.inference.serve import serve

        serve(settings)
    return 0


def _build_settings(args: argparse.Namespace) -> ServeSettings:
    from sightline.inference.settings import ServeSettings, pick_pixel_threads

    bounds = {"min_pixels": args.min_pixels, "max_pixels": args.max_pixels}
    return ServeSettings(
        model=args.model,
        media_roots=tuple(args.media),
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        prefill_chunk_tokens=args.prefill_chunk_tokens,
        pixel_cache_bytes=args.pixel_cache_mb * MEBIBYTE,
        feature_cache_bytes=args.feature_cache_mb * MEBIBYTE,
        enable_prefix_caching=not args.no_prefix_caching,
        overrides={name: value for name, value in bounds.items() if value is not None},
        manifest=args.weights,
        otel=args.otel,
        pixel_threads=pick_pixel_threads(args.pixel_threads),
        max_waiting=args.max_waiting,
        max_waiting_bytes=args.max_waiting_mb * MEBIBYTE,
        keep_kv_over_updates=args.keep_kv_over_updates,
    )
