"""The model of clients that bring tools and formats of their own: coding agents and frameworks.

A scripted checkpoint (``tests.e2e.scripted_checkpoint``) whose chat template looks at the request:
its tools, its texts, how often the model has answered. It ends the prompt with a piece with which
only one script begins, so the model does what the client hopes of a good one: it does three times
what finds a record, then says ``SAID``.
"""

import json
from pathlib import Path

from tests.e2e.scripted_checkpoint import write_scripted_v4

CONTEXT = 131_072
API_KEY = "worker-key"
SAID = "All three records are found."
_END = "<｜end▁of▁sentence｜>"
_ARGUMENTS = '{"key": "Bérgen 🏔", "days": 3}'
_TURNS = 3
# Where a script is cut into pieces, each a token.
_CUT = "\0"


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_CUT}{arguments}}}\n</tool_call>'


def _fields(**fields: str) -> str:
    """What dspy's models answer."""
    said = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items())
    return said + "[[ ## completed ## ]]"


# Conditions over a request, and what the model says under the first that holds. ``names``: of its
# tools; ``said``: all texts; ``turn``: how often the model has answered.
SCRIPTS: tuple[tuple[str, str], ...] = (
    # Tools: Codex, Claude Code, opencode, and agents of frameworks.
    (
        f"'exec_command' in names and turn < {_TURNS}",
        _call("exec_command", '{"cmd": "echo found"}'),
    ),
    (
        f"'Bash' in names and turn < {_TURNS}",
        _call("Bash", '{"command": "echo found", "description": "Find the record"}'),
    ),
    (
        f"'bash' in names and turn < {_TURNS}",
        _call("bash", '{"command": "echo it", "description": "Look for it"}'),
    ),
    (f"'look_up' in names and turn < {_TURNS}", _call("look_up", _ARGUMENTS)),
    ("'final_answer' in names", _call("final_answer", json.dumps({"answer": SAID}))),
    ("names", SAID),
    # smolagents: code between tags.
    (
        f"'<code>' in said and turn < {_TURNS}",
        'Thought: I look.\n<code>\nprint(look_up(key="Bérgen 🏔", days=3))\n</code>',
    ),
    ("'<code>' in said", f'Thought: Done.\n<code>\nfinal_answer("{SAID}")\n</code>'),
    # dspy: fields, and a trajectory in the prompt.
    (
        f"'[[ ## next_tool_name ## ]]' in said and 'observation_{_TURNS - 1}' not in said",
        _fields(next_thought="I look.", next_tool_name="look_up", next_tool_args=_ARGUMENTS),
    ),
    (
        "'[[ ## next_tool_name ## ]]' in said",
        _fields(next_thought="It is done.", next_tool_name="finish", next_tool_args="{}"),
    ),
    ("'Respond with a JSON object' in said", '{"ok": true}'),
    ("'[[ ## reasoning ## ]]' in said", _fields(reasoning="They are there.", answer=SAID)),
    ("'[[ ## answer ## ]]' in said", _fields(answer=SAID)),
    # aider: a new file, and what is said of its commit.
    ("'Git commit message' in said", "docs: what is found"),
    (
        "'<<<<<<< SEARCH' in said",
        f"record.txt\n```\n<<<<<<< SEARCH\n=======\n{SAID}\n>>>>>>> REPLACE\n```\n",
    ),
    ("true", SAID.replace(" are", f"{_CUT} are") + "\n"),
)
_TEMPLATE = """{%- set ns = namespace(turn=0, said='') %}
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{% set ns.turn = ns.turn + 1 %}{% endif %}
{%- set ns.said = ns.said + m.content %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- set turn = ns.turn %}{% set said = ns.said %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
BEGINNINGS{% endif %}"""


def write_worker(folder: Path) -> None:
    """Write the checkpoint, and ``template.jinja`` beside it."""
    script, used, beginnings = {}, set[str](), []
    for i, (condition, said) in enumerate(SCRIPTS):
        middle = len(said) // 2
        pieces = said.split(_CUT) if _CUT in said else [said[:middle], said[middle:]]
        if used & set(pieces):
            pieces = [said]
        used |= set(pieces)
        script[f"<do {i}>"] = [*pieces, _END]
        beginnings.append(f"{'elif' if i else 'if'} {condition} %}}{{{{- '<do {i}>' }}}}")
    # Where a call is required the server writes its beginning, and the model goes on from there: it
    # has seen nothing but these tokens, so it always looks a record up.
    opened, _, rest = _call("look_up", _ARGUMENTS).partition("look_up")
    script[opened] = [f"look_up{rest.split(_CUT)[0]}", rest.split(_CUT)[1]]
    write_scripted_v4(folder, script)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = CONTEXT
    rope = config["rope_scaling"]
    rope["factor"] = CONTEXT // rope["original_max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    chosen = "\n".join(f"{{%- {beginning}" for beginning in beginnings) + "{% endif %}"
    (folder / "template.jinja").write_text(_TEMPLATE.replace("BEGINNINGS", chosen), "utf-8")
