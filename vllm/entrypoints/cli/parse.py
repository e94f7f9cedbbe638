"""``vllm parse``: show how a recorded answer is read."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.parser.explanation import Reading, explain_answer
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.registry import NONE, ParserChoice, choose_parsers
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_encoder import find_templates
from vllm.tokenizers.chat_tools import ToolSpec, parse_tools

_EXIT_MALFORMED = 3


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "parse",
        help="Show how a recorded answer is read, and why.",
        description="Read an answer from the standard input as a server would, and print its "
        "reasoning, content and calls, which part of the text is what, and why a call is "
        "malformed. Loads no weights.",
    )
    parser.add_argument("--model", help="Whose tokenizer and chat template choose the parsers.")
    parser.add_argument("--tools", metavar="FILE", help="JSON: a list of tools, or a request.")
    parser.add_argument("--tool-call-parser", metavar="NAME", help="As vllm serve takes it.")
    parser.add_argument("--reasoning-parser", metavar="NAME", help="As vllm serve takes it.")
    parser.add_argument("--chat-template", metavar="TEMPLATE", help="As vllm serve takes it.")
    parser.add_argument(
        "--in-reasoning",
        action=argparse.BooleanOptionalAction,
        help="Whether the prompt ended inside the reasoning (default: as the chat template does).",
    )
    parser.add_argument(
        "--finish-reason",
        default="stop",
        choices=("stop", "length", "abort"),
        help="Why the answer ended (default: %(default)s).",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print how the answer on the standard input is read.

    Returns:
        0; 3 if a call is malformed.

    Raises:
        VllmError: A flag, the model or the tools are wrong.
    """
    tools = _read_tools(args.tools) if args.tools is not None else ()
    choice, in_reasoning = _choose(args, tools)
    options = ParseOptions(
        in_reasoning=in_reasoning if args.in_reasoning is None else args.in_reasoning,
        tools=tools,
        tool_use=ToolUse.OFF if choice.tools == NONE else ToolUse.PARSE,
    )
    reading = explain_answer(choice, sys.stdin.read(), options, args.finish_reason)
    if args.json:
        print(json.dumps(_as_json(choice, options, reading), ensure_ascii=False, indent=2))
    else:
        _print(choice, options, reading)
    return _EXIT_MALFORMED if reading.malformed else 0


def _choose(args: argparse.Namespace, tools: tuple[ToolSpec, ...]) -> tuple[ParserChoice, bool]:
    """The parsers, and whether a prompt with these tools ends inside the reasoning."""
    if args.model is None:
        if args.tool_call_parser is None and args.reasoning_parser is None:
            raise UserInputError(
                "Nothing says which format the answer has: give --model, or --tool-call-parser "
                "and --reasoning-parser.",
                "model",
            )
        return choose_parsers("", None, args.tool_call_parser, args.reasoning_parser), False
    path = resolve_checkpoint(args.model, with_weights=False).path
    config, tokenizer = read_hf_config(path), Tokenizer.from_folder(path)
    templates = find_templates(config, tokenizer, args.chat_template)
    choice = choose_parsers(
        config.get("model_type", ""),
        templates.for_tools if templates is not None else None,
        args.tool_call_parser,
        args.reasoning_parser,
    )
    encoder = make_chat_encoder(config, tokenizer, args.chat_template)
    offered = () if choice.tools == NONE else tools
    asked = [{"role": "user", "content": "?"}]
    return choice, encoder.encode_chat(asked, ChatOptions(tools=offered)).in_reasoning


def _read_tools(path: str) -> tuple[ToolSpec, ...]:
    """The tools of a file, in any API's form.

    Raises:
        UserInputError: It cannot be read, or holds none.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserInputError(f"--tools {path!r} cannot be read: {error}.", "tools") from error
    listed = content.get("tools") if isinstance(content, Mapping) else content
    if not isinstance(listed, list):
        raise UserInputError(
            f"--tools {path!r} holds no tools: give a JSON list of them, or a request with tools.",
            "tools",
        )
    return parse_tools([_as_chat_tool(tool) for tool in listed])


def _as_chat_tool(tool: Any) -> Any:
    """A tool of Responses or Messages in the chat dialect; others stay."""
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters", tool.get("input_schema"))
    return {"type": "function", "function": {"name": tool["name"], "parameters": parameters}}


def _as_json(choice: ParserChoice, options: ParseOptions, reading: Reading) -> dict[str, Any]:
    return {
        "tool_call_parser": choice.tools,
        "reasoning_parser": choice.reasoning,
        "in_reasoning": options.in_reasoning,
        "reasoning": reading.answer.reasoning,
        "content": reading.answer.content,
        "tool_calls": [dataclasses.asdict(call) for call in reading.answer.tool_calls],
        "malformed": [dataclasses.asdict(call) for call in reading.malformed],
        "parts": [dataclasses.asdict(part) for part in reading.parts],
    }


def _print(choice: ParserChoice, options: ParseOptions, reading: Reading) -> None:
    begins = "inside the reasoning" if options.in_reasoning else "outside of reasoning"
    print(f"parsers    {choice.tools} (calls), {choice.reasoning} (reasoning); begins {begins}")
    print(f"reasoning  {reading.answer.reasoning!r}")
    print(f"content    {reading.answer.content!r}")
    for call in reading.answer.tool_calls:
        print(f"call       {call.name} {call.arguments}  id {call.id}")
    for malformed in reading.malformed:
        print(f"malformed  {malformed.reason}: {malformed.text!r}")
    print("text")
    for part in reading.parts:
        print(f"  {part.kind:<11}  {part.text!r}")
