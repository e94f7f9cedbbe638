"""Packages that ship chat templates of many families: our prompts have transformers' token ids.

Runs where this project is installed; of the packages only the templates are read. 200 random
conversations for each: system, tools, calls, results, reasoning, answers that are continued; as a
file, and some as text and in the checkpoint's folder, which must not matter.
"""

import json
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from client import Row, run
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.tokenizers import gemma4_conversations as gemma4
from tests.tokenizers.family_tokenizers import byte_level
from tests.tokenizers.test_rendering import TOOLS, as_sent, conversation
from tools import template_table as table
from vllm.exceptions import UserInputError
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_tools import parse_tools

PLACE = Path(os.environ["CLIENTS_ENVS"]) / "axolotl-oumi-trl"
# Of each package, and the least share of conversations that its templates must take.
FOLDERS = {
    "trl": ("trl/chat_templates", 0.8),
    "axolotl": ("axolotl/utils/chat_templates/templates", 0.7),
    "oumi": ("oumi/datasets/chat_templates", 0.7),
}
# Of models that see: they take parts alone, and lose a text that is none.
IMAGES_ONLY = ("idefics3", "llava_next", "smolvlm")
CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CONVERSATIONS = int(os.environ.get("CLIENTS_CONVERSATIONS", "200"))
PARTS = [{"type": "text", "text": "left"}, {"type": "text", "text": "right"}]
ROLES = ("system", "user", "assistant", "tool")


def _takes_parts(oracle: Any) -> bool:
    """Whether a template iterates over parts; another shows a list, which is nobody's format."""
    messages = [{"role": role, "content": PARTS, "tool_call_id": "call00001"} for role in ROLES]
    try:
        text = oracle.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program: any error says no
        return False
    return text.count("left") == len(ROLES) and "'text'" not in text and '"text"' not in text


def _encoders(path: Path, folder: Path) -> list[Any]:
    (folder / "tokenizer.json").write_text(byte_level().backend.to_str(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG), "utf-8")
    bare = Tokenizer.from_folder(folder)
    text = path.read_text("utf-8")
    (folder / "chat_template.jinja").write_text(text, "utf-8")
    own = Tokenizer.from_folder(folder)
    given = [make_chat_encoder({}, bare, template) for template in (str(path), text)]
    return [*given, make_chat_encoder({}, own)]


def _compare(path: Path, folder: Path) -> tuple[int, int, int]:
    """Return how many conversations have the same token ids.

    And how many both refuse, and how many the template alone does: our messages are fitted to it.
    """
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, **CONFIG)
    oracle.chat_template = path.read_text("utf-8")
    encoders = _encoders(path, folder)
    rng, num_same, num_refused, num_fitted = random.Random(path.stem), 0, 0, 0
    takes_parts = _takes_parts(oracle)
    for i in range(CONVERSATIONS):
        messages = conversation(rng, takes_parts)
        last = messages[-1]
        continues = last["role"] == "assistant" and i % 2 == 0
        kwargs = {"enable_thinking": False} if i % 5 == 0 else {}
        tools = TOOLS if i % 3 == 0 else None
        try:
            wanted = oracle.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                return_dict=False,
                **kwargs,
            )
        except Exception:  # a template is a program: any error is a refusal
            wanted = None
        options = ChatOptions(
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=kwargs,
            tools=parse_tools(tools),
        )
        for encoder in encoders if i % 10 == 0 else encoders[:1]:
            try:
                found = encoder.encode_chat(as_sent(messages), options).token_ids
            except UserInputError:
                found = None
            if wanted is not None:
                assert found == wanted, (path.stem, messages, oracle.decode(wanted))
        num_refused += wanted is None and found is None
        num_fitted += wanted is None and found is not None
        num_same += wanted is not None
    return num_same, num_refused, num_fitted


def renderings(row: Row, name: str) -> None:
    told: dict[str, tuple[int, int, int]] = {}
    folder, least = FOLDERS[name]
    for path in sorted((PLACE / folder).glob("*.jinja")):
        # Those for training are others with marks.
        if not path.stem.endswith("_training") and path.stem not in IMAGES_ONLY:
            with tempfile.TemporaryDirectory() as made:
                told[path.stem] = _compare(path, Path(made))
    num_same, num_refused, num_fitted = map(sum, zip(*told.values(), strict=True))
    assert num_same > least * (num_same + num_refused + num_fitted), told
    row.shown = (
        f"{len(told)} templates, {num_same} prompts equal, {num_fitted} fitted to the template, "
        f"{num_refused} refused"
    )


def gemma4_format(row: Row) -> None:
    """Our own rendering of Gemma 4's format, for checkpoints without a template."""
    backend = byte_level().backend
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in gemma4.MARKS])
    oracle = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    oracle.chat_template = (PLACE / FOLDERS["trl"][0] / "gemma4_v5.jinja").read_text("utf-8")
    tokenizer = Tokenizer(backend, {"bos_token": "<bos>"})
    # As transformers reads them: special tokens in messages count.
    encoder = make_chat_encoder({"model_type": "gemma4"}, tokenizer, allows_special_tokens=True)
    for seed in range(CONVERSATIONS):
        rng = random.Random(seed)
        messages, prompts = gemma4.draw_messages(rng), rng.random() < 0.8
        tools = gemma4.draw_tools(rng) if rng.random() < 0.6 else None
        kwargs = {f"{name}_thinking": rng.random() < 0.7 for name in ("enable", "preserve")}
        wanted = oracle.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompts, return_dict=False, **kwargs
        )
        options = ChatOptions(
            add_generation_prompt=prompts, template_kwargs=kwargs, tools=parse_tools(tools)
        )
        found = encoder.encode_chat(gemma4.as_sent(messages), options).token_ids
        assert found == wanted, (seed, oracle.decode(wanted), oracle.decode(found))
    row.shown = f"{CONVERSATIONS} prompts equal"


def verdicts(row: Row) -> None:
    """The table of docs/chats.md says what the server finds out about these templates."""
    shown = table.PAGE.read_text("utf-8").split(table.BEGIN)[1].split(table.END)[0]
    folder = PLACE / FOLDERS["trl"][0]
    assert shown == table.make_table(folder), f"run python -m tools.template_table {folder}"
    row.shown = f"{shown.count(chr(10)) - 2} templates"


for package in FOLDERS:
    rows = {"transformers' token ids": partial(renderings, name=package)}
    if package == "trl":
        rows["Gemma 4 without a template"] = gemma4_format
        rows["what templates take"] = verdicts
    (info,) = PLACE.glob(f"{package}-*.dist-info")
    run(rows, package, info.name.removesuffix(".dist-info").split("-")[1])
