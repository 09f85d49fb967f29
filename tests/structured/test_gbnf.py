"""llama.cpp's grammars: against the listed languages of their rules, and what must be refused in their words."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from specbeam import Grammar, SpecbeamError
from specbeam.structured import trials
from tests.conftest import examples

LONGEST = 5
BYTES = LLTokenizer("byte")


def allows(grammar, texts):
    """Which of some texts a grammar allows."""
    limits = trials.limits(grammar.lexer_fuel, grammar.max_symbols)
    start = LLMatcher(BYTES, grammar.text, log_level=0, limits=limits)
    allowed = set()
    for text in texts:
        matcher, written = start.deep_copy(), [*text.encode()]
        if matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting():
            allowed.add(text)
    return allowed


TAKEN = {
    'root ::= ("ab"+)?': "(ab+)?|(ab)*",
    'root ::= (("ab")+)?': "(ab)*",
    "root ::= ([ab]?)*": "[ab]*",
    'root ::= (("a" "b")+)*': "(ab)*",
    'root ::= (x+)? "c"\nx ::= "a"': "a*c",
    'root ::= "a"\n     | "b"': "a|b",
    'root ::= (\n  "a" |\n  "b"\n)': "a|b",
    'root ::= "a" |\n  "b"': "a|b",
    'root ::= | "a"': "a?",
    'root ::=\n  "a"  # a comment | "b"\n  | "c"': "a|c",
    "root ::= [a-c\\-]": "[a-c-]",
    "root ::= [\\-a]": "[a-]",
    "root ::= [a-]": "[a-]",
    "root ::= [a\\]b]": "[ab\\]]",
    "root ::= [^\\n]{1,3}": "[^\n]{1,3}",
    'root ::= "a"{2}': "aa",
    'root ::= "a"{0,2} "b"': "a{0,2}b",
    'root ::= "a"{,2} "b"': "a{0,2}b",
    'root ::= "a"{2,}': "a{2,}",
    'root ::= ("a"){0}"b"': "b",
    'root ::= "a" ""': "a",
    'ROOT ::= "a"\nroot ::= ROOT': "a",
    "root  ::=   \"a\"   # c": "a",
    'root ::= "a"\r\n': "a",
    'root ::= "a"\r\n  | b-c\r\nb-c ::= .': "a|[^€]",
    'root ::= "ab"+ "c"': "(ab)+c",
    'root ::= ("a" | "ab") ("bc" | "c")': "abc|abbc|ac",
    'root ::= "a" root? "b"': "ab|aabb",
    'root ::= root "a" | "b"': "ba*",
}  # fmt: skip


@pytest.mark.parametrize("source", TAKEN)
def test_what_llama_cpp_documents_is_taken(source):
    texts = ["".join(some) for n in range(LONGEST) for some in itertools.product("abc-]\n", repeat=n)]
    expected = {text for text in texts if re.fullmatch(TAKEN[source], text)}
    if source == 'root ::= ("ab"+)?':  # a quantifier repeats the whole text before it
        expected = {text for text in texts if re.fullmatch("(ab)*", text)}
    assert allows(Grammar(source), texts) == expected


def test_escapes_have_as_many_digits_as_llama_cpp_reads():
    source = r'root ::= "\x41\u0041bcd\U0001F600\n\"\\\[" [\x61-\x62]'
    assert allows(Grammar(source), ['AAbcd😀\n"\\[a', 'AAbcd😀\n"\\[b', "䆼d"]) == {'AAbcd😀\n"\\[a', 'AAbcd😀\n"\\[b'}
    assert allows(Grammar('root ::= "é€" [ä-ü]'), ["é€ö", "é€a"]) == {"é€ö"}


JSON_GRAMMAR = r'''
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
'''  # fmt: skip
"""llama.cpp's ``grammars/json.gbnf``."""


def test_llama_cpps_grammar_of_json():
    right = ['{}', '{"a": [1, -2.5e+7, true, {"b":null}],\n "c\\u00e9\\"":"x, y"}', '{"a":"}"}\n']  # fmt: skip
    wrong = ["", "[1]", '{"a":01}', '{"a":"\t"}', '{"a" 1}', '{"a":1,}', '{"a":tru}']
    assert allows(Grammar(JSON_GRAMMAR), right + wrong) == {*right}


REFUSED = {
    'root ::= "a': 'line 1: a " at the end of a text is missing',
    'root ::= b\n\nb ::= c | "a"': "line 3: the rule c is not defined",
    'main ::= "a"': "has no rule root",
    'root ::= "a"\nroot ::= "b"': "line 2: the rule root is defined twice",
    'root ::= ("a"': "line 1: a ) is missing",
    'root ::= "a")': "line 1: ')' is not expected here",
    "root ::= [a": "line 1: a ] is missing",
    "root ::= [z-a]": "line 1: the range z-a ends before it begins",
    'root ::= "\\u41"': "line 1: \\u needs 4 hexadecimal digits",
    'root ::= "\\ud800"': "line 1: \\ud800 is no character",
    'root ::= "a"\nb ::= "\\q"': "line 2: \\q is no escape",
    'root ::= "a"{a}': "line 1: repetitions are written as {2}, {2,} or {2,5}",
    'root ::= "a"{3,2}': "line 1: {3,2} is no number of repetitions",
    f'root ::= "a"{{1,{"9" * 5000}}}': "line 1: a part is repeated more than 100,000 times",
    "root ::= *": "line 1: * has nothing before it that it repeats",
    "root ::= <think>": "line 1: tokens in <...> are not supported",
    f'root ::= {"(" * 5000}"a"{")" * 5000}': "line 1: there are more than 100 parentheses within each other",
    'root ::= "a"\n"b"': "line 2: there should be a rule",
    "root ::= root": "no text satisfies the grammar",
    "root ::= []": "no text satisfies the grammar",
}


@pytest.mark.parametrize("source", REFUSED)
def test_errors_are_about_the_source(source):
    with pytest.raises(SpecbeamError, match=re.escape(REFUSED[source])) as refused:
        Grammar(source)
    assert "start:" not in str(refused.value)


@st.composite
def parts(draw, names, depth=0):
    """A part of a rule: its source, and a function that lists its texts by the texts of the rules."""
    kind = draw(st.sampled_from(["text", "set", "rule", "group", "repeated"] if depth < 3 else ["text", "set", "rule"]))
    if kind == "text":
        text = draw(st.text("abc", max_size=3))
        return f'"{text}"', lambda _: {text}
    if kind == "set":
        letters, negated = draw(st.sets(st.sampled_from("abc"), min_size=1)), draw(st.booleans())
        some = {*"abc"} - letters if negated else letters
        return f"[{'^' * negated}{''.join(sorted(letters))}]", lambda _: some
    if kind == "rule":
        name = draw(st.sampled_from(names))
        return name, lambda rules: rules[name]
    if kind == "group":
        source, texts = draw(alternatives(names, depth + 1))
        return f"({source})", texts
    source, texts = draw(parts(names, depth + 1))
    least, most = draw(st.sampled_from([(0, 1), (0, LONGEST), (1, LONGEST), (2, 2), (1, 3), (2, LONGEST)]))
    written = {(0, 1): "?", (0, LONGEST): "*", (1, LONGEST): "+", (2, 2): "{2}", (1, 3): "{1,3}"}
    if source[-1] in "?*+}":
        source = f"({source})"
    return source + written.get((least, most), "{2,}"), lambda rules: repeated(texts(rules), least, most)


@st.composite
def alternatives(draw, names, depth=0):
    options = [draw(st.lists(parts(names, depth), max_size=3)) for _ in range(draw(st.integers(1, 3)))]
    source = " | ".join(" ".join(part for part, _ in some) or '""' for some in options)
    return source, lambda rules: {text for some in options for text in joined([texts(rules) for _, texts in some])}


def joined(languages):
    found = {""}
    for language in languages:
        found = {a + b for a in found for b in language if len(a + b) <= LONGEST}
    return found


def repeated(language, least, most):
    return {text for n in range(least, most + 1) for text in joined([language] * n)}


@settings(max_examples=examples(2))
@given(st.data())
def test_random_grammars_allow_the_texts_of_their_rules(data):
    names = ["root", "x", "y-z"][: data.draw(st.integers(1, 3))]
    rules = {name: data.draw(alternatives(names)) for name in names}
    source = "\n".join(f"{name} ::= {text}" for name, (text, _) in rules.items())
    languages = {name: set() for name in names}
    for _ in range(40):  # until nothing is added
        languages = {name: texts(languages) for name, (_, texts) in rules.items()}
    every = ["".join(some) for n in range(LONGEST + 1) for some in itertools.product("abc", repeat=n)]
    try:
        grammar = Grammar(source)
    except SpecbeamError:
        assert not languages["root"]
        return
    found = allows(grammar, every)
    assert found <= languages["root"]
    is_recursive = any(re.search(rf"(?<![\w-]){name}(?![\w-])", text) for name in names for text, _ in rules.values())
    if not (is_recursive and "^" in source and re.search("[*+{]", source)):  # repeated large sets
        assert found == languages["root"]
