"""Finding and loading ``libvllm_native.so``; free of torch."""

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from vllm import envs
from vllm.native.structs import (
    ABI_VERSION,
    DecoderDrafter,
    DecoderModel,
    DeltaScan,
    Draws,
    Matrix,
    Step,
    TowerLayer,
    TowerMatrix,
    TowerShape,
    V4Model,
)

LIBRARY_NAME = "libvllm_native.so"

_ELF_64 = b"\x7fELF\x02\x01"  # little-endian
_HEAD_BYTES = 4096


def load_library() -> ctypes.CDLL | None:
    """Returns the library; None where it was not built or cannot be used."""
    found = open_library()
    return None if isinstance(found, str) else found


def open_library() -> ctypes.CDLL | str:
    """Returns the library, which is loaded once; else why there is none."""
    named = envs.VLLM_NATIVE_LIBRARY
    path = Path(named) if named else Path(__file__).parent / LIBRARY_NAME
    if not named and not path.exists():
        return "the library is not built: make native"
    return _open(path)


def find_vector_build(library: ctypes.CDLL) -> str:
    """Returns the name of the vector build that this processor runs best."""
    context = library.vn_create(1, None)
    if not context:
        return "no"
    name: bytes = library.vn_vector_build(context)
    library.vn_destroy(context)
    return name.decode()


@cache
def _open(path: Path) -> ctypes.CDLL | str:
    try:
        if _is_cut_off(path):
            return f"{path} lacks its end: make native"
        library = ctypes.CDLL(str(path.absolute()))
        library.vn_abi_version.restype = c_int32
        version = library.vn_abi_version()
        if version != ABI_VERSION:
            return f"{path} has interface {version}, this source needs {ABI_VERSION}: make native"
        _declare(library)
    except (OSError, AttributeError) as error:  # no library of this system, or not ours
        return f"{path} cannot be loaded ({error}): make native"
    return library


def _is_cut_off(path: Path) -> bool:
    """Whether an ELF file lacks bytes that are mapped: the system kills who reads such."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(_ELF_64):
        return False
    try:
        (first,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        # Of each program header: | type, flags 4, 4 | offset 8 | addresses 8, 8 | bytes in file 8 |
        segments = [struct.unpack_from("<8xQ16xQ", head, first + i * size) for i in range(count)]
    except struct.error:
        return True
    return any(offset + length > path.stat().st_size for offset, length in segments)


def _declare(library: ctypes.CDLL) -> None:
    library.vn_create.argtypes = [c_int32, c_char_p]
    library.vn_create.restype = c_void_p
    library.vn_destroy.argtypes = [c_void_p]
    library.vn_destroy.restype = None
    for name in ("vn_error", "vn_vector_build"):
        getattr(library, name).argtypes = [c_void_p]
        getattr(library, name).restype = c_char_p
    model, step, data = POINTER(V4Model), POINTER(Step), c_void_p
    library.vn_v4_forward.argtypes = [c_void_p, model, step, data]
    library.vn_v4_forward_mtp.argtypes = [c_void_p, model, step, data, data]
    library.vn_v4_logits.argtypes = [c_void_p, model, data, c_int64, c_int32, data]
    library.vn_v41_forward.argtypes = [c_void_p, model, step, POINTER(c_void_p), data]
    library.vn_v41_logits.argtypes = [c_void_p, model, data, c_int64, data]
    decoder = POINTER(DecoderModel)
    library.vn_decoder_forward.argtypes = [c_void_p, decoder, step, data]
    library.vn_decoder_logits.argtypes = [c_void_p, decoder, data, c_int64, c_int32, data]
    library.vn_decoder_norm.argtypes = [c_void_p, decoder, data, c_int64, data]
    library.vn_decoder_draft.argtypes = [c_void_p, POINTER(DecoderDrafter), step, data, data]
    library.vn_decoder_settle.argtypes = [c_void_p, decoder, step]
    library.vn_gated_delta.argtypes = [c_void_p, POINTER(DeltaScan)]
    library.vn_sample.argtypes = [c_void_p, data, c_int64, c_int64, POINTER(Draws), data]
    library.vn_forbid.argtypes = [c_void_p, data, c_int64, c_int64, data, data, c_int64]
    library.vn_matmul.argtypes = [c_void_p, POINTER(Matrix), data, c_int64, data]
    tower, layer = POINTER(TowerShape), POINTER(TowerLayer)
    library.vn_tower_layer_run.argtypes = [c_void_p, tower, layer, data, c_int64, data]
    library.vn_tower_map.argtypes = [c_void_p, POINTER(TowerMatrix), data, c_int64, data]
    library.vn_hash_blocks.argtypes = [c_char_p, c_char_p, c_int64, c_int32, c_char_p]
    library.vn_pack_blocks.argtypes = [c_char_p, data, c_int64, c_int64, c_int32, data]
