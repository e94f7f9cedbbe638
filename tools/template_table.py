"""What chat templates take, for docs/chats.md: ``python -m tools.template_table FOLDER``.

FOLDER holds templates (``*.jinja``), such as those of the package trl, which ``make clients``
installs: ``.venv-clients/axolotl-oumi-trl/trl/chat_templates``. Those for training, and of models
that see images and take parts alone, are left out, as in the tests with that package.
"""

import sys
from pathlib import Path

from vllm.exceptions import UserInputError
from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.chat_template import CompiledTemplate
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.end_marker import EndMarker
from vllm.tokenizers.mistral_template import make_mistral_template
from vllm.tokenizers.template_traits import TemplateTraits
from vllm.tokenizers.tool_calls import MessageCall
from vllm.tokenizers.tool_forms import TOOL_FORMS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "chats.md"
BEGIN, END = "<!-- templates: begin -->\n", "<!-- templates: end -->\n"
IMAGES_ONLY = ("idefics3", "llava_next", "smolvlm")
MISTRAL_VERSIONS = (3, 7, 11, 13)
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_HEADER = (
    "| template | system texts | neighbours | question behind a result | tools | calls without "
    "arguments | continued answers |\n|---|---|---|---|---|---|---|\n"
)
_USER = ChatMessage("user", "question")
_FORMS = ("as sent", "spelled out", "described", "plain")
_PLAIN = {"add_generation_prompt": False}


def make_table(folder: Path) -> str:
    """Return the table of a folder's templates and of Mistral's formats, as Markdown."""
    texts = {
        path.stem: path.read_text("utf-8")
        for path in sorted(folder.glob("*.jinja"))
        if not path.stem.endswith("_training") and path.stem not in IMAGES_ONLY
    }
    texts |= {f"Mistral {v}": make_mistral_template(v) for v in MISTRAL_VERSIONS}
    return _HEADER + "".join(f"| {name} | {describe(text)} |\n" for name, text in texts.items())


def describe(text: str) -> str:
    """Return what a template takes, and what is done where it takes less, as a table's row."""
    template = CompiledTemplate(text, _TOKENS)
    traits = template.traits(with_tools=False)
    cells = (
        _systems(traits),
        _neighbours(traits),
        "apart" if traits.user_behind_result else "joined",
        _tools(template),
        _calls(template, traits),
        _continued(template),
    )
    return " | ".join(cells)


def _systems(traits: TemplateTraits) -> str:
    if not traits.system:
        return "into the question"
    if traits.late_systems:
        return "anywhere" if traits.several_systems else "anywhere, one at a time"
    return "several in front" if traits.several_systems else "one in front"


def _neighbours(traits: TemplateTraits) -> str:
    if len(traits.neighbours) == 2:
        return "apart"
    return f"apart: {', '.join(sorted(traits.neighbours))}" if traits.neighbours else "joined"


def _tools(template: CompiledTemplate) -> str:
    form = template.traits(with_tools=True).tool_form
    tool = ToolSpec("probetool", {"name": "probetool"})
    try:
        shown = template.render([_USER], [tool], _PLAIN)
    except UserInputError:
        return "refused"
    return _FORMS[TOOL_FORMS.index(form)] if "probetool" in shown else "not shown"


def _calls(template: CompiledTemplate, traits: TemplateTraits) -> str:
    call = MessageCall("call00000", "probetool", "{}")
    chat = [_USER, ChatMessage("assistant", "", tool_calls=(call,)), _result()]
    try:
        shown = template.render(chat, (), _PLAIN)
    except UserInputError:
        return "refused"
    if "probetool" not in shown:
        return "not shown"
    return "a text" if traits.text_arguments else "an object"


def _result() -> ChatMessage:
    return ChatMessage("tool", "result", tool_call_id="call00000", name="probetool")


def _continued(template: CompiledTemplate) -> str:
    said = ChatMessage("assistant", "The answer is ")
    end = EndMarker()
    try:
        shown = end.cut(template.render([_USER, end.put_behind(said)], (), _PLAIN), said)
    except UserInputError:
        return "refused"
    return "exact" if shown.endswith(said.content) else "trimmed"


def replace_table(page: str, table: str) -> str:
    """Return a page with another table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), make_table(Path(sys.argv[1]))), "utf-8")
