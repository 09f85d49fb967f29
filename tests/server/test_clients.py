"""Programs that nobody here wrote use the server: a tester of interfaces, OpenAI's types, an evaluation harness."""

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import simple_parse_args_string
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from specbeam.integrations.lm_eval import SpecbeamLM
from tests.conftest import examples
from tests.pages import ROOT, text_of

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "n": 2}
TEXT = {"prompt": "The sky is", "max_tokens": 6}
USAGE = {"stream_options": {"include_usage": True}}


def test_the_described_interface_is_the_real_one(served):
    """Schemathesis makes requests from ``/openapi.json``: no failure of the server, no answer that is not described."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    paths = []
    for found in schema.get_all_operations():
        operation = found.ok()
        paths.append(operation.path)

        @settings(max_examples=examples(), suppress_health_check=[*HealthCheck])
        @given(case=operation.as_strategy())
        def check(case):
            case.validate_response(case.call(), checks=CHECKS)

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/metrics", "/health"} <= {*paths}


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "seed": 1}, ChatCompletionChunk),
        ("chat/completions", CHAT | {"num_beams": 4, "draft": "ngram", **USAGE}, ChatCompletionChunk),
        ("completions", TEXT | {"n": 3, "num_beams": 4, "logprobs": 2, "return_token_ids": True}, Completion),
        ("completions", TEXT | {"temperature": 0, **USAGE}, Completion),
        ("responses", {"input": "Hi", "include": ["message.output_text.logprobs"]}, ResponseStreamEvent),
    ],
)
def test_frames_of_streams_are_those_of_openai(served, path, fields, kind):
    """Each frame alone, by the types of OpenAI's client, which lets wrong ones pass."""
    frame_type, response = TypeAdapter(kind), served.post(f"/v1/{path}", **fields, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = re.findall(r"^data: (.*)\n\n", response.text, re.MULTILINE)
    if kind is not ResponseStreamEvent:
        assert frames.pop() == "[DONE]"
    assert len(frames) > 1  # the pieces of several passes may come together
    for frame in frames:
        if kind is Completion:  # OpenAI's own frames have null here until the last one, and its type has no null
            frame = frame.replace('"finish_reason":null', '"finish_reason":"stop"')
        frame_type.validate_json(frame, strict=True)


def test_the_evaluation_harness_has_the_numbers_and_texts_of_this_process(served, chat_lm):
    """EleutherAI's harness as a client, with the arguments of the page, and on our model for it."""
    arguments = re.search(r"--model_args (\S+)", text_of(ROOT / "docs/server.md"))[1]
    arguments = arguments.replace("NAME", "tiny").replace("http://127.0.0.1:8000", served.url)
    clients = LocalCompletionsAPI(**simple_parse_args_string(arguments), batch_size=4), SpecbeamLM(chat_lm)
    scored = [("The sky", " is blue"), ("The sky", " is green"), ("Water", " boils"), ("One, two,", " three")]
    requests = [Instance("loglikelihood", {}, one, 0) for one in [*scored, ("a", "b")]]
    remote, local = (client.loglikelihood(requests, disable_tqdm=True) for client in clients)
    assert [score for score, _ in remote] == pytest.approx([score for score, _ in local], abs=1e-6)
    assert [greedy for _, greedy in remote] == [greedy for _, greedy in local]

    def texts(client):
        how = {"until": ["z", "\n"], "max_gen_toks": 12, "do_sample": False}
        requests = [Instance("generate_until", {}, (text, dict(how)), 0) for text in ("The sky", "One, two", "Water")]
        return client.generate_until(requests, disable_tqdm=True)

    assert texts(clients[0]) == texts(clients[1])
