"""``vllm render``: show the prompt that a request's chat becomes."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.tokenizers import ChatEncoder, ChatPrompt, Tokenizer, make_chat_encoder
from vllm.tokenizers.breakpoints import find_breakpoints

if TYPE_CHECKING:
    from vllm.entrypoints.cli.chat_bodies import ChatBody
    from vllm.v1.engine.shown_chats import ShownChat

_APIS = ("chat", "messages", "responses")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "render",
        help="Show the prompt that a request's chat becomes.",
        description="Read the body of a chat request and print its prompt as a server would make "
        "it, with the places where the prefix cache may resume, the messages that were joined for "
        "the chat template, and what was left out. Loads no weights.",
    )
    parser.add_argument("body", nargs="?", metavar="FILE", help="JSON; else the standard input.")
    parser.add_argument("--model", required=True, help="Whose tokenizer and chat template it is.")
    parser.add_argument("--api", choices=_APIS, help="Whose body it is (default: as it looks).")
    parser.add_argument("--chat-template", metavar="TEMPLATE", help="As vllm serve takes it.")
    parser.add_argument("--keep-billing-line", action="store_true", help="As vllm serve takes it.")
    parser.add_argument("--mmproj", metavar="FILE", help="As vllm serve takes it.")
    parser.add_argument(
        "--mm-processor-kwargs", metavar="JSON", type=json.loads, help="As vllm serve takes it."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the prompt of a body.

    Raises:
        VllmError: A flag, the model or the body is wrong.
    """
    # The bodies of the APIs bring a web framework, and what reads pictures much else, for which no
    # other command shall wait.
    from vllm.entrypoints.cli.chat_bodies import read_chat  # noqa: PLC0415
    from vllm.v1.engine.image_setup import make_images_alone  # noqa: PLC0415
    from vllm.v1.engine.shown_chats import find_pictures, show  # noqa: PLC0415

    body = _read_body(args.body)
    chat = read_chat(body, args.api)
    path = resolve_checkpoint(args.model, with_weights=False).path
    tokenizer = Tokenizer.from_folder(path)
    config = read_hf_config(path, mmproj=args.mmproj)
    encoder = make_chat_encoder(
        config, tokenizer, args.chat_template, keeps_billing_line=args.keep_billing_line
    )
    images = make_images_alone(config, args.mm_processor_kwargs or {})
    pictures = find_pictures(chat.messages, images, encoder, moves_results=chat.moves_results)
    shown = show(pictures, images.read_now(pictures.given, body.get("mm_processor_kwargs")), images)
    options = replace(chat.options, images=shown.images)
    chat = replace(chat, messages=shown.messages, options=options)
    prompt = encoder.encode_chat(chat.messages, chat.options)
    places = _find_places(encoder, chat, prompt)
    if args.json:
        print(json.dumps(_as_json(prompt, places, shown), ensure_ascii=False, indent=2))
    else:
        _print(tokenizer, prompt, places, shown)
    return 0


def _read_body(path: str | None) -> Mapping[str, Any]:
    try:
        text = sys.stdin.read() if path in (None, "-") else Path(str(path)).read_text("utf-8")
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserInputError(f"The body cannot be read: {error}.", "body") from error
    if not isinstance(body, Mapping):
        raise UserInputError("The body must be a JSON object.", "body")
    return body


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the cache may resume.

    Attributes:
        token: Offset in tokens.
        is_marked: Whether the client marked it; else the chat format shows it.
        ttl_s: For how long its client wants it kept; None: as long as others.
    """

    token: int
    is_marked: bool
    ttl_s: float | None = None


def _find_places(encoder: ChatEncoder, chat: "ChatBody", prompt: ChatPrompt) -> list[_Place]:
    marked = find_breakpoints(encoder, chat.messages, chat.options, prompt, chat.breakpoints)
    places = [_Place(token, True, ttl_s) for token, ttl_s in marked.items()]
    places += [_Place(token, False) for token in prompt.part_ends if token not in marked]
    return sorted(places, key=lambda place: place.token)


def _as_json(prompt: ChatPrompt, places: Sequence[_Place], shown: "ShownChat") -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "num_tokens": len(prompt.token_ids),
        "breakpoints": [
            {
                "token": place.token,
                "by": "client" if place.is_marked else "format",
                "ttl_s": place.ttl_s,
            }
            for place in places
        ],
        "images": [
            {
                "token": at,
                "num_tokens": shown.read[index].size.num_tokens,
                "width": shown.read[index].size.width,
                "height": shown.read[index].size.height,
            }
            for index, at in prompt.image_offsets
        ],
        "joined": prompt.joined,
        "left_out_billing_line": prompt.left_out_billing_line,
        "in_reasoning": prompt.in_reasoning,
    }


def _print(
    tokenizer: Tokenizer, prompt: ChatPrompt, places: Sequence[_Place], shown: "ShownChat"
) -> None:
    begins = "inside the reasoning" if prompt.in_reasoning else "outside of reasoning"
    print(f"tokens    {len(prompt.token_ids)}; the answer begins {begins}")
    for joined in prompt.joined:
        print(f"joined    messages {', '.join(map(str, joined))} (the first is 0)")
    if prompt.left_out_billing_line:
        print("left out  the billing line of the first system text")
    for index, at in prompt.image_offsets:
        size = shown.read[index].size
        end = at + size.num_tokens
        print(f"picture   tokens {at} to {end - 1}, read as {size.width} x {size.height}")
    print("prompt")
    begin = 0
    for place in places:
        print(tokenizer.decode(prompt.token_ids[begin : place.token]))
        by = "marked by the client" if place.is_marked else "shown by the chat format"
        kept = "" if place.ttl_s is None else f", kept for {place.ttl_s:g} s"
        print(f"----- breakpoint at token {place.token}, {by}{kept}")
        begin = place.token
    print(tokenizer.decode(prompt.token_ids[begin:]))
