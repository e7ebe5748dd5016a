"""Exports stages as OpenTelemetry spans; needs the packages of the extra `otel`.

    a stage ends --> a bounded queue --> one thread --> OTLP/HTTP collector, or a file

Whoever ends a stage never waits. A collector that is away or slow costs spans: the queue drops its
oldest, and a line on stderr says so.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sightline.errors import ConfigError
from sightline.run.stages import NO_STAGE_RECORDER, Attribute, StageRecorder
from sightline.wire.file import append_line

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

PREFIX = "sightline."
PATH = "/v1/traces"
NANOSECONDS = 1_000_000_000
_IDS = ("traceId", "spanId", "parentSpanId")


@dataclass(frozen=True)
class ExportLimits:
    """How many spans wait for a collector, and how long anything waits for it."""

    queue_size: int = 4096
    batch_size: int = 512
    interval_ms: int = 1000
    export_timeout_s: float = 5.0
    close_timeout_s: float = 5.0


DEFAULT_LIMITS = ExportLimits()


def check_otel(target: str) -> None:
    """Refuses a target, if there is one, where the packages are missing."""
    try:
        is_there = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even the first part of the name
        is_there = False
    if target and not is_there:
        raise ConfigError(
            f"spans that go to {target!r} need the packages of OpenTelemetry",
            f"pip install 'sightline-rl[otel]' for {sys.executable}",
        )


def open_stages(
    target: str, process: str, run: str = "", limits: ExportLimits = DEFAULT_LIMITS
) -> StageRecorder:
    """Where the stages of `process` go: an address, the path of a file, or nowhere if empty."""
    if not target:
        return NO_STAGE_RECORDER
    check_otel(target)
    return _OtelStages(target, process, run, limits)


class _OtelStages:
    def __init__(self, target: str, process: str, run: str, limits: ExportLimits) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON

        # Says once a second that nobody listens; `_Watched` says it once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        kind = process.partition("-")[0]
        named = {"service.name": f"sightline-{kind}", "service.instance.id": process}
        if run:
            named[PREFIX + "run"] = run
        # Named, for variables of the environment would decide otherwise.
        self._provider = TracerProvider(
            sampler=DEFAULT_ON, resource=Resource(named), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _report_losses(_build_exporter(target, limits.export_timeout_s), target),
                max_queue_size=limits.queue_size,
                schedule_delay_millis=limits.interval_ms,
                max_export_batch_size=limits.batch_size,
            )
        )
        self._close_timeout_s = limits.close_timeout_s
        self._tracer: Tracer = self._provider.get_tracer("sightline")

    def begin(
        self, name: str, headers: Mapping[str, str] | None = None, **attributes: Attribute
    ) -> _OtelStage:
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = Context()
        if headers:
            parent = TraceContextTextMapPropagator().extract(headers, parent)
        return _begin_stage(self._tracer, name, parent, attributes)

    def close(self) -> None:
        """Exports what waits, in a thread that is left alone if a collector holds it up."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="otel-close")
        closing.start()
        closing.join(self._close_timeout_s)


class _OtelStage:
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def headers(self) -> dict[str, str]:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carried: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carried, self._inside())
        return carried

    def _inside(self) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, Context())

    def begin(self, name: str, **attributes: Attribute) -> _OtelStage:
        return _begin_stage(self._tracer, name, self._inside(), attributes)

    def add_finished(self, name: str, began: float, ended: float, **attributes: Attribute) -> None:
        span = self._tracer.start_span(
            name,
            self._inside(),
            attributes=_prefix_names(attributes),
            start_time=int(began * NANOSECONDS),
        )
        span.end(int(ended * NANOSECONDS))

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_prefix_names(attributes))

    def fail(self, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, why))

    def __enter__(self) -> _OtelStage:
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        if kind is not None:
            self.fail(f"{kind.__name__}: {error}")
        self._span.end()


def _begin_stage(
    tracer: Tracer, name: str, parent: Any, attributes: Mapping[str, Attribute]
) -> _OtelStage:
    from opentelemetry.trace import SpanKind

    kinds = {"generate": SpanKind.CLIENT, "judge": SpanKind.CLIENT, "serve": SpanKind.SERVER}
    kind = kinds.get(name, SpanKind.INTERNAL)
    return _OtelStage(tracer, tracer.start_span(name, parent, kind, _prefix_names(attributes)))


def _prefix_names(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {PREFIX + name: value for name, value in attributes.items()}


def _build_exporter(target: str, timeout_s: float) -> SpanExporter:
    url = urlsplit(target)
    if not url.scheme:
        return _build_file_exporter(Path(target))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    endpoint = target if url.path.strip("/") else target.rstrip("/") + PATH
    return OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)


def _build_file_exporter(path: Path) -> SpanExporter:
    """OTLP's own file format: a line is a JSON object with the spans of one batch."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            found = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
            for resource in found["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        # As hexadecimal digits, where protobuf's JSON has base64.
                        for key in _IDS:
                            if key in span:
                                span[key] = base64.b64decode(span[key]).hex()
            append_line(path, json.dumps(found, separators=(",", ":")).encode())
            return SpanExportResult.SUCCESS

    return ToFile()


def _report_losses(exporter: SpanExporter, target: str) -> SpanExporter:
    """Says once that spans do not arrive, and how many were lost when they do again."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Watched(SpanExporter):
        lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            why = "it does not take them"
            try:
                result = exporter.export(spans)
            except Exception as error:  # a library of others, or a disk that is full
                result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
            if result is SpanExportResult.SUCCESS:
                if self.lost:
                    _print_stderr(f"spans reach {target} again; {self.lost} were lost")
                self.lost = 0
            else:
                if not self.lost:
                    _print_stderr(f"spans are lost, {target}: {why}; the run goes on without them")
                self.lost += len(spans)
            return result

        def shutdown(self) -> None:
            if self.lost:
                _print_stderr(f"{self.lost} spans for {target} were lost")
            exporter.shutdown()

    return Watched()


def _print_stderr(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
