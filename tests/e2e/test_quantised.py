"""A checkpoint in the published spelling, served; and one that cannot be."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quantised import write_twin
from tests.e2e.server_process import ServerProcess
from tools.checkpoints.quantise import quantise_checkpoint
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.resolve import resolve_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published")
    source = Path(resolve_checkpoint("deepseek-v4").path)
    quantise_checkpoint(source, out, max_shard_bytes=1_000_000)
    return out


# What is compared: texts, log probabilities of the first one's tokens, how much the second hit.
Answers = tuple[list[str], list[float], int | None]


def answer(model: Path, log: Path) -> Answers:
    """Serves a checkpoint and asks for greedy answers to a prompt sent twice."""
    with ServerProcess(log, model=str(model), environment={"VLLM_NATIVE": "0"}) as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
        first, second = (server.post("/v1/completions", body).json() for _ in range(2))
        choices = [reply["choices"][0] for reply in (first, second)]
        texts = [choice["text"] for choice in choices]
        hit = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        return texts, choices[0]["logprobs"]["token_logprobs"], hit


def answer_of_twin(llm: LLM) -> Answers:
    """The same of an engine."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    first, second = (llm.generate([PROMPT], params)[0] for _ in range(2))
    told: Any = first.outputs[0]
    logprobs = [
        found[token].logprob for token, found in zip(told.token_ids, told.logprobs, strict=True)
    ]
    return [told.text, second.outputs[0].text], logprobs, second.num_cached_tokens


def test_it_answers_as_its_dequantised_twin(
    published: Path,
    tmp_path: Path,
    start_twin: Callable[[Path], LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The native kernels take plain weights only and sum in another order: both run on torch.
    monkeypatch.setenv("VLLM_NATIVE", "0")
    twin = tmp_path / "twin"
    write_twin(published, twin)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(published / name, twin / name)
    texts, logprobs, hit = answer(published, tmp_path / "log.txt")
    assert texts[0] == texts[1]
    assert hit >= 32
    assert (texts, logprobs, hit) == answer_of_twin(start_twin(twin))
    log = (tmp_path / "log.txt").read_text()
    assert re.search(r"Memory: at least .* Needed: weights \d+\.\d\d MiB", log)
    assert f"from {len(list(published.glob('*.safetensors')))} file(s)" in log


def test_a_damaged_shard_is_named(published: Path, tmp_path: Path) -> None:
    """Every kind of damage: ``tests/model_executor/model_loader/test_checkpoint_files.py``."""
    folder = tmp_path / "damaged"
    shutil.copytree(published, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    server = ServerProcess(tmp_path / "log.txt", model=str(folder))
    try:
        assert server.process.wait(240) != 0
    finally:
        server.stop()
    assert shard.name in server.log
    assert "Traceback" not in server.log
