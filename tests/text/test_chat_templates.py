"""Chat templates: as transformers renders them, and what a hostile one may do."""

import os
import re
import signal
import subprocess
import sys

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from specbeam.cli import main
from specbeam.errors import SpecbeamError
from specbeam.text import chat_templates
from specbeam.text.chat_templates import Renderer
from tests.conftest import byte_tokenizer, random_model

MESSAGES = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi 'ü' <b>\u2028 \ud800"}]
CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
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
    renderer(CONTENTS, MESSAGES)  # it has begun
    yield renderer
    renderer.end()


@pytest.mark.parametrize("how", [{"add_generation_prompt": True}, {"continue_final_message": True}, {"tools": None}])
def test_templates_are_rendered_as_by_transformers(renderer, how):
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=FEATURES, bos_token="<s>", **how)
    assert renderer(FEATURES, MESSAGES, bos_token="<s>", **how) == expected


BLOCKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for block in m.content %}{% if block['type'] == 'thinking' %}"
    "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}{% else %}{{ block['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""As Mistral's template reads thoughts."""
BEHIND_CALLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% for r in messages[loop.index:] if r.role == 'tool' %}={{ r.content }}{% endfor %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""As Gemma's template reads results: with the calls before them."""


def test_thoughts_that_are_a_part_of_the_content(renderer):
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"}]
    parts = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Ho"}]
    (expected,), _ = render_jinja_template([[said[0], {"role": "assistant", "content": parts}]], chat_template=BLOCKS)
    assert renderer(BLOCKS, said) == expected == "<user>Hi<assistant>[THINK]Hm[/THINK]Ho"
    said[1]["content"] = ""
    assert renderer(BLOCKS, said) == "<user>Hi<assistant>[THINK]Hm[/THINK]"


def test_results_that_a_template_reads_with_their_calls(renderer):
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "a", "content": "noon"})
    (expected,), _ = render_jinja_template([said], chat_template=BEHIND_CALLS)
    assert renderer(BEHIND_CALLS, said) == expected == "<user>Hi<assistant>now=noon"


def test_what_a_message_thought_and_the_sandbox_are_transformers(renderer):
    thinking = [
        {"role": "assistant", "content": "a", "thinking": "t"},
        {"role": "user", "content": "b", "reasoning": "r"},
    ]
    for template in (
        CONTENTS + "{{ messages }}{{ dict.fromkeys('ab') }}{{ namespace({'a': 1}, b=2).b }}",
        CONTENTS + "{{ messages | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
        CONTENTS
        + "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}.{% endfor %}",
    ):
        (expected,), _ = render_jinja_template([thinking], chat_template=template)
        assert renderer(template, thinking) == expected
    for template in (
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ dict.__class__ }}",
    ):
        with pytest.raises((SecurityError, TypeError)):
            render_jinja_template([MESSAGES], chat_template=template + "{{ dict.__class__.x }}")
        with pytest.raises(ValueError, match=r"underscore|unsafe"):
            renderer(CONTENTS + template + "{{ dict.__class__.x }}", MESSAGES)


LFM2 = """\
{{- bos_token -}}
{%- set keeps_thoughts = keep_past_thinking | default(false) -%}
{%- set ns = namespace(system="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for tool in tools or [] -%}
    {%- if loop.first -%}
        {%- set ns.system = ns.system + ("\\n" if ns.system else "") + "List of tools: " + FIRST -%}
    {%- endif -%}
    {%- set ns.system = ns.system + (tool if tool is string else tool | tojson) + (LAST if loop.last else ", ") -%}
{%- endfor -%}
{%- if ns.system %}{{ "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" }}{% endif -%}
{%- for message in messages -%}
    {%- set content = message["content"] if message["content"] is string else message["content"] | tojson -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- elif message["role"] == "assistant" and not keeps_thoughts and "</think>" in content -%}
        {%- set content = content.split("</think>")[-1] | trim -%}
    {%- endif -%}
    {{- "<|im_start|>" + message["role"] + "\\n" + content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""
"""The turns of LFM2's and LFM2.5's templates. FIRST and LAST stand around the list of tools."""
LFM2_LISTS = {"LFM2": ("<|tool_list_start|>[", "]<|tool_list_end|>"), "LFM2.5": ("[", "]")}
TOOL = {"type": "function", "function": {"name": "f", "description": "It's <b>", "parameters": {"type": "object"}}}
NO_ARGUMENTS = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("tools", [None, [TOOL, NO_ARGUMENTS]])
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("version", LFM2_LISTS)
def test_the_turns_of_lfm2_are_those_of_transformers(renderer, version, system, tools):
    first, last = LFM2_LISTS[version]
    template = LFM2.replace("FIRST", f'"{first}"').replace("LAST", f'"{last}"')
    said = [("user", "Hi"), ("assistant", "<think>Hm</think> Yes "), ("tool", "42"), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in said]
    messages = ([{"role": "system", "content": system}] if system else []) + messages
    listed = '{"type": "function", "function": {"name": "f", "description": "It\'s <b>", '
    listed += '"parameters": {"type": "object"}}}, {"type": "function", "function": {"name": "g"}}'
    tools_text = f"List of tools: {first}{listed}{last}" if tools else ""
    told = "\n".join(text for text in (system, tools_text) if text)
    answers = {False: "Yes", True: "<think>Hm</think> Yes "}
    for keeps, answer in answers.items():
        expected = "<s>" + (f"<|im_start|>system\n{told}<|im_end|>\n" if told else "")
        expected += f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        expected += "<|im_start|>tool\n<|tool_response_start|>42<|tool_response_end|><|im_end|>\n"
        expected += "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        how = {"tools": tools, "bos_token": "<s>", "add_generation_prompt": True, "keep_past_thinking": keeps}
        (theirs,), _ = render_jinja_template([messages], chat_template=template, **how)
        assert renderer(template, messages, **how) == theirs == expected


def test_the_child_imports_neither_transformers_nor_torch():
    code = "import sys, specbeam.text.chat_templates as c; c._rendered({'chat_template': 'a', 'conversations': [[]]})"
    code += "; print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


CHAT = [
    {"role": role, "content": text}
    for role, text in [("system", "Be brief."), ("user", "Hi"), ("assistant", " Yes? "), ("user", "{{ x }}")]
]
FORMS = {
    "text": "{{ m.content }}",
    "loop": "{% for part in m.content %}{{ part.text }}{% endfor %}",
    "types": "{% for part in m.content if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}",
    "first": "{{ m['content'][0]['text'] }}",
    "first, with a sum that refuses texts": "{{ m.content[0].text + '' }}",
    "map": "{{ m.content | map(attribute='text') | join }}",
    "a text if it can be": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }}{% endif %}",
    "refusal": "{% if m.content is string %}{{ raise_exception('no') }}{% endif %}{{ m.content[0].text }}",
    "user's parts": "{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}",
    "others' parts": "{% if m.role != 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}",
    "turns": "{% if (m.role == 'user') != (loop.index0 % 2 == messages[0].role.startswith('s')) %}"
    "{{ raise_exception('turns') }}{% endif %}{{ m.content[0].text }}",
}


@pytest.mark.parametrize("content", FORMS.values(), ids=FORMS)
def test_contents_have_the_form_that_the_template_reads(renderer, content):
    template = "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}"
    assert renderer(template, CHAT) == "<system>Be brief.<user>Hi<assistant> Yes? <user>{{ x }}"
    # A list of parts is also what continue_final_message continues.
    assert renderer(template, CHAT[1:3], continue_final_message=True) == "<user>Hi<assistant> Yes? "


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{{ bos_token }}", "user"),
        (CONTENTS.replace("m.content", "m.role"), "user"),
        (CONTENTS.replace("m.content", "m.content[0].value"), "user"),
        (CONTENTS.replace("in messages", "in messages if m.role != 'system'"), "system"),
        (CONTENTS.replace("in messages", "in messages if m.role != 'assistant'"), "assistant"),
    ],
)
def test_a_template_that_leaves_out_a_text_is_refused(renderer, template, role):
    says = re.escape(f"it leaves out what the role {role!r} says, as a text and as a list of parts")
    with pytest.raises(ValueError, match=says):
        renderer(template, CHAT[role == "user" :])
    renderer(template, [{"role": role, "content": " "}])  # nothing is lost


def test_what_a_template_says_of_a_role_is_heard(renderer):
    """It refuses it in each form, and no text is left out."""
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    for content in (FORMS["text"], FORMS["loop"]):
        with pytest.raises(ValueError, match=r"^no system$"):
            renderer(template + content + "{% endfor %}", CHAT)
        assert renderer(template + content + "{% endfor %}", CHAT[1:2]) == "Hi"


def test_the_form_is_found_out_once(monkeypatch):
    rendered, asked = chat_templates._rendered, []
    monkeypatch.setattr(chat_templates, "_rendered", lambda task: asked.append(task) or rendered(task))
    task = {"chat_template": CONTENTS.replace("m.content", "m.content[0].text"), "bos_token": "<once>"}
    for text in ("one", "two"):
        count = len(asked)
        made = task | {"conversations": [[{"role": "user", "content": text}]], "add_generation_prompt": text == "two"}
        (message,) = chat_templates._in_form_of_template(made)["conversations"][0]
        assert message["content"] == [{"type": "text", "text": text}]
        assert (len(asked) > count) == (text == "one")


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
        (CONTENTS + "{% for i in range(99999) %}{{ ' ' * 100 }}{% endfor %}", "writes more than 1,048,576 characters"),
        ("{{ 7 ** (10**8) }}", "0.2 seconds"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.2 seconds"),
        (NESTED, "0.2 seconds"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion|0.2 seconds"),
        ("{{ " + "(" * 10**5, "recursion|0.2 seconds"),
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
    assert renderer(CONTENTS, MESSAGES[:1]) == "Be brief.\n"


def test_a_long_conversation_is_no_hostile_template(renderer):
    template = "{% for m in messages %}{{ m.role + m.content | trim }}{% endfor %}"
    assert len(renderer(template, [{"role": "user", "content": "word " * 500_000}])) == 4 + 2_499_999


def test_an_interrupt_leaves_no_answer_to_the_next_prompt(renderer, monkeypatch):
    started = renderer._running()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(started.stdout, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        renderer("old" + CONTENTS, MESSAGES[:1])
    assert renderer("new " + CONTENTS, MESSAGES[:1]) == "new Be brief.\n"


def test_a_child_that_has_ended_is_replaced(renderer):
    renderer(CONTENTS, MESSAGES)
    os.kill(renderer._process.pid, signal.SIGKILL)
    renderer._process.wait()
    assert renderer(CONTENTS, MESSAGES[:1]) == "Be brief.\n"


@pytest.mark.parametrize("program", ["no-such-python", __file__])
def test_a_child_that_cannot_start_is_refused(monkeypatch, program):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(SpecbeamError, match=rf"{program} cannot be started as a child process \(.+\)"):
        Renderer()(CONTENTS, MESSAGES)


def test_a_hostile_template_is_one_line_on_the_command_line(save, capsys):
    folder = save(random_model("llama"), byte_tokenizer("{{ 'a' * 10**9 }}"))
    capsys.readouterr()
    assert main(["tokens", "Hi", "--chat", "--model", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "specbeam: the model's chat template refuses these messages: it needs more than 256 MB of memory"
