import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader import resolve
from vllm.model_executor.model_loader.resolve import (
    list_aliases,
    read_generation_config,
    read_hf_config,
    resolve_checkpoint,
)


class FakeHub:
    """Plays huggingface_hub: what the cache holds and what a download brings."""

    def __init__(self, cached: Path | None, online: Path | None) -> None:
        self.cached = cached
        self.online = online
        self.calls: list[tuple[bool, tuple[str, ...]]] = []

    def __call__(
        self, repo: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        self.calls.append((local_files_only, tuple(allow_patterns)))
        found = self.cached if local_files_only else self.online
        if found is None:
            raise LocalEntryNotFoundError("cannot reach the hub.\nsecond line")
        return str(found)


@pytest.fixture
def hub(monkeypatch):
    def install(cached=None, online=None):
        fake = FakeHub(cached, online)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    return install


def snapshot(folder: Path, *shards: str, index: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for shard in shards:
        (folder / shard).write_bytes(b"")
    if index:
        weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_embedded_checkpoint():
    found = resolve_checkpoint("deepseek-v4")
    assert found.is_embedded
    assert found.name == "deepseek-v4"
    assert read_hf_config(found.path)["model_type"] == "deepseek_v4"
    assert "tools/embedded_model" in read_hf_config(found.path)["vllm_note"]


def test_local_folder_wins_over_the_embedded_name(tmp_path, monkeypatch):
    (tmp_path / "deepseek-v4").mkdir()
    monkeypatch.chdir(tmp_path)
    found = resolve_checkpoint("deepseek-v4")
    assert not found.is_embedded
    assert Path(found.path) == Path("deepseek-v4")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_checkpoint("~/model").path == str(tmp_path / "model")


def test_embedded_checkpoint_missing_from_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "_EMBEDDED_DIR", tmp_path)
    with pytest.raises(ConfigError, match="reinstall the package"):
        resolve_checkpoint("deepseek-v4")


@pytest.mark.parametrize("name", ["", "  ", "/no/such/folder", "./x", "../x", "a/b/c", "a b", "-x"])
def test_what_is_neither_folder_nor_hub_id(name, hub, tmp_path, monkeypatch):
    inside = tmp_path / "here"
    inside.mkdir()
    monkeypatch.chdir(inside)  # whatever lies beside the checkout
    fake = hub()
    with pytest.raises(ConfigError):
        resolve_checkpoint(name)
    assert fake.calls == []


def test_a_file_is_not_a_checkpoint(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_checkpoint(str(file))


def test_complete_cache_needs_no_network(hub, tmp_path):
    cached = snapshot(tmp_path / "c", "m-1.safetensors", "m-2.safetensors")
    fake = hub(cached=cached)
    assert resolve_checkpoint("owner/name").path == str(cached)
    assert [local for local, _ in fake.calls] == [True]


def test_incomplete_cache_is_completed_online(hub, tmp_path):
    cached = snapshot(tmp_path / "c", "m-1.safetensors")
    online = snapshot(tmp_path / "o", "m-1.safetensors", "m-2.safetensors")
    hub(cached, online)
    assert resolve_checkpoint("owner/name").path == str(online)


def test_incomplete_cache_offline_is_left_to_the_loader(hub, tmp_path):
    cached = snapshot(tmp_path / "c", "m-1.safetensors")
    hub(cached=cached)
    assert resolve_checkpoint("owner/name").path == str(cached)


def test_cache_without_weights_is_enough_for_dummy(hub, tmp_path):
    cached = snapshot(tmp_path / "c", index=False)
    fake = hub(cached=cached)
    assert resolve_checkpoint("owner/name", with_weights=False).path == str(cached)
    assert not any("safetensors" in pattern for _, ps in fake.calls for pattern in ps)
    assert not resolve._looks_complete(cached, with_weights=True)


def test_nothing_anywhere(hub):
    hub()
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint("owner/name")
    message = str(caught.value)
    assert "owner/name" in message
    assert "cannot reach the hub" in message
    assert "second line" not in message


@pytest.mark.slow
def test_the_real_cache_layout(tmp_path):
    """huggingface_hub itself, offline: a snapshot in HF_HOME is found, another id is not."""
    repo = tmp_path / "hub" / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    found = snapshot(repo / "snapshots" / commit, "m-1.safetensors", "m-2.safetensors")
    code = (
        "from vllm.model_executor.model_loader.resolve import resolve_checkpoint as r\n"
        "from vllm.exceptions import ConfigError\n"
        "print(r('owner/name').path)\n"
        "try:\n    r('owner/other')\nexcept ConfigError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(resolve.__file__).parents[3],
    )
    path, refusal = done.stdout.strip().splitlines()
    assert path == str(found)
    assert "owner/other" in refusal


def test_read_hf_config_absent(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[1]", "3", '{"a": }', "[" * 100_000])
def test_read_hf_config_broken(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_read_hf_config_not_utf8(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hf_config(tmp_path)


def test_generation_config_is_optional(tmp_path):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read_generation_config(tmp_path) == {"temperature": 0.6}
    (tmp_path / "generation_config.json").write_text("nope")
    with pytest.raises(ConfigError):
        read_generation_config(tmp_path)


@pytest.mark.slow
def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys; import vllm.tokenizers; "
        "from vllm.model_executor.model_loader.resolve import resolve_checkpoint as r; "
        "vllm.tokenizers.Tokenizer.from_folder(r('deepseek-v4').path); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'jinja2') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(resolve.__file__).parents[3],
    )
    assert done.stdout.strip() == "[]"


def test_a_gguf_file_is_one(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_checkpoint(str(file)).path == str(file)
    with pytest.raises(ConfigError, match="is a local file: leave it out"):
        resolve_checkpoint(str(file), revision="main")


def test_a_folder_that_holds_one_gguf_file_is_that(tmp_path: Path) -> None:
    parts = [tmp_path / f"Tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in (*parts, tmp_path / "mmproj-Tiny.gguf", tmp_path / "mtp-Tiny.gguf"):
        file.write_bytes(b"")
    assert resolve_checkpoint(str(tmp_path)).path == str(parts[0])
    (tmp_path / "Other.gguf").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"holds 2 models .*Other\.gguf, Tiny-00001-of-00002\.gguf"
    ):
        resolve_checkpoint(str(tmp_path))
    # With weights of its own a folder is what it was.
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_checkpoint(str(tmp_path)).path == str(tmp_path)


def test_aliases_are_the_names_that_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Q8_0-00001-of-00001.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny 1B Instruct")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    assert list_aliases(resolve_checkpoint(str(path))) == (
        "Tiny-Q8_0-00001-of-00001.gguf",
        "Tiny-Q8_0-00001-of-00001",
        "Tiny-Q8_0",
        "Tiny 1B Instruct",
    )
    folder = tmp_path / "Qwen-Tiny"
    folder.mkdir()
    assert list_aliases(resolve_checkpoint(str(folder))) == ("Qwen-Tiny",)
    assert list_aliases(resolve_checkpoint("deepseek-v4")) == ()


def test_a_quant_of_a_repository_is_looked_up_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--own--tiny" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--own--tiny" / "refs").mkdir()
    (tmp_path / "models--own--tiny" / "refs" / "main").write_text("1234")
    for name in ("Tiny-Q4_K_M.gguf", "Tiny-Q4_K_S.gguf", "Tiny-Q8_0-00001-of-00002.gguf"):
        (snapshot / name).write_bytes(b"")
    (snapshot / "Tiny-Q8_0-00002-of-00002.gguf").write_bytes(b"")
    for quant, name in (("q4_k_m", "Tiny-Q4_K_M"), ("Q8_0", "Tiny-Q8_0-00001-of-00002")):
        found = resolve_checkpoint(f"own/tiny:{quant}", download_dir=str(tmp_path))
        assert Path(found.path).name == f"{name}.gguf"
    with pytest.raises(ConfigError, match=r"0 files of the cached snapshot fit; it holds Tiny-Q4"):
        resolve_checkpoint("own/tiny:Q6_K", download_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="2 files of the cached snapshot fit"):
        resolve_checkpoint("own/tiny:Q4_K", download_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="own/other is not in the local Hugging Face cache"):
        resolve_checkpoint("own/other:Q6_K", download_dir=str(tmp_path))
