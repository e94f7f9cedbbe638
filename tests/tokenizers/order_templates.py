"""Our own templates that refuse or drop messages as those of families do; ``refuse`` raises."""

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_FOR = "{% for m in messages %}"

ANYTHING = _FOR + _TURN + "{% endfor %}" + _OPEN
# One system text, in front.
FIRST_SYSTEM = (
    _FOR
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _OPEN
)
# Others vanish.
SHOWS_FIRST_SYSTEM = (
    _FOR + "{% if m.role != 'system' or loop.first %}" + _TURN + "{% endif %}{% endfor %}" + _OPEN
)
# The last one wins.
SHOWS_LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}"
    + _FOR
    + "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    + _FOR
    + "{% if m.role != 'system' %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _OPEN
)
# Users and assistants by turns, a system text only in front; calls and results do not count.
ALTERNATES = (
    "{% set first = messages[0].role == 'system' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% if first %}<s>{{ messages[0].content | trim }}</s>{% endif %}"
    "{% set ns = namespace(i=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[Q]{{ m.content | trim }}[/Q]"
    "{% elif m.tool_calls %}[C]{{ m.content or '' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}[/C]"
    "{% elif m.role == 'assistant' %}{{ m.content | trim }}[/A]"
    "{% elif m.role == 'tool' %}[R]{{ m.content }}[/R]"
    "{% else %}{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"
)
# The same, and no system text at all.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + ALTERNATES
)
# A system text stands in the last question, and one without a question nowhere.
IN_QUESTION = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{% if loop.last and m.role == 'user' %}{{ s }}\n\n{% endif %}{{ m.content }}"
    "{% endfor %}"
)
# Of models that see: contents are parts, texts are dropped.
PARTS_ONLY = (
    _FOR
    + "{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    + "{% endfor %}\n{% endfor %}"
)
ORDERS = {
    "anything": ANYTHING,
    "first system": FIRST_SYSTEM,
    "shows first": SHOWS_FIRST_SYSTEM,
    "shows last": SHOWS_LAST_SYSTEM,
    "by turns": ALTERNATES,
    "no system": NO_SYSTEM,
    "in question": IN_QUESTION,
    "parts only": PARTS_ONLY,
}
