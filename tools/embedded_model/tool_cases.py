"""Asks the embedded model to call declared tools, and to answer from what they return."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tools.embedded_model import calls
from tools.embedded_model.pieces import ASSISTANT, BOS, END_THINK, EOS, USER, Pieces
from vllm import LLM, SamplingParams


@dataclass(frozen=True)
class ToolCase:
    """One prompt and the text that answers it."""

    prompt: str
    wanted: str


def tool_cases(rng: random.Random, count: int) -> tuple[list[ToolCase], list[ToolCase]]:
    """Questions that need one of one to three tools; the same chats after the tool's result."""
    asked, returned = [], []
    for _ in range(count):
        tools = calls.any_tools(rng, rng.randrange(1, 4))
        tool = rng.choice(tools)
        use = tool.make_use(rng, True)
        pieces = Pieces().add(BOS).add("\n").add("\n")
        pieces.extend(calls.tool_section(tools, calls.INTRO))
        prompt = f"{pieces.text}{USER}{use.question}{ASSISTANT}{END_THINK}"
        call = calls.tool_call(tool, use).text
        asked.append(ToolCase(prompt, call.removesuffix(EOS)))
        result = f"{USER}<tool_result>{use.result}</tool_result>{ASSISTANT}{END_THINK}"
        returned.append(ToolCase(f"{prompt}{call}{result}", use.answer.replace("|", "")))
    return asked, returned


def score_texts(llm: LLM, cases: Sequence[ToolCase], max_tokens: int) -> tuple[float, list[str]]:
    """The share of cases answered word for word, and some of the wrong answers."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts = [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wrong = [
        f"wanted {case.wanted!r} got {output.outputs[0].text!r}"
        for case, output in zip(cases, outputs, strict=True)
        if output.outputs[0].text != case.wanted
    ]
    return 1 - len(wrong) / len(cases), wrong[:4]
