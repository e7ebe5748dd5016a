"""What a device did in a step: the kernels that took longest, and when it had nothing to do.

Read from a trace as torch's profiler exports it: JSON whose events have a category, a start and a
duration in microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_WIDTH = 90
KINDS = (
    (
        "attention, backward",
        ("bprop", "attention_backward", "flash_bwd", "fmha", "_dot_do_o", "_dq_"),
    ),
    ("attention, forward", ("fprop", "flex_attention", "flash_fwd")),
    ("products of matrices", ("nvjet", "gemm", "cutlass")),
    ("compiled", ("triton_",)),
    ("optimizer and norm", ("multi_tensor",)),
    ("copies", ("Memcpy", "copy")),
)
"""Kinds of kernels by parts of their names; the first that matches counts."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    calls: int
    us: float


@dataclass(frozen=True, slots=True)
class IdleGap:
    """A time without work on the device."""

    us: float
    after_us: float
    """Since the first kernel of the trace."""
    before: str
    """The kernel that ended where it begins."""
    then: str
    """The kernel that ends it."""


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    span_us: float
    """Microseconds from the first kernel's start to the last one's end."""
    busy_us: float
    kernels: list[KernelTime]
    """Kernels by name, the longest first."""
    kinds: list[KernelTime]
    """Kernels by what they do, the longest first."""
    gaps: list[IdleGap]
    """Times without work, the longest first."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, top: int = 10) -> list[str]:
        idle = self.span_us - self.busy_us
        total = sum(kernel.us for kernel in self.kernels) or 1.0
        lines = [
            f"device: {self.span_us / 1e3:.1f} ms from first to last kernel, idle for "
            f"{idle / 1e3:.1f} ms of it ({idle / max(self.span_us, 1e-9):.1%})",
        ]
        for title, kernels in (
            ("by what they do:", self.kinds),
            (f"{len(self.kernels)} kernels; the longest:", self.kernels[:top]),
        ):
            lines.append(title)
            for kernel in kernels:
                lines.append(
                    f"  {kernel.us / 1e3:9.2f} ms {kernel.us / total:6.1%} {kernel.calls:6d} x  "
                    f"{kernel.name[:NAME_WIDTH]}"
                )
        lines.append(f"{len(self.gaps)} gaps; the longest:")
        for gap in self.gaps[:top]:
            lines.append(
                f"  {gap.us / 1e3:9.2f} ms at {gap.after_us / 1e3:8.1f} ms, between "
                f"{gap.before[: NAME_WIDTH // 2]} and {gap.then[: NAME_WIDTH // 2]}"
            )
        return lines


def profile_step(work: Callable[[], Any], path: Path) -> str:
    """Writes a trace of `work`, and says what took longest: on the device, where there is one."""
    kinds = [ProfilerActivity.CPU]
    on_device = torch.cuda.is_available()
    if on_device:
        kinds.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        work()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    if on_device:
        return str(read_profile(path))
    averages = found.key_averages()
    return str(averages.table(sort_by="self_cpu_time_total", row_limit=10))


def read_profile(path: Path) -> DeviceProfile:
    return build_profile(json.loads(path.read_bytes())["traceEvents"])


def build_profile(events: list[dict[str, Any]]) -> DeviceProfile:
    """Kernels of several streams may run at once: busy is when at least one does."""
    ran = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") in ON_DEVICE and "dur" in event
    )
    if not ran:
        return DeviceProfile(0.0, 0.0, [], [], [])
    total: dict[str, list[float]] = defaultdict(list)
    first, busy, gaps = ran[0][0], 0.0, []
    until, last = first, ""
    for start, end, name in ran:
        total[name].append(end - start)
        if start > until:
            gaps.append(IdleGap(start - until, until - first, last, name))
        if end > until:
            busy += end - max(start, until)
            until, last = end, name
    of_kind: dict[str, list[float]] = defaultdict(list)
    for name, us in total.items():
        of_kind[_kind_of(name)] += us
    return DeviceProfile(
        span_us=until - first,
        busy_us=busy,
        kernels=_sum_times(total),
        kinds=_sum_times(of_kind),
        gaps=sorted(gaps, key=lambda gap: -gap.us),
    )


def _kind_of(name: str) -> str:
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "other"


def _sum_times(times: dict[str, list[float]]) -> list[KernelTime]:
    kernels = [KernelTime(name, len(us), sum(us)) for name, us in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)
