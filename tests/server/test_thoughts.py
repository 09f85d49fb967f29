"""Thoughts over HTTP: apart from the answer, in every endpoint and stream, and in no form that is asked for."""

import json

import anthropic
import ollama
import pytest
from tokenizers import AddedToken

import specbeam
from tests.conftest import byte_tokenizer, random_model
from tests.server.conftest import serving
from tests.server.test_tools import FLAT, NAMED, RESPONSES, TOOLS, checked
from tests.structured.tools.templates import HERMES, TOKENS

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
OPENED = "{% if add_generation_prompt %}<assistant>"
TEMPLATES = {
    # The model opens its thoughts, or the template does. It reads them in the last turn.
    "think": HERMES.replace("{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
                            "{% endif %}{{ m.content }}").replace(
        OPENED, f"{OPENED}{{% if enable_thinking is false %}}<think>\n\n</think>\n\n{{% else %}}<think>\n{{% endif %}}"
    ),
    "gpt-oss": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{{ reasoning_effort }}<|start|>assistant{# <|channel|>analysis<|message|> <|channel|>final<|message|> #}",
}  # fmt: skip
MARKS = {
    "think": TOKENS["hermes"] | {"<think>": False, "</think>": False},
    "gpt-oss": {"<|channel|>": True, "<|message|>": True, "<|start|>": True, "<|end|>": True},
}


@pytest.fixture(scope="module")
def lms(save):
    made = {}
    for name, template in TEMPLATES.items():
        tokenizer = byte_tokenizer(template)
        tokenizer.add_tokens([AddedToken(text, special=special) for text, special in MARKS[name].items()])
        model = random_model("llama", vocab_size=259 + len(MARKS[name]), max_position_embeddings=4096)
        made[name] = specbeam.load(save(model, tokenizer), backend="cpu")
    return made


@pytest.fixture(scope="module")
def server(lms, chat_lm):
    with serving({**lms, "plain": chat_lm}) as running:
        yield running


@pytest.fixture(scope="module")
def pushed(lms):
    """Biases that are far from all logits, for a letter and for the end of thoughts: so a random model thinks a while.

    The temperature makes both about as likely.
    """
    tokenizer = lms["think"].tokenizer
    letter, end = tokenizer.convert_tokens_to_ids(["w", "</think>"])
    biases = {str(letter): 5000, str(end): 4800}
    return {"model": "think", "logit_bias": biases, "seed": 5, "temperature": 100.0, "repetition_penalty": 1}


def is_thought(text):
    return bool(text) and {*text} == {"w"}


def test_a_form_holds_behind_the_thoughts(server, pushed):
    asked = {"messages": HI, "response_format": FORM, "max_tokens": 200}
    for choice in server.choices(CHAT, **pushed, **asked, n=2):
        message = choice["message"]
        assert is_thought(message["reasoning_content"])
        assert message["reasoning"] == message["reasoning_content"]
        assert json.loads(message["content"]) in ({"a": 1}, {"a": 2})
        assert choice["finish_reason"] == "stop"
    ending = {"model": "think", "logit_bias": {[*pushed["logit_bias"]][1]: 5000}, "temperature": 0}
    texts = [choice["message"]["content"] for choice in server.choices(CHAT, **ending, **asked, num_beams=3, n=2)]
    assert sorted(texts) == ['{"a": 1}', '{"a": 2}']


def test_a_stream_has_the_thoughts_before_the_content(server, pushed):
    (whole,) = server.choices(CHAT, **pushed, messages=HI, response_format=FORM, max_tokens=200)
    asked = {"model": "think", "messages": HI, "max_tokens": 200, "stream": True, "response_format": FORM}
    stream = server.client().chat.completions.create(**asked, extra_body=pushed)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert "".join(thoughts) == whole["message"]["reasoning_content"]
    assert "".join(contents) == whole["message"]["content"]
    assert not any(contents[: max(at for at, text in enumerate(thoughts) if text)])


def test_usage_counts_the_tokens_of_thoughts(server, pushed):
    """As many as there are letters, and the end; the prompt has the beginning."""
    asked = {"messages": HI, "response_format": FORM, "max_tokens": 200, "n": 2}
    whole = server.post(CHAT, **pushed, **asked).json()
    written = [len(choice["message"]["reasoning_content"]) + 1 for choice in whole["choices"]]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": sum(written)}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    (*_, last) = server.client().chat.completions.create(**{**asked, **stream, "model": "think"}, extra_body=pushed)
    assert last.usage.completion_tokens_details.reasoning_tokens == sum(written)
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    response = server.post(RESPONSES, **pushed, input="Hi", text=text, max_output_tokens=200).json()
    count = len(response["output"][0]["content"][0]["text"]) + 1
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    plain = server.post(CHAT, model="plain", messages=HI, max_tokens=3).json()
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_answer_that_is_cut_within_thoughts(server, pushed):
    asked = pushed | {"logit_bias": {next(iter(pushed["logit_bias"])): 5000}, "messages": HI, "max_tokens": 9}
    for form in ({}, {"response_format": FORM}):
        (choice,) = server.choices(CHAT, **asked, **form)
        assert is_thought(choice["message"]["reasoning_content"])
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_calls_come_behind_thoughts(server, pushed):
    asked = {"messages": HI, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 400, "n": 3}
    messages = [choice["message"] for choice in server.choices(CHAT, **pushed, **asked)]
    assert any(is_thought(message.get("reasoning_content")) for message in messages)
    for message in messages:
        checked(message, NAMED)
    flat = {"type": "function", "name": "weather"}
    asked = {**pushed, "input": "Hi", "tools": FLAT, "tool_choice": flat, "max_output_tokens": 400}
    outputs = [server.post(RESPONSES, **asked | {"seed": seed}).json()["output"] for seed in range(3)]
    thoughts = [output[0]["content"][0]["text"] for output in outputs if output[0]["type"] == "reasoning"]
    assert thoughts
    assert all(map(is_thought, thoughts))
    assert {output[-1]["type"] for output in outputs} == {"function_call"}


def test_responses_have_an_item_for_thoughts(server, pushed):
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    asked = {"model": "think", "input": "Hi", "text": text, "max_output_tokens": 200, "extra_body": pushed}
    client = server.client()
    response = client.responses.create(**asked)
    thoughts, message = response.output
    assert (thoughts.type, is_thought(thoughts.content[0].text)) == ("reasoning", True)
    assert json.loads(message.content[0].text) in ({"a": 1}, {"a": 2})
    with client.responses.stream(**asked) as stream:
        events = [*stream]
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert said == thoughts.content[0].text
    assert events[-1].response.output_text == response.output_text
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks_of_anthropic(server, stream):
    """Its requests have no biases, so a random model thinks until it is cut."""
    messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    asked = {"model": "think", "max_tokens": 20, "messages": HI, "extra_body": {"temperature": 0}}
    (expected,) = server.choices(CHAT, model="think", messages=HI, max_tokens=20, temperature=0)
    if stream:
        with messages.stream(**asked) as events:
            (thinking,) = events.get_final_message().content
    else:
        (thinking,) = messages.create(**asked).content
    assert (thinking.type, thinking.thinking) == ("thinking", expected["message"]["reasoning_content"])
    off = messages.create(**asked, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_of_ollama(server, pushed, stream):
    client = ollama.Client(host=server.url)
    options = {key: value for key, value in pushed.items() if key != "model"} | {"num_predict": 200}
    parts = client.chat("think", HI, format=SCHEMA, options=options, stream=stream)
    parts = [*parts] if stream else [parts]
    assert is_thought("".join(part.message.thinking or "" for part in parts))
    assert json.loads("".join(part.message.content for part in parts)) in ({"a": 1}, {"a": 2})
    parts = client.generate("think", "Hi", options=options, stream=stream)
    assert is_thought("".join(part.thinking or "" for part in ([*parts] if stream else [parts])))
    silent = client.chat("think", HI, options=options, think=False)
    assert not silent.message.thinking
    assert "thinking" in server.post("/api/show", model="think").json()["capabilities"]


def test_whether_and_how_much_a_model_thinks(server, lms):
    def prompt(model="think", **fields):
        answer = server.post(CHAT, model=model, messages=HI, max_tokens=1, return_token_ids=True, **fields).json()
        return lms[model].decode_token(answer["prompt_token_ids"]), answer.get("ignored_fields")

    on, off = (f"<user>Hi<eos><assistant><think>\n{end}" for end in ("", "\n</think>\n\n"))
    for fields, expected in [
        ({}, on),
        ({"chat_template_kwargs": {"enable_thinking": False}}, off),
        ({"reasoning_effort": "none"}, off),
        ({"reasoning_effort": "high"}, on),
    ]:
        assert prompt(**fields) == (expected, None)
    text, ignored = prompt("gpt-oss", reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert "high<|start|>" in text
    assert ignored == ["enable_thinking"]
    answer = server.post(CHAT, model="plain", messages=HI, max_tokens=1, reasoning_effort="low").json()
    assert answer["ignored_fields"] == ["reasoning_effort"]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_that_are_given_back(server, lms, field):
    said = [*HI, {"role": "assistant", "content": "Ho", field: "Hm"}, *HI]
    fields = {"model": "think", "messages": said, "max_tokens": 1, "return_token_ids": True}
    ids = server.post(CHAT, **fields).json()["prompt_token_ids"]
    assert "<assistant><think>Hm</think>Ho<eos>" in lms["think"].decode_token(ids)


def test_channels(server, lms):
    """gpt-oss: an answer of a form is in the channel "final", and special tokens are no text."""
    tokenizer = lms["gpt-oss"].tokenizer
    channel, final = tokenizer.convert_tokens_to_ids(["<|channel|>", "f"])
    bias = {str(channel): 5000, str(final): 4000}
    asked = {"model": "gpt-oss", "messages": HI, "response_format": FORM, "logit_bias": bias, "temperature": 0}
    (choice,) = server.choices(CHAT, **asked, max_tokens=200, return_token_ids=True)
    assert lms["gpt-oss"].decode_token(choice["token_ids"]).startswith("<|channel|>final<|message|>{")
    assert json.loads(choice["message"]["content"]) in ({"a": 1}, {"a": 2})
    (free,) = server.choices(CHAT, **{**asked, "response_format": {"type": "text"}}, max_tokens=3)
    assert free["message"]["content"] == "<|channel|>" * 3  # no channel has a name
