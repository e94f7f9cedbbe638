import pytest

from tests.tokenizers.order_templates import ORDERS
from vllm.tokenizers.chat_template import CompiledTemplate
from vllm.tokenizers.template_traits import TemplateTraits
from vllm.tokenizers.tool_forms import TOOL_FORMS

BOTH = frozenset({"user", "assistant"})


def traits(template: str, *, with_tools: bool = False) -> TemplateTraits:
    return CompiledTemplate(template, {}).traits(with_tools=with_tools)


@pytest.mark.parametrize(
    ("name", "system", "several", "late", "lone", "neighbours", "behind_result"),
    [
        ("anything", True, True, True, True, BOTH, True),
        ("first system", True, False, False, True, BOTH, True),
        ("shows first", True, False, False, True, BOTH, True),
        ("shows last", True, False, False, True, BOTH, True),
        ("by turns", True, False, False, True, frozenset(), False),
        ("no system", False, False, False, False, frozenset(), False),
        ("in question", True, False, False, False, BOTH, True),
        ("parts only", True, True, True, True, BOTH, True),
    ],
)
def test_what_a_template_takes(
    name: str,
    system: bool,
    several: bool,
    late: bool,
    lone: bool,
    neighbours: frozenset[str],
    behind_result: bool,
) -> None:
    found = traits(ORDERS[name])
    assert found.system is system
    assert found.several_systems is several
    assert found.late_systems is late
    assert found.lone_system is lone
    assert found.neighbours == neighbours
    assert found.user_behind_result is behind_result


def test_a_template_may_take_less_beside_tools() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and tools and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert traits(template).late_systems
    assert not traits(template, with_tools=True).late_systems


def test_a_template_that_takes_nothing_has_traits() -> None:
    assert traits("{{ raise_exception('no') }}").neighbours == frozenset()


def test_arguments_are_texts_where_a_template_puts_them_into_a_line() -> None:
    loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    ends = "{% endfor %}{% endfor %}"
    assert traits(loop + "{{ '<' + c.function.arguments + '>' }}" + ends).text_arguments
    assert not traits(loop + "{{ c.function.arguments | tojson }}" + ends).text_arguments
    assert not traits("{{ messages[0].content }}").text_arguments


@pytest.mark.parametrize(
    ("shown", "form"),
    [
        ("{{ t.function | tojson }}", 0),
        ("{{ '// ' + t.function.description }}", 1),
        ("{{ t.function.description | tojson }}", 1),
        ("{% for k, v in t.function.parameters.properties.items() %}{{ k }}{% endfor %}", 1),
        (
            "{% for v in t.function.parameters.properties.values() %}{{ v.description | upper + ''"
            " if v.description is defined else 1 + '' }}{% endfor %}",
            2,
        ),
        (
            "{% for v in t.function.parameters.properties.values() %}{{ v.type + '' }}{% endfor %}",
            3,
        ),
        ("{{ raise_exception('no tools') }}", 0),
    ],
)
def test_tools_are_spelled_out_as_far_as_a_template_needs(shown: str, form: int) -> None:
    template = f"{{% for t in tools or [] %}}{shown}{{% endfor %}}{{{{ messages[0].content }}}}"
    assert traits(template).tool_form is TOOL_FORMS[form]
