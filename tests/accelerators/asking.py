"""What engines on interpreted kernels are asked; loads no transformers, which takes seconds."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.attention.ops.registry import Op, get_reference_op
from vllm.v1.attention.ops.triton.registry import get_triton_op

NUM_ANSWER = 2
NUM_IDS = 260
"""Tokens that every checkpoint here has."""

# Of a DeepSeek-V4: one layer of each kind, of which the drafting block is the one that has windows
# alone; experts are looked up in the first and scored in the others.
SHORT_V4: dict[str, Any] = {"num_hidden_layers": 2, "compress_ratios": [4, 128, 0]}

Answers = list[tuple[list[int], int | None, int]]
"""Ids of an answer, tokens of its prompt that were hit, drafts that stood."""


def draw_prompt(length: int) -> list[int]:
    """Returns fixed ids."""
    source = random.Random(length)
    return [source.randrange(NUM_IDS) for _ in range(length)]


def ask(
    folder: Path,
    block_size: int,
    num_drafts: int = 0,
    lengths: Sequence[int] = (5, 35),
    method: str = "mtp",
    **settings: Any,
) -> Answers:
    """Asks an engine for answers; with drafts, for a few tokens more, and of some for more yet.

    The last prompt, of ``lengths``, is asked again, and on.
    """
    prompts = [draw_prompt(length) for length in lengths]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=NUM_ANSWER + (2 + number) * num_drafts,
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(len(prompts))
    ]
    drafts = {"method": method, "num_speculative_tokens": num_drafts}
    with LLM(
        model=str(folder),
        block_size=block_size,
        max_model_len=256,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=300,
        skip_tokenizer_init=True,
        speculative_config=drafts if num_drafts else None,
        disable_log_stats=False,
        **settings,
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        again = [*prompts[-1], *draw_prompt(9)]
        outputs += llm.generate([{"prompt_token_ids": again}], params[0], use_tqdm=False)
    return [
        (list(out.outputs[0].token_ids), out.num_cached_tokens, out.metrics.num_accepted_tokens)
        for out in outputs
    ]


def find_few_kernels(name: str) -> Op:
    """Returns what a graph needs of Triton, and the reference's op for the rest, which is fast."""
    kernels = ("write_rows", "read_rows", "list_entries", "run_experts", "mix_experts")
    stored = ("stored_linear", "stored_grouped_linear", "read_stored_rows")
    return get_triton_op(name) if name in (*kernels, *stored) else get_reference_op(name)
