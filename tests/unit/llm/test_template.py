import pytest

from services.llm.host.template import CHATML, ChatTemplate, TemplateError, template_variables

HELLO = [{"role": "user", "content": "hi"}]


def template(source: str, **bounds: float) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos="<s>",
        eos="</s>",
        render_s=bounds.get("render_s", 0.5),
        most_bytes=int(bounds.get("most_bytes", 100_000)),
    )


def render(source: str, **variables: object) -> str:
    given = {"messages": HELLO, "tools": None, "add_generation_prompt": True, **variables}
    return template(source).render(now_unix_s=86_400.0, **given)


def test_chatml_stands_in_for_a_model_without_a_template() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>hi</s>"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", ""),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y-%m-%d') }}", "1970-01-02"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ missing }}", ""),
        ("{{ 'a' * 3 }}{{ '%s-%d' % ('b', 2) }}", "aaab-2"),
        ("{{ ' a '.strip() }}{{ 'A'.lower() }}{{ 'a,b'.split(',')[1] }}", "aab"),
        ("  {%- if true %}\n  x\n  {%- endif %}", "  x"),
    ],
)
def test_what_templates_of_models_use_works(source: str, expected: str) -> None:
    assert render(source) == expected


ATTACKS = {
    "loops": "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}",
    "pours": "{% for a in range(10000) %}{% for b in range(10000) %}aaaaaaaaaa{% endfor %}{% endfor %}",
    "counts": "{{ range(99999999) | list | length }}",
    "multiplies": "{{ 'x' * 100000000 }}",
    "multiplies lists": "{{ ([1] * 100000000) | length }}",
    "doubles": "{% set n = namespace(x='ab') %}{% for i in range(30) %}{% set n.x = n.x + n.x %}{{ n.x }}{% endfor %}",
    "powers": "{{ 10 ** 100000000 }}",
    "formats wide": "{{ '%1000000000d' % 1 }}",
    "formats a given width": "{{ '%*d' % (1000000000, 1) }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "asks for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "asks for globals": "{{ raise_exception.__globals__['json'] }}",
    "asks for itself": "{{ self.__init__.__globals__ }}",
    "changes messages": "{{ messages.append(1) }}",
    "imports": "{% import 'os' as os %}",
    "includes": "{% include '/etc/passwd' %}",
    "raises": "{{ raise_exception('only users may speak') }}",
    "is broken": "{% if %}",
    "divides": "{{ 1 / 0 }}",
    "calls nothing": "{{ missing() }}",
    "adds apples": "{{ 'a' + 1 }}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_that_attacks_or_refuses_ends_with_one_error(attack: str) -> None:
    with pytest.raises(TemplateError):
        render(ATTACKS[attack])


def test_the_refusal_of_a_template_is_told() -> None:
    with pytest.raises(TemplateError, match="only users may speak"):
        render(ATTACKS["raises"])


def test_variables_that_explode_an_honest_template_are_bounded() -> None:
    honest = "{% for i in range(n) %}{{ text }}{% endfor %}"
    with pytest.raises(TemplateError, match="longer than"):
        render(honest, n=10_000, text="x" * 1000)
    with pytest.raises(TemplateError, match="counts to"):
        render(honest, n=10**9, text="x")


def test_a_template_can_be_used_again_after_it_ran_out_of_time() -> None:
    compiled = template("{% if slow %}" + ATTACKS["loops"] + "{% endif %}ok", render_s=0.05)
    with pytest.raises(TemplateError, match=r"within 0\.05 s"):
        compiled.render(now_unix_s=0.0, slow=True)
    assert compiled.render(now_unix_s=0.0, slow=False) == "ok"


def test_a_request_cannot_replace_what_is_ours() -> None:
    given = {"messages": [], "tools": [], "add_generation_prompt": False, "strftime_now": 1, "enable_thinking": True}
    assert template_variables(given) == {"enable_thinking": True}
