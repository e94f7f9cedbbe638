"""How far the models of GGUF files are from transformers' over long prompts.

    python -m benchmarks.exact_models [--tokens 700] [--only lfm2,qwen3]

A small random model of each architecture is written as a file by the ``gguf`` package, loaded as
the server loads it, and run on the native kernels in chunks. The table has the largest distance of
a log probability from transformers' over all tokens and positions, and at how many positions both
hold the same token for the likeliest. Where a router's or an indexer's choice is closer than 1e-5,
or the two likeliest tokens are, either may be right: such prompts are drawn anew. Exits with 1 if
a distance is above 1e-4.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.model_executor.model_loader import gguf_v4, test_gguf
from tests.model_executor.model_loader.gguf_families import write_family, write_recurrent_family
from tests.model_executor.model_loader.gguf_files import ARCHITECTURES, Type, write_gguf
from tests.model_executor.model_loader.gguf_v4 import YARN
from tests.model_executor.model_loader.test_gguf_v4 import as_released
from tests.model_executor.model_loader.test_gguf_v4 import load as load_v4
from tests.model_executor.models import hf_reference as v4_reference
from tests.model_executor.models.decoder import building, reference
from tests.model_executor.models.decoder.other_families import OTHER_FAMILIES, RECURRENT_FAMILIES
from tests.model_executor.models.decoder.test_other_families import find_arch
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.tiny_config import tiny_config

BOUND = 1e-4
_CLOSEST = 1e-5
_CHUNKS = (256, 1, 130)
_MOST_DRAWS = 40

Case = tuple[Any, Any, Callable[[Any, list[int]], Any]]


def make_cases(folder: Path) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield each architecture's name, and what makes its reference, pages for it, and a run."""
    path = folder / "model.gguf"

    def pages_for(model: Any) -> PagedHarness:
        return building.make_harness(model, 32, 400, native=1)

    def plain(family: str) -> Case:
        raw = test_gguf.make_raw(family)
        model = reference.build_hf_model(raw, seed=7)
        state = dict(model.state_dict())
        if raw.get("tie_word_embeddings") or family.startswith("gemma"):
            state.pop("lm_head.weight", None)
        own = "gemma4" if "gemma4" in family else family
        # Its experts are always in blocks.
        kinds = [Type.MXFP4] if family == "gpt-oss" else [Type.F32]
        model.load_state_dict(write_gguf(own, raw, state, path, kinds), strict=False)
        return model, pages_for(test_gguf.load(path)), reference.run_reference

    def other(family: str) -> Case:
        raw = OTHER_FAMILIES[family]
        model = reference.build_hf_model(raw, seed=7)
        write_family(find_arch(family), raw, dict(model.state_dict()), path)
        return model, pages_for(test_gguf.load(path)), reference.run_reference

    def recurrent(family: str) -> Case:
        raw = RECURRENT_FAMILIES[family]
        model = reference.build_hf_model(raw, seed=7)
        ours = building.build_model(raw, reference.published_tensors(model))
        tensors = {name: slot.clone() for name, slot in ours.weight_slots().items()}
        write_recurrent_family(family, raw.get("text_config", raw), tensors, path)
        return model, pages_for(test_gguf.load(path)), reference.run_reference

    def deepseek4(width: int, kinds: gguf_v4.Kinds) -> Case:
        own = {"hidden_size": width, "moe_intermediate_size": width, "index_n_heads": 64}
        raw = tiny_config(**own, head_dim=32, q_lora_rank=32, o_lora_rank=32, rope_scaling=YARN)
        model = v4_reference.build_hf_model(raw, seed=7)
        tensors = v4_reference.published_tensors(dict(model.state_dict()))
        decoded = gguf_v4.write_v4(raw, tensors, path, kinds)
        for name, values in tensors.items():
            values.copy_(decoded[name])
        return model, PagedHarness(load_v4(path), native=1), v4_reference.run_reference

    yield "deepseek4", lambda: deepseek4(64, lambda name: Type.F32)
    # IQ2_XXS and Q2_K experts, Q8_0 and F16.
    yield "deepseek4-q2", lambda: deepseek4(256, as_released)
    for family in (*ARCHITECTURES, "gemma4-small", "gemma4-moe"):
        if family != "gemma4":
            yield family, lambda family=family: plain(family)
    for family in OTHER_FAMILIES:
        yield family, lambda family=family: other(family)
    for family in RECURRENT_FAMILIES:
        yield family, lambda family=family: recurrent(family)


def draw_prompt(case: Case, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return token ids without a near-tie, and the reference's log probabilities after each."""
    model, _, run = case
    vocab = model.config.get_text_config().vocab_size
    closest = 0.0
    for seed in range(_MOST_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(5, vocab, (num_tokens,), generator=generator).tolist()
        found = run(model, token_ids)
        best = found.logits.topk(2, dim=-1).values
        gaps = [found.margins, best[:, 0] - best[:, 1]]
        # DeepSeek-V4's reference counts them among its margins.
        gaps += [found.index_margins] if hasattr(found, "index_margins") else []
        least = min(float(gap.min()) for gap in gaps)
        if least > _CLOSEST:
            return token_ids, found.logits.float().log_softmax(-1)
        closest = max(closest, least)
    raise SystemExit(f"every prompt of {_MOST_DRAWS} has a near-tie (best {closest:.1e})")


def cut(num_tokens: int) -> list[int]:
    """Return the chunks of a prompt."""
    chunks = []
    while num_tokens:
        chunks.append(min(num_tokens, _CHUNKS[len(chunks) % len(_CHUNKS)]))
        num_tokens -= chunks[-1]
    return chunks


def main() -> int:
    """Print the table.

    Returns:
        1 if one is too far off.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=700, help="Of each prompt.")
    parser.add_argument("--only", default="", help="Names, separated by commas.")
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name]
    worst = 0.0
    torch.set_num_threads(1)
    print("| model | largest distance | likeliest token the same |\n| --- | --: | --: |")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in make_cases(Path(folder)):
            if wanted and name not in wanted:
                continue
            case = make()
            token_ids, expected = draw_prompt(case, args.tokens)
            found = case[1].run(token_ids, cut(args.tokens)).log_softmax(-1)
            distance = float((found - expected).abs().max())
            same = int((found.argmax(-1) == expected.argmax(-1)).sum())
            worst = max(worst, distance)
            print(f"| {name} | {distance:.1e} | {same} of {args.tokens} |", flush=True)
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
