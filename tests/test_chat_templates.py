"""Chat templates: as transformers renders them, and what a hostile one may do."""

import os
import signal

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specbeam.chat_templates import Renderer
from specbeam.cli import main
from tests.conftest import byte_tokenizer, random_model

MESSAGES = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi 'ü' <b>\u2028 \ud800"}]
FEATURES = """\
{%- if messages[0].role == 'system' -%}{% set system = messages[0]['content'] | trim %}{% endif -%}
{%- macro turn(m) %}<|{{ m.role }}|>{{ '\\n' + m.content.strip() }}{% endmacro -%}
{{- bos_token ~ system | tojson(indent=2) }}
{% set ns = namespace(n=0) %}
{% for m in messages if m.role != 'system' %}
    {% set ns.n = ns.n + 1 %}
  {{ turn(m) }}{% if loop.last and not m.tools is defined %}{% break %}{% endif %}
{% endfor %}
{% generation %}{{ ns.n }}{{ dict(a=[1.5, none, true]) }}{{ tools }}{% endgeneration %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer(cpu_seconds=0.2)
    renderer("", MESSAGES)  # it has begun
    yield renderer
    renderer.end()


@pytest.mark.parametrize("how", [{"add_generation_prompt": True}, {"continue_final_message": True}])
def test_templates_are_rendered_by_transformers(renderer, how):
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=FEATURES, bos_token="<s>", **how)
    assert renderer(FEATURES, MESSAGES, bos_token="<s>", **how) == expected


def doubled(step, end):
    return f"{{% set ns = namespace(x=[1], y=[1]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ {end} }}}}"


NESTED = doubled("{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}", "ns.x == ns.y")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'a' * 10**9 }}", "memory"),
        ("{{ '%*d' % (10**9, 1) }}", "memory"),
        ("{{ 'a' | center(10**9) }}", "memory"),
        (doubled("{% set ns.x = ns.x + ns.x %}", "ns.x"), "memory|0.2 seconds"),
        ("{% for i in range(99999) %}{{ ' ' * 100 }}{% endfor %}", "writes more than 1,048,576 characters"),
        ("{{ 7 ** (10**8) }}", "0.2 seconds"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.2 seconds"),
        (NESTED, "0.2 seconds"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 10**5, "recursion"),
        ("{{ raise_exception('no ' * 10**6) }}", "^(no )+$"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
        (5, "Can't compile"),
    ],
)
def test_a_hostile_template_is_refused(renderer, template, says):
    with pytest.raises(ValueError, match=says) as refused:
        renderer(template, MESSAGES)
    assert len(str(refused.value)) <= 300
    assert renderer("{{ messages[1].role }}", MESSAGES) == "user"


def test_a_long_conversation_is_no_hostile_template(renderer):
    template = "{% for m in messages %}{{ m.role + m.content | trim }}{% endfor %}"
    assert len(renderer(template, [{"role": "user", "content": "word " * 500_000}])) == 4 + 2_499_999


def test_an_interrupt_leaves_no_answer_to_the_next_prompt(renderer, monkeypatch):
    started = renderer._running()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(started.stdout, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        renderer("old", MESSAGES)
    assert renderer("new", MESSAGES) == "new"


def test_a_child_that_has_ended_is_replaced(renderer):
    renderer("", MESSAGES)
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer("new", MESSAGES) == "new"


def test_a_hostile_template_is_one_line_on_the_command_line(save, capsys):
    folder = save(random_model("llama"), byte_tokenizer("{{ 'a' * 10**9 }}"))
    capsys.readouterr()
    assert main(["tokens", "Hi", "--chat", "--model", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "specbeam: the model's chat template refuses these messages: it needs more than 256 MB of memory"
