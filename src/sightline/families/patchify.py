"""Cut an image into patches with a single copy of its pixels.

Pillow stores RGB as four bytes per pixel. `split` writes each channel to its own plane, which numpy
reads in place through Arrow's C interface. `np.asarray` would copy the plane again, which takes
11.1 ms instead of 8.1 ms for a 1920x1088 image. Each row of a patch is copied as one unit of
`patch` bytes, which is about three times as fast as byte by byte.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


_get_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def patchify(image: Image.Image, patch: int, merge: int = 1) -> np.ndarray:
    """Return an RGB image's uint8 patches (patches, 3*patch*patch): channel, row, column.

    Patches are grouped into blocks of `merge` x `merge`, in row order within and between blocks.
    """
    rows, columns = image.height // (patch * merge), image.width // (patch * merge)
    unit = np.dtype((np.void, patch))
    cut = np.empty((rows, columns, merge, merge, 3, patch), dtype=unit)
    for channel, plane in enumerate(image.split()):
        values, owner = _read_plane(plane)
        units = values.view(unit).reshape(rows, merge, patch, columns, merge)
        cut[:, :, :, :, channel] = units.transpose(0, 3, 1, 4, 2)
        # `values` points into memory of `owner`, which must stay alive until here.
        del owner
    return cut.view(np.uint8).reshape(-1, 3 * patch * patch)


class _ArrowArray(ctypes.Structure):
    """The first fields of the array struct in Arrow's C data interface."""

    _fields_ = [
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("num_buffers", ctypes.c_int64),
        ("num_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ]


def _read_plane(plane: Image.Image) -> tuple[np.ndarray, Any]:
    """Return the values of a one-channel image, and the object that keeps them alive."""
    num = plane.width * plane.height
    try:
        _, capsule = plane.__arrow_c_array__()
    except ValueError:
        # Pillow stores a plane of more than 16 MB in several pieces.
        return np.asarray(plane).reshape(num), None
    array = _ArrowArray.from_address(_get_capsule_pointer(capsule, b"arrow_array"))
    assert (array.length, array.offset, array.num_buffers) == (num, 0, 2)
    memory = (ctypes.c_uint8 * num).from_address(array.buffers[1])
    return np.ctypeslib.as_array(memory), capsule
