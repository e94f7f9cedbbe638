"""Files that llama.cpp wrote, and its answers from them, against this engine's.

    python -m benchmarks.llama_cpp_files --node DIR

A small model of random weights is written in bf16; llama.cpp's own quantiser makes a file of each
type of it, and both engines answer prompts greedily from every file. llama.cpp rounds the inputs
of products to eight bits and this engine does not, so answers part where the two likeliest tokens
are about equally likely: the table says how many answers are equal to the end, and how far apart
those two (log probabilities) were at most where one was not. DIR is as in ``benchmarks.race``.
"""

import argparse
import ctypes
import os
import random
import tempfile
from pathlib import Path

import gguf

from benchmarks import race, race_files
from vllm import LLM, SamplingParams

# llama.cpp's numbers of what a file holds most of.
FILE_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q8_0": 7,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
}
PROMPT, MAX_MODEL_LEN = 12, 128
SEED = 3


class _Params(ctypes.Structure):
    """The start of the quantiser's parameters, and more room than the rest takes."""

    _fields_ = (
        ("num_threads", ctypes.c_int32),
        ("file_type", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 1016),
    )


class Quantiser:
    """llama.cpp's, from the package's compiled libraries."""

    def __init__(self, node: Path) -> None:
        folder = next((node / "node_modules" / "@node-llama-cpp").glob("linux-x64/bins/*"))
        loaded = {}
        for name in ("libggml-base", "libggml", "libllama"):
            path = next(p for p in folder.glob(f"{name}.*so*"))
            loaded[name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        loaded["libggml"].ggml_backend_load_all_from_path(os.fsencode(folder))
        self._library = loaded["libllama"]
        self._library.llama_model_quantize_default_params.restype = _Params

    def write(self, source: Path, target: Path, file_type: int) -> None:
        """Writes a model's file in another type.

        Raises:
            SystemExit: The quantiser refused.
        """
        params = self._library.llama_model_quantize_default_params()
        params.num_threads, params.file_type = 1, file_type
        paths = os.fsencode(source), os.fsencode(target)
        if code := self._library.llama_model_quantize(*paths, ctypes.byref(params)):
            raise SystemExit(f"llama.cpp wrote no {target.name}: {code}")


def count_types(path: Path) -> str:
    """Returns the types of a file's matrices, the most frequent first."""
    kinds = [t.tensor_type.name for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1]
    return ", ".join(sorted(set(kinds), key=lambda kind: -kinds.count(kind)))


def answer(path: Path, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
    """Returns this engine's tokens, and how far the second likeliest was behind each."""
    llm = LLM(
        model=str(path),
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=1 << 24,
        disable_log_stats=True,
    )
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=2)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for output in llm.generate(requests, params, use_tqdm=False):
        own = output.outputs[0]
        margins = []
        for entries in own.logprobs or ():
            first, second, *_ = sorted((e.logprob for e in entries.values()), reverse=True)
            margins.append(first - second)
        answers.append((list(own.token_ids), margins))
    return answers


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    rng = random.Random(SEED)
    prompts = [[rng.randrange(300, 1000) for _ in range(PROMPT)] for _ in range(args.prompts)]
    quantiser = Quantiser(args.node)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "BF16.gguf"
        race_files.write_gguf(SHAPE, "BF16", base)
        for name in ("BF16", *FILE_TYPES):
            path = Path(folder) / f"{name}.gguf"
            if path != base:
                quantiser.write(base, path, FILE_TYPES[name])
            runner = race.Runner(race.llama_cpp(args.node), path, 1, MAX_MODEL_LEN)
            num_equal, widest = 0, 0.0
            for prompt, (own, margins) in zip(
                prompts, answer(path, prompts, args.count), strict=True
            ):
                message = {"kind": "greedy", "prompts": [prompt], "count": args.count}
                other = runner.ask(message)["tokens"]
                parts = [i for i in range(args.count) if own[i] != other[i]]
                num_equal += not parts
                widest = max([widest, *(margins[i] for i in parts[:1])])
            runner.close()
            shown = f"{widest:.3f}" if num_equal < len(prompts) else ""
            rows.append(
                f"| {name} | {count_types(path)} | {num_equal} of {len(prompts)} | {shown} |"
            )
    print("| file | types of its matrices | answers equal | widest margin where one is not |")
    print("| --- | --- | --: | --: |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
