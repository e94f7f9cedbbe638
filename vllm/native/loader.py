"""Finding and loading ``libvllm_native.so``; free of torch."""

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from vllm import envs
from vllm.logger import init_logger
from vllm.native.structs import ABI_VERSION, DecoderModel, Draws, Matrix, Step, V4Model

logger = init_logger(__name__)

LIBRARY_NAME = "libvllm_native.so"


def find_library() -> Path | None:
    """Returns where the built library lies, or None."""
    path = Path(envs.VLLM_NATIVE_LIBRARY or Path(__file__).parent / LIBRARY_NAME)
    return path if path.exists() else None


@cache
def load_library() -> ctypes.CDLL | None:
    """Loads the library once; None where it was not built or does not fit this source."""
    path = find_library()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.vn_abi_version.restype = c_int32
    version = library.vn_abi_version()
    if version != ABI_VERSION:
        logger.warning(
            "%s has interface version %d, this source needs %d: build it again (make native). "
            "Serving on torch.",
            path.name,
            version,
            ABI_VERSION,
        )
        return None
    _declare(library)
    return library


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
    decoder = POINTER(DecoderModel)
    library.vn_decoder_forward.argtypes = [c_void_p, decoder, step, data]
    library.vn_decoder_logits.argtypes = [c_void_p, decoder, data, c_int64, data]
    library.vn_sample.argtypes = [c_void_p, data, c_int64, c_int64, POINTER(Draws), data]
    library.vn_matmul.argtypes = [c_void_p, POINTER(Matrix), data, c_int64, data]
    library.vn_hash_blocks.argtypes = [c_char_p, c_char_p, c_int64, c_int32, c_char_p]
