"""Generate without a server: ``python examples/offline_inference.py``."""

from vllm import LLM, SamplingParams


def main() -> None:
    """Generate twice; the second time the prompts' prefixes come from the cache."""
    llm = LLM(model="deepseek-v4", block_size=32)
    prompts = [f"{'A long shared introduction. ' * 30} Question {i}:" for i in range(3)]
    for _ in range(2):
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            prompt_ids = output.prompt_token_ids or []
            print(
                f"{len(prompt_ids)} prompt tokens, {output.num_cached_tokens} cached: "
                f"{output.outputs[0].text!r}"
            )


if __name__ == "__main__":
    main()
