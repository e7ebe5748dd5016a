"""Foreign files are described, never opened in ways that run code, and never end in a traceback."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example as with_example
from hypothesis import given
from hypothesis import strategies as st

from sightline.cli.main import main
from sightline.errors import WireError
from sightline.trace import decode_trace, encode_trace, read_traces
from sightline.trace.codec import FILE_MAGIC
from tests.unit.trace.test_codec import example

BLANK = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5C"


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, (f"open({str(self.mark)!r}, 'w').close()",))


def torch_file(payload: bytes) -> bytes:
    """Build a file as torch.save writes it: an archive with a pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("trace/data.pkl", payload)
        archive.writestr("trace/data/0", b"\0" * 64)
    return made.getvalue()


def npz() -> bytes:
    made = io.BytesIO()
    np.savez(made, pixel_values=np.zeros((4, 8), dtype=np.float32))
    return made.getvalue()


def step(num_rows: int) -> dict[str, object]:
    return {"prompt_ids": [1, 2], "pixel_values": [[0.1, 0.2, 0.3]] * num_rows}


STEPS = {"example_id": 3, "trajectory": [step(4), step(8)]}
PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BLANK}"}}
CHAT = {"messages": [{"role": "user", "content": [PART]}]}
PROCESSOR, PUT = "they fit one processor", "`sightline media put`"

pack, dump = msgspec.msgpack.encode, msgspec.json.encode
FOREIGN = {
    "json": (
        dump(STEPS),
        "processed pixels at $.trajectory[0].pixel_values (4 x 3 numbers) and at 1 more",
        PROCESSOR,
    ),
    "json lines": (
        dump(STEPS) + b"\n{}\n",
        "it is JSON lines with the keys example_id, trajectory; it holds processed pixels",
        PROCESSOR,
    ),
    "msgpack": (pack(STEPS), "it is msgpack with the keys example_id, trajectory; it holds", PUT),
    "rows": (dump({"x": [[0.5, 0.25]]}), "processed pixels at $.x (1 x 2 numbers)", PROCESSOR),
    "tensor": (pack({"mm_kwargs": {"a": b"12"}}), "processed pixels at $.mm_kwargs", PROCESSOR),
    "data urls": (
        dump(CHAT),
        "images in base64 at $.messages[0].content[0].image_url.url",
        "stores each image once",
    ),
    "image bytes": (pack({"shots": [b"\x89PNG\r\n"]}), "bytes of images at $.shots[0]", PUT),
    "arrays": (
        pack({"ids": msgspec.msgpack.Ext(5, b"12")}),
        "packed arrays at $.ids (extension 5, 2 bytes)",
        PROCESSOR,
    ),
    "numpy": (b"\x93NUMPY\x01\x00 and more", "it is a numpy array", PROCESSOR),
    "npz": (npz(), "it is numpy arrays", PROCESSOR),
    "safetensors": (b"\x40" + b"\0" * 7 + b'{"x":{}}', "it is a safetensors file", PROCESSOR),
    "parquet": (b"PAR1....", "it is a table", "traces/"),
    "gzip": (b"\x1f\x8b\x08rest", "it is compressed", "decompress"),
    "text": (b"hello", "is not a file of traces", "traces/"),
    "nothing": (b"", "is not a file of traces", "traces/"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_described(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, says, cure = FOREIGN[name]
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(WireError, match="is not a file of traces") as refused:
        list(read_traces(path))
    assert says in refused.value.problem and cure in refused.value.fix
    assert main(["trace", "show", str(path)]) == 2
    told = capsys.readouterr().err
    assert "is not a file of traces" in told and "fix:" in told and "Traceback" not in told


@pytest.mark.parametrize("wrap", [lambda data: data, torch_file], ids=["pickle", "torch"])
def test_nothing_is_unpickled(wrap, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = wrap(pickle.dumps({"pixel_values": Trap(mark)}))
    path = tmp_path / "foreign.pt"
    path.write_bytes(data)
    with pytest.raises(WireError, match="was not opened, because unpickling runs code") as refused:
        list(read_traces(path))
    assert "processed pixels cannot be used" in refused.value.fix
    with pytest.raises(WireError, match="was not opened"):
        decode_trace(data)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()


def test_a_trace_that_was_given_pixels_says_where_they_are(tmp_path: Path) -> None:
    values = msgspec.msgpack.decode(encode_trace(example()))
    values["nodes"][1]["slots"][0]["pixel_values"] = [[0.5, 0.5]]
    data = msgspec.msgpack.encode(values)
    with pytest.raises(WireError) as refused:
        decode_trace(data)
    assert "unknown field `pixel_values`" in refused.value.problem
    assert "processed pixels at $.nodes[1].slots[0].pixel_values" in refused.value.problem
    assert "cannot be used" in refused.value.fix
    path = tmp_path / "step_1.msgpack"
    path.write_bytes(FILE_MAGIC + len(data).to_bytes(4, "big") + data)
    with pytest.raises(WireError, match="step_1.msgpack, trace 0 claims to be a trace of schema 1"):
        list(read_traces(path))


DEEP = b"\x91" * 200_000


@with_example(DEEP, b"\x81\xa1a").via("nested too deeply")
@with_example(DEEP, b"\x82\xa6schema\x01\xa5nodes").via("a trace, nested too deeply")
@with_example(b"\xa2\xff\xfe", b"\x82\xa6schema\x01\xa2id").via("a trace whose text is no UTF-8")
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x80", b"PK\x03\x04", b"{", b"["]))
def test_no_bytes_end_in_anything_but_a_refusal(data: bytes, head: bytes) -> None:
    with pytest.raises(WireError):
        decode_trace(head + data)
