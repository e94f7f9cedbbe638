"""Token ids of odd texts under every name of ``tokenizer.ggml.pre``, beside llama.cpp's.

    python -m benchmarks.gguf_tokenizers --programs DIR [--texts 10000] [--only llama3,kimi-k2]

DIR holds llama.cpp's ``llama-tokenize``, which reads all texts of a name in one call. For each name
that is served a tiny file is written whose merges cross every boundary that an expression may cut
at. One row a name: how many texts have equal ids, as they are and composed (NFC), with the shortest
composed one that has not. Names that differ are no failure of this command: docs/quantisation.md
says which do, and why.
"""

import argparse
import json
import random
import subprocess
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from benchmarks.real_weights.llama_cpp import odd_text
from tests.tokenizers.family_tokenizers import byte_level
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.gguf_tokenizer import SPLITTINGS

_RECORDED = Path(__file__).parent.parent / "tests" / "tokenizers" / "llama_cpp_ids.json"
# Stands between texts: what is on its both sides is cut and merged by itself.
_BETWEEN = "<|between|>"
_WIDTH = 32


def write_file(pre: str, merges: Sequence[str], path: Path) -> int:
    """Write a file that llama.cpp serves; return the id of what stands between texts."""
    letters = sorted(token for token in byte_level().backend.get_vocab() if len(token) == 1)
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), _BETWEEN]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), _WIDTH), "output_norm": (_WIDTH,)}
    shapes |= {f"blk.0.{half}_norm": (_WIDTH,) for half in ("attn", "ffn")}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{part}": (_WIDTH, _WIDTH) for part in parts}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(tokens) - 1


def ask_llama_cpp(program: Path, path: Path, texts: Sequence[str], between: int) -> list[list[int]]:
    """Return llama.cpp's ids of each text."""
    file = path.with_suffix(".txt")
    file.write_bytes(_BETWEEN.join(texts).encode())
    flags = ("--ids", "--no-bos", "--no-escape", "--log-disable")
    command = [program, "-m", path, "-f", file, *flags]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: list[list[int]] = [[]]
    for token_id in json.loads(answer):
        if token_id == between:
            found.append([])
        else:
            found[-1].append(token_id)
    assert len(found) == len(texts), (len(found), len(texts))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Names, separated by commas.")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(SPLITTINGS)
    plain = [odd_text(random.Random(f"{args.seed} {i}")) for i in range(args.texts)]
    texts = [*plain, *(unicodedata.normalize("NFC", text) for text in plain)]
    merges = json.loads(_RECORDED.read_text("utf-8"))["merges"]
    # Names of one splitting have one tokenizer here.
    own: dict[object, list[list[int]]] = {}
    print("| name | equal | composed, equal | shortest that is not |\n|---|--:|--:|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / f"{name}.gguf"
            between = write_file(name, merges, path)
            splitting = SPLITTINGS[name]
            if splitting not in own:
                tokenizer = Tokenizer.from_folder(path)
                own[splitting] = tokenizer.encode_batch(texts, add_special_tokens=False)
            theirs = ask_llama_cpp(args.programs / "llama-tokenize", path, texts, between)
            is_equal = [one == other for one, other in zip(own[splitting], theirs, strict=True)]
            counts = [sum(is_equal[: len(plain)]), sum(is_equal[len(plain) :])]
            differ = [text for text, equal in zip(texts, is_equal, strict=True) if not equal]
            composed = [text for text in differ if unicodedata.is_normalized("NFC", text)]
            first = repr(min(composed, key=len)) if composed else ""
            print(f"| `{name}` | {counts[0]} | {counts[1]} | {first} |", flush=True)


if __name__ == "__main__":
    main()
