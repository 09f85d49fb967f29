"""Anthropic's and ollama's own clients: the same texts and calls as from chat completions, in their words."""

import json

import anthropic
import jsonschema
import ollama
import pytest
from tokenizers import AddedToken

import specbeam
from specbeam.server.limits import Access
from tests.conftest import byte_tokenizer, random_model
from tests.server.conftest import serving
from tests.server.test_tools import TOOLS, WEATHER
from tests.structured.tools.templates import TEMPLATES, TOKENS

CHAT, NAME = "/v1/chat/completions", "hermes"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
GREEDY = {"extra_body": {"temperature": 0}}
ANTHROPIC_TOOLS = [
    {"name": tool["function"]["name"], "description": tool["function"]["description"], "input_schema": schema}
    for tool, schema in zip(TOOLS, (WEATHER, {"type": "object", "properties": {}}), strict=True)
]
OPENAI_TOOLS = [
    TOOLS[0],
    {"type": "function", "function": TOOLS[1]["function"] | {"parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def lm(save):
    """A tiny model whose template has tools."""
    tokenizer = byte_tokenizer(TEMPLATES[NAME])
    tokenizer.add_tokens([AddedToken(text, special=special) for text, special in TOKENS[NAME].items()])
    model = random_model("llama", vocab_size=259 + len(TOKENS[NAME]), max_position_embeddings=4096)
    return specbeam.load(save(model, tokenizer), backend="cpu")


@pytest.fixture(scope="module")
def server(lm, plain_lm):
    with serving({NAME: lm, "plain": plain_lm}) as running:
        yield running


@pytest.fixture(scope="module")
def messages(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    return client.messages


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(host=server.url)


def text_of(server, **fields):
    (choice,) = server.choices(CHAT, model=NAME, temperature=0, **fields)
    return choice["message"]["content"]


def test_messages(server, messages):
    asked = {
        "model": NAME,
        "max_tokens": 20,
        **GREEDY,
        "messages": HI,
        "system": [{"type": "text", "text": "A"}],
    }
    expected = text_of(server, messages=[{"role": "system", "content": "A"}, *HI], max_tokens=20)
    answer = messages.create(**asked, metadata={"user_id": "a"}, thinking={"type": "disabled"})
    assert [block.text for block in answer.content] == [expected]
    assert (answer.stop_reason, answer.role, answer.model) == ("max_tokens", "assistant", NAME)
    usage = answer.usage
    counted = messages.count_tokens(model=NAME, messages=HI, system="A").input_tokens
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (counted, 20)
    with messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        last = stream.get_final_message()
    assert ([block.text for block in last.content], last.stop_reason) == ([expected], "max_tokens")
    assert last.usage.output_tokens == 20
    stop = expected[3:5]
    ended = messages.create(**asked, stop_sequences=["nowhere", stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in ended.content) == expected[: expected.index(stop)]


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_of_messages(server, messages, lm, is_stream):
    asked = {"model": NAME, "max_tokens": 400, **GREEDY, "messages": HI, "tools": ANTHROPIC_TOOLS}
    one = {"type": "any", "disable_parallel_tool_use": True}
    if is_stream:
        with messages.stream(**asked, tool_choice=one) as stream:
            answer = stream.get_final_message()
    else:
        answer = messages.create(**asked, tool_choice=one)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    expected = server.choices(
        CHAT,
        model=NAME,
        messages=HI,
        tools=OPENAI_TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    (function,) = [one["function"] for one in expected[0]["message"]["tool_calls"]]
    assert (answer.stop_reason, call.name, call.input) == (
        "tool_use",
        function["name"],
        json.loads(function["arguments"]),
    )
    named = messages.create(**asked, tool_choice={"type": "tool", "name": "weather"}).content[-1]
    jsonschema.validate(named.input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    history = [
        *HI,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
    ]
    text = (
        messages.create(**asked | {"messages": history, "max_tokens": 5}, tool_choice={"type": "none"}).content[0].text
    )
    calls = [{"id": call.id, "type": "function", "function": function}]
    said = "".join(block.text for block in answer.content if block.type == "text")
    assert text == text_of(
        server,
        messages=[
            *HI,
            {"role": "assistant", "content": said, "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": "sun"},
            {"role": "user", "content": "And?"},
        ],
        tools=OPENAI_TOOLS,
        tool_choice="none",
        max_tokens=5,
    )


def test_structured_messages(messages):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = messages.create(model=NAME, max_tokens=50, messages=HI, output_config=form)
    jsonschema.validate(json.loads(answer.content[0].text), SCHEMA)


def test_errors_of_messages(messages):
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'") as missing:
        messages.create(model="other", max_tokens=5, messages=HI)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="foo, bar are not supported"):
        messages.create(model=NAME, max_tokens=5, messages=HI, extra_body={"foo": 1, "bar": 2})
    with pytest.raises(anthropic.BadRequestError, match="no chat template"):
        messages.create(model="plain", max_tokens=5, messages=HI)
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="'image' is not supported, because specbeam reads text only"):
        messages.create(model=NAME, max_tokens=5, messages=image)


def test_the_key_of_anthropics_client(start, plain_lm):
    with start({"plain": plain_lm}, access=Access(api_keys=("secret",))) as locked:
        for key, error in (("secret", anthropic.BadRequestError), ("wrong", anthropic.AuthenticationError)):
            client = anthropic.Anthropic(base_url=locked.url, api_key=key, max_retries=0)
            with pytest.raises(error, match="no chat template" if key == "secret" else "API key"):
                client.messages.count_tokens(model="plain", messages=HI)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_of_ollama(server, client, stream):
    messages = [{"role": "system", "content": "A"}, *HI]
    options = {"num_predict": 20, "temperature": 0, "num_ctx": 2048, "num_gpu": 1, "seed": 3, "repeat_penalty": 1.0}
    asked = {"model": f"{NAME}:latest", "messages": messages, "options": options, "keep_alive": "5m", "think": False}
    answers = client.chat(**asked, stream=True) if stream else [client.chat(**asked)]
    *_, last = answers = [*answers]
    assert "".join(one.message.content for one in answers) == text_of(server, messages=messages, max_tokens=20)
    assert (last.done, last.done_reason, last.eval_count, last.model) == (True, "length", 20, NAME)
    assert last.prompt_eval_count == len(server.tokens(model=NAME, messages=messages))
    assert 0 < last.eval_duration < last.total_duration


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_forms_of_ollama(server, client, lm, stream):
    how = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    options = how | {"num_predict": 400}
    answer = client.chat(NAME, HI, tools=TOOLS[1:], options=options, stream=stream)
    answers = [*answer] if stream else [answer]
    (call,) = [call for one in answers for call in one.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments, answers[-1].done_reason) == ("now", {}, "stop")
    called = [one.message for one in answers if one.message.tool_calls]
    history = [*HI, *called, {"role": "tool", "tool_name": "now", "content": "noon"}]
    assert client.chat(NAME, history, options={"num_predict": 3}).done_reason == "length"
    # The client leaves out parts of a schema, such as "maximum".
    asked = {"model": NAME, "messages": HI, "tools": TOOLS}
    lines = server.post("/api/chat", **asked, options=options, stream=stream).text.splitlines()
    (call,) = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
    (expected,) = server.choices(CHAT, **asked, **how, max_tokens=400)
    function = expected["message"]["tool_calls"][0]["function"]
    assert call["function"] == function | {"arguments": json.loads(function["arguments"])}
    for form, schema in ((SCHEMA, SCHEMA), ("json", {"type": "object"})):
        parts = client.generate(NAME, "Hi", format=form, options={"num_predict": 300, "temperature": 0}, stream=stream)
        text = "".join(part.response for part in (parts if stream else [parts]))
        if form == SCHEMA:
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("stream", [False, True])
def test_generate_of_ollama(server, client, stream):
    how = {"options": {"num_predict": 9, "temperature": 0}, "stream": stream}

    def text(*given, **more):
        parts = client.generate(*given, **how, **more)
        *_, last = parts = [*parts] if stream else [parts]
        assert (last.done, last.eval_count) == (True, 9)
        return "".join(part.response for part in parts)

    assert text(NAME, "Hi") == text_of(server, messages=HI, max_tokens=9)
    system = [{"role": "system", "content": "A"}, *HI]
    assert text(NAME, "Hi", system="A") == text_of(server, messages=system, max_tokens=9)
    for name in (NAME, "plain"):
        (raw,) = server.choices(model=name, prompt="Hi", max_tokens=9, temperature=0)
        assert text(name, "Hi", raw=True) == raw["text"]
    assert text("plain", "Hi") == raw["text"]  # without a chat template


def test_models_of_ollama(server, client):
    assert [model.model for model in client.list().models] == [NAME, "plain"]
    assert [model.model for model in client.ps().models] == [NAME, "plain"]
    assert client.show(NAME).capabilities == ["completion", "tools"]
    assert server.http.get("/api/version").json() == {"version": specbeam.__version__}


def test_errors_of_ollama(client):
    with pytest.raises(ollama.ResponseError, match="no model 'other'") as missing:
        client.chat("other", HI)
    assert missing.value.status_code == 404
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="mirostat: Input should be 0; repeat_penalty is not supported"):
            [*client.generate(NAME, "Hi", options={"mirostat": 2, "repeat_penalty": 1.1}, stream=stream)]
    with pytest.raises(ollama.ResponseError, match="options: n, trace cannot be there"):
        client.chat(NAME, HI, options={"n": 2, "trace": True})
    with pytest.raises(ollama.ResponseError, match="answers no call before it"):
        client.chat(NAME, [*HI, {"role": "tool", "content": "a", "tool_name": "now"}])
    with pytest.raises(ollama.ResponseError, match="images: not supported, because specbeam reads text only"):
        client.chat(NAME, [HI[0] | {"images": [b"a"]}])
