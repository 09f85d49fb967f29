"""Programs that nobody here wrote use the server: a tester of interfaces, an evaluation harness."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from specbeam.integrations.lm_eval import SpecbeamLM
from tests.conftest import examples

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


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


@pytest.fixture
def harness(served, chat_lm):
    """EleutherAI's harness as a client, and in the process."""
    client = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions",
        model="tiny",
        tokenizer=str(chat_lm.source),
        tokenizer_backend="huggingface",
        max_length=256,
        batch_size=4,
    )
    return client, SpecbeamLM(chat_lm, batch_size=4)


def test_log_likelihoods_of_the_harness(harness):
    texts = [
        ("The sky", " is blue"),
        ("The sky", " is green"),
        ("Water", " boils"),
        ("One, two,", " three"),
        ("a", "b"),
    ]
    remote, local = (
        one.loglikelihood([Instance("loglikelihood", {}, text, 0) for text in texts], disable_tqdm=True)
        for one in harness
    )
    assert [score for score, _ in remote] == pytest.approx([score for score, _ in local], abs=1e-6)
    assert [greedy for _, greedy in remote] == [greedy for _, greedy in local]


def test_texts_of_the_harness(harness):
    how = {"until": ["z", "\n"], "max_gen_toks": 12, "do_sample": False}
    texts = [(text, dict(how)) for text in ("The sky", "One, two", "Water")]
    remote, local = (
        one.generate_until(
            [Instance("generate_until", {}, (text, dict(how)), 0) for text, how in texts], disable_tqdm=True
        )
        for one in harness
    )
    assert remote == local
