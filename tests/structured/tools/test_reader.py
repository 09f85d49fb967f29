"""What is read in answers: texts and streams as vLLM's tests of its parsers have them, in any pieces."""

import json

import pytest

from specbeam.structured.tools import format_of
from specbeam.structured.tools.reader import Reader
from tests.structured.tools.templates import TEMPLATES

FORMATS = {name: format_of(template) for name, template in TEMPLATES.items()}
NAMES = ["weather", "time", "search"]
DEEP = {
    "string": 'He said "hello"',
    "path": "C:\\a",
    "list": ["a", {"b": []}],
    "none": None,
    "brackets": "}]{[ <tool_call>",
}
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}


def call(name, arguments, key="arguments", **how):
    return json.dumps({"name": name, key: arguments}, **how)


A, B = call("weather", PARIS), call("time", ROME)
CASES = {
    # format: texts, each with its content and calls
    "hermes": [
        ("This has nothing to do with tools.", "This has nothing to do with tools.", []),
        (f"<tool_call>\n{A}\n</tool_call>", "", [("weather", PARIS)]),
        (f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>", "", [("weather", PARIS), ("time", ROME)]),
        (f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>", "", [("weather", PARIS), ("time", ROME)]),
        (f"Sure, let me check.<tool_call>{A}</tool_call>", "Sure, let me check.", [("weather", PARIS)]),
        (f"Sure.\n\n<tool_call>\n{A}", "Sure.", [("weather", PARIS)]),
        (f"<tool_call>\n{call('weather', DEEP)}\n</tool_call> Bye", "", [("weather", DEEP)]),
        (f"<tool_call>\n{call('weather', DEEP, indent=2)}\n</tool_call>", "", [("weather", DEEP)]),
        ('<tool_call>{"name": "search","arguments":{}}</tool_call>', "", [("search", {})]),
        ("A <tool_caller> and a <tool_", "A <tool_caller> and a <tool_", []),
        ("<tool_call>\nno JSON", "<tool_call>\nno JSON", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        *((text, text, []) for text in [f"<tool_call>{call('weather', 'Paris')}</tool_call>"]),
        (f'{{"a": 1}}<tool_call>{A}</tool_call>', '{"a": 1}', [("weather", PARIS)]),
        # Qwen2.5-Coder
        (A, "", [("weather", PARIS)]),
        (f"```json\n{call('weather', DEEP, indent=2)}\n```", "", [("weather", DEEP)]),
        (f"I call it:\n```\n{A}\n```\n", "I call it:", [("weather", PARIS)]),
        (f"{A}\n{B}", "", [("weather", PARIS), ("time", ROME)]),
        (f"```json\n{A}\n```\n```json\n{B}\n```", "", [("weather", PARIS), ("time", ROME)]),
        (f"```json\n{call('greet', PARIS)}\n```", f"```json\n{call('greet', PARIS)}\n```", []),
        ("```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
        ('{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
    ],
    "listed": [
        ("This is a test", "This is a test", []),
        (f"[TOOL_CALLS][{A}]", "", [("weather", PARIS)]),
        (f"[TOOL_CALLS] [{A}, {B}]", "", [("weather", PARIS), ("time", ROME)]),
        (f"Hello[TOOL_CALLS] [{A}]", "Hello", [("weather", PARIS)]),
        (f"[TOOL_CALLS] [{A}]\nextra", "", [("weather", PARIS)]),
        ('[TOOL_CALLS] [{"arguments":{"name": "Ann"}, "name": "weather"}]', "", [("weather", {"name": "Ann"})]),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        (f"[TOOL_CALLS]  [ {A} ] [TOOL_CALLS] [{B}]", "", [("weather", PARIS), ("time", ROME)]),
    ],
    "named": [
        ('[TOOL_CALLS]weather{"city": "Paris"}', "", [("weather", PARIS)]),
        (
            '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{"city": "Rome"}',
            "",
            [("weather", PARIS), ("time", ROME)],
        ),
        ('Hi[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "Hi", [("weather", PARIS)]),
        (f"[TOOL_CALLS]search[ARGS]{json.dumps(DEEP)}", "", [("search", DEEP)]),
        ('[TOOL_CALLS]search[ARGS]{"q": "}[TOOL_CALLS]time{"}', "", [("search", {"q": "}[TOOL_CALLS]time{"})]),
        ('[TOOL_CALLS]unknown[ARGS]{"q": 1}', '[TOOL_CALLS]unknown[ARGS]{"q": 1}', []),
        ("[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
        ('a {b[TOOL_CALLS]weather{"city": "Paris"}', "a {b", [("weather", PARIS)]),
    ],
    "llama": [
        ("No calls here", "No calls here", []),
        (call("weather", PARIS, "parameters"), "", [("weather", PARIS)]),
        (f"Here: {call('weather', {}, 'parameters')} More?", "Here:", [("weather", {})]),
        (call("weather", {"a": {"b": {"c": DEEP}}}, "parameters"), "", [("weather", {"a": {"b": {"c": DEEP}}})]),
        (f"{call('weather', PARIS, 'parameters')} I used {{weather}}.", "", [("weather", PARIS)]),
        (f"{call('weather', PARIS, 'parameters')} It read {{\"city\": \"Paris\"}}", "", [("weather", PARIS)]),
        (f"{A};\n{call('time', ROME, 'parameters')}", "", [("weather", PARIS), ("time", ROME)]),
        ('{"parameters": {}}', '{"parameters": {}}', []),
        ('{"name": "weather"}', '{"name": "weather"}', []),
    ],
    "functools": [
        (f"functools[{A}]", "", [("weather", PARIS)]),
        (f"functools[\n  {A},\n  {B}\n]", "", [("weather", PARIS), ("time", ROME)]),
        (f"Let me check.\nfunctools[{call('weather', DEEP, indent=2)}]\nMore?", "Let me check.", [("weather", DEEP)]),
        ("functools[] This is just text", "functools[] This is just text", []),
        *(
            (text, text, [])
            for text in (
                'functools[{"name": "weather"}]', 'functools{"name": "weather"}', "functools[ just text ]",
                f"functools[{call('weather', 'Paris')}]", 'functools[{"name": "weather", "arguments": ',
            )
        ),
    ],
    "phi": [(f"<|tool_call|>[{A}, {B}]<|/tool_call|>", "", [("weather", PARIS), ("time", ROME)])],
    "granite": [
        (f"<|tool_call|> [{A}]", "", [("weather", PARIS)]),
        (f"Let me see.\n<|tool_call|>[\n  {A},\n  {B}\n]\nDone.", "Let me see.", [("weather", PARIS), ("time", ROME)]),
        ('<|tool_call|>[{"arguments": {"city": "Paris"}, "name": "weather"}]', "", [("weather", PARIS)]),
    ],
    "hunyuan": [
        (f"I call it. <tool_calls>[{A}, {B}]</tool_calls>\nBye", "I call it.", [("weather", PARIS), ("time", ROME)]),
        (f"<tool_calls>[{call('search', {})}, {B}]</tool_calls>\n", "", [("search", {}), ("time", ROME)]),
    ],
    "qwen3-coder": [
        ("A <function> and <parameter=a>", "A <function> and <parameter=a>", []),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "",
         [("weather", PARIS)]),
        ("<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>"
         "<tool_call>\n<function=time>\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>", "",
         [("weather", PARIS), ("time", ROME)]),
        ("Well.\n\n<tool_call>\n<function=search>\n</function>\n</tool_call>\n\nBye", "Well.", [("search", {})]),
        ("<tool_call>\n<function=search>\n<parameter=text>\na\nb \"c\"\n\n  C:\\n\n</parameter>\n<parameter=days>\n42\n"
         "</parameter>\n<parameter=yes>\nTrue\n</parameter>\n<parameter=none>null</parameter>\n<parameter=list>"
         '["a", {"b": []}]</parameter>\n<parameter=zip>\n007\n</parameter>\n</function>\n</tool_call>', "",
         [("search", {"text": 'a\nb "c"\n\n  C:\\n', "days": 42, "yes": True, "none": None, "list": ["a", {"b": []}],
                      "zip": "007"})]),
        ("<tool_call>\n<function=unknown>\n</function>", "<tool_call>\n<function=unknown>\n</function>", []),
        ("<tool_call><function=></function></tool_call>", "<tool_call><function=></function></tool_call>", []),
        ("<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "",
         [("weather", PARIS)]),
        ("Let me see.\n\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
         "<function=time>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>", "Let me see.",
         [("weather", PARIS), ("time", ROME)]),
        ("<function=search>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n<parameter=city>\nRome\n"
         "</parameter>\n</function>\n</tool_call>", "", [("search", {}), ("time", ROME)]),
        ("Write <function=unknown> here", "Write <function=unknown> here", []),
    ],
    "gemma": [
        ('<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', "", [("weather", PARIS)]),
        ('Hi <|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:time{city: <|"|>Rome<|"|>}',
         "Hi", [("weather", PARIS), ("time", ROME)]),
        ('<|tool_call>call:search{nested:{inner:<|"|>a, }]<|"|>,<|"|>3<|"|>:{}},list:[<|"|>x]<|"|>,[1,true],null],'
         "n:-3.5e2,yes:false,bare:word,none:None}<tool_call|>", "",
         [("search", {"nested": {"inner": "a, }]", "3": {}}, "list": ["x]", [1, True], None], "n": -350.0, "yes": False,
                      "bare": "word", "none": None})]),
        ("<|tool_call>call:search{}<tool_call|>", "", [("search", {})]),
        ("<|tool_call>call:unknown{}<tool_call|>", "<|tool_call>call:unknown{}<tool_call|>", []),
    ],
    "lfm2": [
        ("<|tool_call_start|>[weather(city='Paris')]<|tool_call_end|>", "", [("weather", PARIS)]),
        ('Sure.<|tool_call_start|> [weather(city="Paris"), time(city=\'Rome\')]<|tool_call_end|>\nDone.', "Sure.",
         [("weather", PARIS), ("time", ROME)]),
        ("<|tool_call_start|>[search(name='John \\'D\\' \"Doe\"', age=07, address={'city': 'A', \"b\": [True, None]},"
         " ok=true, no=null, f=-1.5e3, t=('a', 'b'), e={}, l=[], u=\"\\u00e9\\n\")]<|tool_call_end|>", "",
         [("search", {"name": "John 'D' \"Doe\"", "age": 7, "address": {"city": "A", "b": [True, None]}, "ok": True,
                      "no": None, "f": -1500.0, "t": ["a", "b"], "e": {}, "l": [], "u": "é\n"})]),
        ("<|tool_call_start|>[search(), weather(city='grep \"]\" a\nb')]<|tool_call_end|>", "",
         [("search", {}), ("weather", {"city": 'grep "]" a\nb'})]),
        ("<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>", []),
    ],
    "gpt-oss": [
        ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}', "",
         [("weather", PARIS)]),
        ('Hm<|channel|>commentary to=functions.weather<|message|>{"city":"Paris"}', "Hm", [("weather", PARIS)]),
        ('to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', "", [("weather", PARIS)]),
        ('to=functions.weather<|channel|>analysis <|constrain|>json<|message|>{}', "", [("weather", {})]),
    ],
    "glm": [
        ('weather\n{"city": "Paris"}', "", [("weather", PARIS)]),
        ('\nweather \n{"city": "Paris"}\n', "", [("weather", PARIS)]),
        ('weather\n{"city": "Paris"}<|assistant|>time\n{"city": "Rome"}', "", [("weather", PARIS), ("time", ROME)]),
        ('\nI look.<|assistant|>weather\n{"city": "Paris"}', "\nI look.", [("weather", PARIS)]),
        *((text, text, []) for text in (
            "\nHello", "weather", "weather\nis nice", 'weather {"city": 1}', 'It is\nweather\n{"a": 1}', "timely\n{}",
            'rain\n{"a": 1}',
        )),
    ],
}  # fmt: skip
TEXTS = [(name, *case) for name, cases in CASES.items() for case in cases]
EVERYTHING = [
    PARIS,
    {},
    {"text": "", "whole": -42, "real": 3.14e-7, "yes": True, "none": None, "list": ["a", []], "object": {"b": {}}},
    {"quoted": 'She said "}]"', "path": "C:\\new\\", "lines": "one\r\n\ttwo", "characters": "héllo 日本 🎉 \x7f"},
    {"name": "time", "arguments": {"parameters": [{"name": "search", "arguments": {}}]}},
    {"marks": "<tool_call>[TOOL_CALLS]functools[</tool_call>[ARGS]```<|tool_call|><think>"},
]
SPELLINGS = [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}, {"separators": (" , ", " : ")}]
SCHEMAS = {
    "search": {"properties": {"zip": {"type": "string"}}},
    "weather": {"properties": {"city": {"type": "string"}}},
}
"""Of arguments that are texts, whatever they look like."""
WRITTEN = {
    "hermes": lambda calls, how: "\n".join(f"<tool_call>\n{call(*one, **how)}\n</tool_call>" for one in calls),
    "listed": lambda calls, how: f"[TOOL_CALLS] [{', '.join(call(*one, **how) for one in calls)}]",
    "named": lambda calls, how: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(one, **how)}" for name, one in calls),
    "llama": lambda calls, how: "; ".join(call(*one, "parameters", **how) for one in calls),
    "functools": lambda calls, how: f"functools[{','.join(call(*one, **how) for one in calls)}]",
    "phi": lambda calls, how: f"<|tool_call|>[{', '.join(call(*one, **how) for one in calls)}]<|/tool_call|>",
    "granite": lambda calls, how: f"<|tool_call|>[{', '.join(call(*one, **how) for one in calls)}]",
    "hunyuan": lambda calls, how: f"<tool_calls>[{', '.join(call(*one, **how) for one in calls)}]</tool_calls>",
    "qwen3-coder": lambda calls, how: "\n".join(f"<tool_call>\n{tagged(*one, how)}\n</tool_call>" for one in calls),
    "gemma": lambda calls, _: "".join(f"<|tool_call>call:{name}{gemma(one)}<tool_call|>" for name, one in calls),
    "lfm2": lambda calls, how: f"<|tool_call_start|>[{', '.join(python(*one, how) for one in calls)}]<|tool_call_end|>",
    "gpt-oss": lambda calls, how: "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(one, **how)}"
        for name, one in calls
    ),
    "glm": lambda calls, how: "".join(f"<|assistant|>{name}\n{json.dumps(one, **how)}" for name, one in calls),
}
TRANSLATED = ("qwen3-coder", "gemma", "lfm2")
"""Formats whose arguments are no JSON."""


def tagged(name, arguments, how):
    parts = (f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, **how)}\n</parameter>\n"
             for key, value in arguments.items())  # fmt: skip
    return f"<function={name}>\n{''.join(parts)}</function>"


def gemma(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def python(name, arguments, how):
    """As Python writes values, with its own quotation marks or JSON's."""
    write = json.dumps if how else repr
    parts = (f"{key}={write(value) if isinstance(value, str) else repr(value)}" for key, value in arguments.items())
    return f"{name}({', '.join(parts)})"


@pytest.mark.parametrize("name", WRITTEN)
def test_all_arguments_are_read_in_all_spellings(name):
    """One call of each, then all in one answer, with a text before them, and a text behind them."""
    answers = [[("weather", arguments)] for arguments in EVERYTHING]
    answers.append([(NAMES[number % 3], arguments) for number, arguments in enumerate(EVERYTHING)])
    for how in SPELLINGS:
        for calls in answers:
            written = WRITTEN[name](calls, how)
            for text, content in (written, ""), (f"Wait {{a}} …\n{written}\nIs it {{b}}?", "Wait {a} …"):
                check_reading(name, text, content, calls, (1, len(text)))


@pytest.mark.parametrize("name", WRITTEN)
def test_the_ways_in_which_models_write_a_call(name):
    ways = FORMATS[name].written("weather", DEEP)
    assert name in ("lfm2", "glm") or ways[0] == WRITTEN[name]([("weather", DEEP)], {})
    for text in ways:
        check_reading(name, text, "", [("weather", DEEP)], (1, len(text)))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_may_be_cut_anywhere(name):
    """No call is made up, and none that has begun is lost: its arguments are as far as they were written."""
    calls = [("weather", EVERYTHING[3]), ("time", {}), ("search", EVERYTHING[5])]
    text = f"Well.\n{WRITTEN[name](calls, {})}"
    for end in range(len(text) + 1):
        reader = Reader(FORMATS[name], NAMES, 16, schemas=SCHEMAS)
        reader.push(text[:end], is_last=True)
        assert [one.name for one in reader.calls] == [tool for tool, _ in calls][: len(reader.calls)]
        for one, (_, arguments) in zip(reader.calls, calls, strict=False):
            whole = json.dumps(arguments, ensure_ascii=name not in TRANSLATED)
            assert whole.startswith(one.arguments)
            assert one is reader.calls[-1] or one.arguments == whole
        assert reader.content == ("Well." if reader.calls else text[:end])
    assert len(reader.calls) == len(calls)


@pytest.mark.parametrize(("name", "text"), [
    ("qwen3-coder", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
    ("glm", 'weather\n{"city": "Paris"}'),
])  # fmt: skip
def test_a_call_without_its_marker_may_be_cut_anywhere(name, text):
    """In a stream, and at a limit."""
    for before in ("", "\n") if name == "glm" else ("", "Well.\n"):
        for end in range(len(text) + 1):
            for is_cut, pieces in ((False, [before + text[:end], text[end:]]), (True, [*before, *text[:end]])):
                reader = Reader(FORMATS[name], NAMES, 16)
                said = [one for piece in pieces for one in reader.push(piece)] + reader.push("", True, is_cut)
                assert reader.content.strip() == "".join(one.content for one in said).strip() == before.strip()
                assert is_cut or [(one.name, json.loads(one.arguments)) for one in reader.calls] == [("weather", PARIS)]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_beginning_of_a_call_that_a_limit_cuts_is_no_content(name):
    """Wherever the limit is, in one piece and in many, also for the other ways in which models write a call."""
    ways = [*FORMATS[name].written("weather", PARIS), WRITTEN[name]([("weather", PARIS), ("time", {})], {})]
    for before in ("", "\n", "Well.\n"):
        for way in ways[bool(before.strip()) and FORMATS[name].prompt_marks :]:  # behind a text, there is a marker
            for end in range(len(way) + 1):
                for length in (1, 3, 1000):
                    text = before + way[:end]
                    pieces = [text[at : at + length] for at in range(0, len(text), length)]
                    reader = Reader(FORMATS[name], NAMES, 16)
                    said = [one for piece in pieces for one in reader.push(piece)] + reader.push("", True, is_cut=True)
                    assert reader.content.strip() == "".join(one.content for one in said).strip() == before.strip()
    for text in ("", "Well. ", "So:\n", 'See {"name": "Ann', '{"name": "Ann', "{1", "2 ` 3", '{"name": 1'):
        reader = Reader(FORMATS[name], NAMES, 16)
        reader.push(text, True, is_cut=True)
        assert reader.content == text


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
def test_an_answer_is_read_the_same_in_any_pieces(name, text, content, calls):
    check_reading(name, text, content, calls, (1, 2, 3, 5, 8, len(text)))


def check_reading(name, text, content, calls, lengths):
    for length in lengths:
        reader = Reader(FORMATS[name], NAMES, 16, schemas=SCHEMAS)
        said = []
        for begin in range(0, len(text), length):
            said += reader.push(text[begin : begin + length], is_last=begin + length >= len(text))
        assert reader.content == "".join(one.content for one in said) == content
        assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == calls
        for number, one in enumerate(reader.calls):
            parts = [part for part in said if part.call == number]
            assert [part.name for part in parts] == [one.name] + [None] * (len(parts) - 1)
            assert "".join(part.arguments for part in parts) == one.arguments
        assert [part.call for part in said if part.call is not None] == sorted(
            part.call for part in said if part.call is not None
        )


def test_arguments_come_as_they_are_written():
    reader = Reader(FORMATS["hermes"], NAMES, 16)
    assert [one.name for one in reader.push('Well <tool_call>{"name": "weather", "arguments": ')] == [None]
    said = [one for text in ('{"ci', 'ty": "P', 'aris"', "}", "}") for one in reader.push(text)]
    assert [(one.name, one.arguments) for one in said] == [
        ("weather", '{"ci'), (None, 'ty": "P'), (None, 'aris"'), (None, "}"),
    ]  # fmt: skip


def test_a_call_that_is_cut_has_the_beginning_of_its_arguments():
    reader = Reader(FORMATS["hermes"], NAMES, 16)
    reader.push('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', is_last=True)
    assert [(call.name, call.arguments) for call in reader.calls] == [("weather", '{"city": "Pa')]
    reader = Reader(FORMATS["hermes"], NAMES, 16)
    reader.push('<tool_call>\n{"name": "weat', is_last=True)
    assert (reader.content, reader.calls) == ('<tool_call>\n{"name": "weat', [])


def test_an_answer_with_a_form_is_read_as_it_is():
    """Calls come first."""
    for text in (f"[{A}]", f'{{"a": {A}}}', f'{{"a": "<tool_call>{A[1:-1]}"}}', f" x<tool_call>{A}"):
        reader = Reader(FORMATS["hermes"], NAMES, 16, has_form=True)
        said = [one for piece in text for one in reader.push(piece)] + reader.push("", is_last=True)
        assert ("".join(one.content for one in said), reader.calls) == (text, [])
    reader = Reader(FORMATS["hermes"], NAMES, 16, has_form=True)
    reader.push(f" <tool_call>{A}", is_last=True)
    assert [call.name for call in reader.calls] == ["weather"]
    reader = Reader(FORMATS["hermes"], NAMES, 16, has_form=True)
    reader.push(A, is_last=True)
    assert ([call.name for call in reader.calls], reader.content) == (["weather"], "")
    for text in ('{"a": [{"name": "wea', '{"name": "Ann'):
        reader = Reader(FORMATS["hermes"], NAMES, 16, has_form=True)
        reader.push(text, is_last=True, is_cut=True)
        assert reader.content == text


def test_no_more_calls_than_are_allowed():
    reader = Reader(FORMATS["hermes"], NAMES, 1)
    reader.push(f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>", is_last=True)
    assert [call.name for call in reader.calls] == ["weather"]


def test_the_work_grows_with_the_text():
    """Each piece costs as much, also of space and of escaped quotation marks."""
    for text in (" " * 40_000 + "x", "<tool_call>" + call("search", {"q": '"' * 20_000})):
        reader = Reader(FORMATS["hermes"], NAMES, 16)
        for begin in range(0, len(text), 40):
            reader.push(text[begin : begin + 40])
        reader.push("", is_last=True)
        assert len(reader.content) + sum(len(one.arguments) for one in reader.calls) > 40_000


@pytest.mark.parametrize(
    ("template", "name"),
    [(template, FORMATS[name].name) for name, template in TEMPLATES.items()]
    + [("{{ messages }}", None), ("<tool_call>{name}\n<arg_key>", None)],
)
def test_the_template_says_the_format(template, name):
    found = format_of(template)
    assert (None if found is None else found.name) == name
