import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model_executor.model_loader.fakes import TINY, FakeModel, random_tensors, save
from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError
from vllm.model_executor.model_loader.loader import load_model_weights
from vllm.model_executor.model_loader.mapped_file import MappedFile


def assert_loaded(model: FakeModel, tensors, *, but: str | None = None) -> None:
    for name, slot in model.slots.items():
        if but is not None and name.startswith(but):
            assert torch.isnan(slot).all(), name
        else:
            assert torch.equal(slot, tensors[name].to(slot.dtype)), name


def test_one_file(tmp_path):
    tensors = random_tensors()
    model = FakeModel()
    report = load_model_weights(model, save(tmp_path / "c", tensors))
    assert_loaded(model, tensors)
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(t.nbytes for t in tensors.values())
    assert report.num_files == 1
    assert report.mtp_present
    assert report.ignored == ()


def test_shards(tmp_path):
    tensors = random_tensors()
    names = sorted(tensors)
    weight_map = {name: f"s{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        save(tmp_path, {n: tensors[n] for n in names if weight_map[n] == shard}, shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = FakeModel()
    assert load_model_weights(model, tmp_path, "safetensors").num_files == 3
    assert_loaded(model, tensors)
    (tmp_path / "s1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"s1\.safetensors"):
        load_model_weights(FakeModel(), tmp_path)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_types_are_converted(tmp_path, stored, wanted):
    tensors = {
        name: t.to(stored) if t.is_floating_point() else t for name, t in random_tensors().items()
    }
    model = FakeModel(dtype=wanted)
    load_model_weights(model, save(tmp_path, tensors))
    assert_loaded(model, tensors)


def test_stacked_experts(tmp_path):
    tensors = random_tensors()
    as_stored = dict(tensors)
    for layer in range(3):
        prefix = f"layers.{layer}.ffn.experts."
        w1, w2, w3 = (
            [as_stored.pop(f"{prefix}{e}.{leaf}.weight") for e in range(4)]
            for leaf in ("w1", "w2", "w3")
        )
        experts = f"model.layers.{layer}.mlp.experts."
        both = [torch.cat([a, b]) for a, b in zip(w1, w3, strict=True)]
        as_stored[f"{experts}gate_up_proj"] = torch.stack(both)
        as_stored[f"{experts}down_proj"] = torch.stack(w2)
    model = FakeModel()
    report = load_model_weights(model, save(tmp_path, as_stored))
    assert_loaded(model, tensors)
    assert report.num_tensors == len(tensors)


def test_strided_destination(tmp_path):
    stacked = torch.zeros(2, 4, 3)
    model = FakeModel()
    model.slots = {"a": stacked[0, ::2], "b": stacked[1, :2]}
    a, b = torch.ones(2, 3), torch.full((2, 3), 2.0)
    load_model_weights(model, save(tmp_path, {"a": a, "b": b}))
    assert stacked[0].sum() == 6
    assert torch.equal(stacked[1, :2], b)


def test_checkpoint_without_mtp(tmp_path, caplog):
    tensors = random_tensors()
    kept = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    model = FakeModel()
    with caplog.at_level(logging.INFO):
        report = load_model_weights(model, save(tmp_path, kept))
    assert not report.mtp_present
    assert_loaded(model, tensors, but="mtp.")
    assert "multi-token prediction is not available" in caplog.text


def test_dspark_is_ignored_with_a_warning(tmp_path, caplog):
    tensors = {name: t for name, t in random_tensors().items() if not name.startswith("mtp.")}
    tensors["mtp.0.main_proj.weight"] = torch.zeros(2, 2)
    report = load_model_weights(FakeModel(), save(tmp_path, tensors))
    assert report.ignored == ("mtp.0.main_proj.weight",)
    assert "DSpark" in caplog.text


@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1..3"), (4, "0..4")])
def test_routing_table_out_of_range(tmp_path, bad, shown):
    tensors = random_tensors()
    tensors["layers.0.ffn.gate.tid2eid"][5, 1] = bad
    with pytest.raises(CheckpointError, match=rf"tid2eid holds expert ids {shown}"):
        load_model_weights(FakeModel(), save(tmp_path, tensors))


def test_nothing_is_written_when_the_tensors_do_not_fit(tmp_path):
    tensors = random_tensors()
    del tensors["norm.weight"]
    model = FakeModel()
    with pytest.raises(CheckpointError, match=r"1 missing: norm\.weight"):
        load_model_weights(model, save(tmp_path, tensors))
    assert torch.isnan(model.slots["embed.weight"]).all()


def test_fp8_is_refused(tmp_path):
    tensors = random_tensors()
    name = "layers.0.attn.wq_a.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedFeatureError, match=name):
        load_model_weights(FakeModel(), save(tmp_path, tensors))


def test_dummy_reads_no_file(tmp_path):
    model, again = FakeModel(), FakeModel()
    report = load_model_weights(model, tmp_path / "nowhere", "dummy", 5)
    load_model_weights(again, tmp_path / "nowhere", "dummy", 5)
    assert (report.num_files, report.num_bytes) == (0, 0)
    assert report.mtp_present
    for name, slot in model.slots.items():
        assert torch.equal(slot, again.slots[name])


def test_unknown_format(tmp_path):
    with pytest.raises(ConfigError, match="gguf"):
        load_model_weights(FakeModel(), tmp_path, "gguf")


def test_embedded_checkpoint_fits_its_own_table():
    from tools.checkpoints.make_deepseek_v4 import CONFIG
    from vllm.model_executor.model_loader.resolve import resolve_checkpoint

    model = FakeModel(CONFIG)
    report = load_model_weights(model, resolve_checkpoint("deepseek-v4").path)
    assert report.mtp_present
    assert all(torch.isfinite(slot).all() for slot in model.slots.values())


@pytest.mark.slow
def test_what_transformers_writes(tmp_path):
    """Both spellings of the reference implementation, as it really writes them."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = {k: v for k, v in TINY.items() if k not in ("architectures", "vllm_note")}
    torch.manual_seed(0)
    reference = DeepseekV4ForCausalLM(DeepseekV4Config(**config))
    reference.save_pretrained(tmp_path / "saved")
    modules = tmp_path / "modules"
    modules.mkdir()
    save_file(reference.state_dict(), modules / "model.safetensors")
    saved_model, modules_model = FakeModel(), FakeModel()
    saved = load_model_weights(saved_model, tmp_path / "saved")
    load_model_weights(modules_model, modules)
    assert not saved.mtp_present
    for name, slot in saved_model.slots.items():
        if not name.startswith("mtp."):
            assert torch.equal(slot, modules_model.slots[name]), name
    state = reference.state_dict()
    assert torch.equal(
        saved_model.slots["layers.2.attn.kv_norm.weight"],
        state["model.layers.2.self_attn.kv_norm.weight"],
    )
    assert torch.equal(
        modules_model.slots["layers.1.ffn.experts.3.w3.weight"],
        state["model.layers.1.mlp.experts.gate_up_proj"][3, 6:],
    )


def test_every_stored_tensor_is_read_once_and_in_the_order_of_its_file(tmp_path, monkeypatch):
    from vllm.model_executor.model_loader.mapped_file import MappedFile

    reads: dict[str, list[int]] = {}
    read = MappedFile.read

    def note(self, stored):
        reads.setdefault(stored.file.name, []).append(stored.offset)
        return read(self, stored)

    monkeypatch.setattr(MappedFile, "read", note)
    tensors = random_tensors()
    names = sorted(tensors)
    for index in range(3):
        save(tmp_path, {n: tensors[n] for n in names[index::3]}, f"part{index}.safetensors")
    load_model_weights(FakeModel(), tmp_path)
    assert sum(map(len, reads.values())) == len(tensors)
    assert all(offsets == sorted(set(offsets)) for offsets in reads.values())


def test_a_file_that_vanishes_is_named(tmp_path):
    from vllm.model_executor.model_loader.loader import read_stored_tensors

    save(tmp_path, random_tensors())
    stored = read_stored_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_model_weights(FakeModel(), tmp_path, stored=stored)


def host_bytes() -> int:
    """Returns this process's memory: its copies, and pages of files."""
    fields = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) << 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_host_holds_a_tensor_at_a_time(tmp_path, monkeypatch, dtype):
    each, count = 8 << 20, 8
    tensors = {f"t{i}": torch.full((each // 4,), float(i)) for i in range(count)}
    folder = save(tmp_path / "c", tensors)
    model = FakeModel()
    # Memory of a device: its pages count as shared with a file, not as this process's own.
    device = torch.from_file(str(tmp_path / "device"), shared=True, size=count * each // 4)
    device.zero_()
    slots = device.view(dtype)[: count * each // 4].chunk(count)
    model.slots = {f"t{i}": slot for i, slot in enumerate(slots)}
    del tensors
    peaks = []
    release = MappedFile.release

    def watch(self, stored):
        peaks.append(host_bytes() - start)
        release(self, stored)

    monkeypatch.setattr(MappedFile, "release", watch)
    start = host_bytes()
    load_model_weights(model, folder)
    assert len(peaks) == count
    assert [float(slot[0]) for slot in slots] == list(range(count))
    # The mapped tensor, and what its conversion may take; all of them are eight times that.
    assert max(peaks) < 3 * each, peaks
