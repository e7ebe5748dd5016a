"""Export stages as OpenTelemetry spans. Needs the extra `otel`.

    a stage ends --> a bounded queue --> one thread --> OTLP/HTTP collector, or a file

Ending a stage never blocks. If the collector is slow or unreachable, the queue drops its oldest
spans, and a line on stderr reports it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sightline.errors import clean_text
from sightline.run.stages import Attribute, ExportLimits, Headers, Stage, StageRecorder
from sightline.wire.file import append_line

PREFIX = "sightline."
PATH = "/v1/traces"
NANOSECONDS = 1_000_000_000
IDS = ("traceId", "spanId", "parentSpanId")
KINDS = {"generate": SpanKind.CLIENT, "judge": SpanKind.CLIENT, "serve": SpanKind.SERVER}


class OtelStages(StageRecorder):
    def __init__(self, target: str, process: str, run: str, limits: ExportLimits) -> None:
        # The library logs every failure; `_LossReporter` reports it once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        kind = process.partition("-")[0]
        names = {"service.name": f"sightline-{kind}", "service.instance.id": process}
        if run:
            names[PREFIX + "run"] = run
        # Explicit, because environment variables would decide otherwise.
        self._provider = TracerProvider(
            sampler=DEFAULT_ON, resource=Resource(names), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _LossReporter(_build_exporter(target, limits.export_timeout_s), target),
                max_queue_size=limits.queue_size,
                schedule_delay_millis=limits.interval_ms,
                max_export_batch_size=limits.batch_size,
            )
        )
        self._close_timeout_s = limits.close_timeout_s
        self._tracer: Tracer = self._provider.get_tracer("sightline")

    def begin(self, name: str, headers: Headers | None = None, **attributes: Attribute) -> Stage:
        parent = Context()
        if headers:
            parent = TraceContextTextMapPropagator().extract(headers, parent)
        return _OtelStage(self._tracer, name, parent, attributes)

    def close(self) -> None:
        """Export the remaining spans, but wait `close_timeout_s` at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="otel-close")
        closing.start()
        closing.join(self._close_timeout_s)


class _OtelStage(Stage):
    def __init__(
        self, tracer: Tracer, name: str, parent: Context, attributes: Mapping[str, Attribute]
    ) -> None:
        kind = KINDS.get(name, SpanKind.INTERNAL)
        self._tracer = tracer
        self._span = tracer.start_span(name, parent, kind, _prefix_names(attributes))
        self._inside = set_span_in_context(self._span, Context())

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._inside)
        return headers

    def begin(self, name: str, **attributes: Attribute) -> _OtelStage:
        return _OtelStage(self._tracer, name, self._inside, attributes)

    def add_finished(self, name: str, began: float, ended: float, **attributes: Attribute) -> None:
        start = int(began * NANOSECONDS)
        prefixed = _prefix_names(attributes)
        span = self._tracer.start_span(name, self._inside, attributes=prefixed, start_time=start)
        span.end(int(ended * NANOSECONDS))

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_prefix_names(attributes))

    def fail(self, why: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, clean_text(why)))

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        if kind is not None:
            self.fail(f"{kind.__name__}: {error}")
        self._span.end()


def _prefix_names(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {PREFIX + name: value for name, value in attributes.items()}


def _build_exporter(target: str, timeout_s: float) -> SpanExporter:
    url = urlsplit(target)
    if not url.scheme:
        return _FileExporter(Path(target))
    endpoint = target if url.path.strip("/") else target.rstrip("/") + PATH
    return OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)


class _FileExporter(SpanExporter):
    """Writes OTLP's file format: each line is a JSON object with the spans of one batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        batch = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for resource in batch["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    # OTLP wants hexadecimal ids, where protobuf's JSON has base64.
                    span |= {key: base64.b64decode(span[key]).hex() for key in IDS if key in span}
        append_line(self._path, json.dumps(batch, separators=(",", ":")).encode())
        return SpanExportResult.SUCCESS


class _LossReporter(SpanExporter):
    """Reports once that spans are lost, and how many were lost once they arrive again."""

    def __init__(self, exporter: SpanExporter, target: str) -> None:
        self._exporter, self._target = exporter, target
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        why = "the collector does not accept them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # a failing library or a full disk
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                _print(f"spans reach {self._target} again; {self._num_lost} were lost")
            self._num_lost = 0
        else:
            if not self._num_lost:
                _print(f"spans are lost, {self._target}: {why}; the run goes on without them")
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        if self._num_lost:
            _print(f"{self._num_lost} spans for {self._target} were lost")
        self._exporter.shutdown()


def _print(words: str) -> None:
    with contextlib.suppress(OSError):
        print(words, file=sys.stderr, flush=True)
