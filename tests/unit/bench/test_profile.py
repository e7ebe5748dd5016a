"""What is read from a trace: kernels, busy time and gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.bench.harness.profile import (
    IdleGap,
    KernelTime,
    build_profile,
    profile_step,
    read_profile,
)


def ran(name: str, start: float, duration: float, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": cat, "ts": start, "dur": duration, "ph": "X"}


def test_kernels_are_added_up_and_gaps_lie_between_them(tmp_path: Path) -> None:
    events = [
        ran("mul", 180.0, 20.0),
        ran("mm", 100.0, 50.0),
        ran("copy", 140.0, 30.0, "gpu_memcpy"),  # beside the product, and beyond its end
        ran("mm", 210.0, 40.0),
        ran("add", 215.0, 5.0),  # inside the second product
        ran("aten::mm", 0.0, 900.0, "cpu_op"),
        {"name": "mark", "cat": "kernel", "ts": 1.0, "ph": "i"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_profile(path)
    assert found.span_us == 150.0
    assert found.busy_us == 130.0
    assert found.kernels == [
        KernelTime("mm", 2, 90.0),
        KernelTime("copy", 1, 30.0),
        KernelTime("mul", 1, 20.0),
        KernelTime("add", 1, 5.0),
    ]
    assert found.gaps == [IdleGap(10.0, 70.0, "copy", "mul"), IdleGap(10.0, 100.0, "mul", "mm")]
    said = str(found)
    assert "idle for 0.0 ms of it (13.3%)" in said
    assert "0.09 ms  62.1%      2 x  mm" in said
    assert "between copy and mul" in said


def test_kernels_are_told_by_what_they_do() -> None:
    names = {
        "nvjet_sm90_tst_128x256_64x4": "products of matrices",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention, backward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention, forward",
        "triton_tem_fused_flex_attention_backward_3": "attention, backward",
        "triton_poi_fused_add_2": "compiled",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<": "optimizer and norm",
        "void at::native::reduce_kernel<512": "other",
    }
    found = build_profile([ran(name, float(at), 1.0) for at, name in enumerate(names)])
    told = {kernel.name: kernel.calls for kernel in found.kinds}
    assert told == {kind: list(names.values()).count(kind) for kind in names.values()}


def test_a_trace_without_a_device_has_no_kernels() -> None:
    found = build_profile([ran("aten::mm", 0.0, 9.0, "cpu_op")])
    assert found.kernels == [] and found.gaps == [] and found.span_us == 0.0
    assert "0 kernels" in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the device kernels are told instead")
def test_on_a_cpu_the_operations_are_told(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    said = profile_step(lambda: torch.ones(64, 64) @ torch.ones(64, 64), path)
    assert "aten::mm" in said
    assert json.loads(path.read_bytes())["traceEvents"]
