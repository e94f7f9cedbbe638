"""Accepted length and speed of the embedded model's MTP drafts on lookups and small talk.

OMP_NUM_THREADS=1 python -m tools.embedded_model.drafts
"""

import random
import time

from tools.embedded_model import facts, tasks, words
from vllm import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreRequest

_EOS = 1


def make_prompts(tokenizer: Tokenizer, kind: str, count: int) -> list[list[int]]:
    """Token ids of chats of one question each."""
    rng = random.Random(kind)
    prompts = []
    for _ in range(count):
        text = tasks.small_talk(rng)[0]
        if kind == "lookups":
            told = [facts.number_fact(rng, n) for n in words.names(rng, 20, held_out=True)]
            document = " ".join(fact.told.replace("|", "") for fact in told)
            text = f"{document} {rng.choice(told).question}"
        chat = f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜></think>"
        prompts.append(tokenizer.encode(chat, add_special_tokens=False))
    return prompts


def measure(core: EngineCore, prompts: list[list[int]], run: str) -> tuple[float, float]:
    """Accepted length and tokens per second of CPU time, prompts left out."""
    drafts = accepted = tokens = 0
    seconds = 0.0
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[_EOS])
    for i, prompt in enumerate(prompts):
        message = EngineCoreRequest(f"{run}-{i}", prompt, params, time.time())
        core.add_request(core.make_request(message))
        core.step()
        start = time.process_time()
        while core.has_work():
            for batch in core.step()[0].values():
                tokens += sum(len(output.new_token_ids) for output in batch.outputs)
                stats = batch.scheduler_stats
                if stats is not None and stats.spec_decoding_stats is not None:
                    drafts += stats.spec_decoding_stats.num_drafts
                    accepted += stats.spec_decoding_stats.num_accepted_tokens
        seconds += time.process_time() - start
    return 1 + accepted / max(drafts, 1), tokens / seconds


def main() -> None:
    """Print a row per number of drafts."""
    for k in (0, 1, 2, 3):
        speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
        config = EngineArgs(
            speculative_config=speculative, max_model_len=1024, num_gpu_blocks_override=1600
        ).create_vllm_config()
        core = EngineCore(config, UniProcExecutor)
        tokenizer = Tokenizer.from_folder(config.model_config.path or "")
        measure(core, make_prompts(tokenizer, "lookups", 2), "warm")
        for kind in ("lookups", "small talk"):
            length, speed = measure(core, make_prompts(tokenizer, kind, 30), kind)
            print(
                f"k={k} {kind:11s} accepted length {length:.2f}, {speed:.0f} tokens/s", flush=True
            )


if __name__ == "__main__":
    main()
