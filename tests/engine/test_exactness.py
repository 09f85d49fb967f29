"""What an engine does besides a request changes no bit of it, and neither does anything that only saves time.

:mod:`tests.cases` draws models, options, drafts, constraints, limits, clocks, passes that fail, and requests that come,
go, are read, and go on from earlier texts.
"""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cases import Models, draw_case, prompt_of, run_case, write_models
from tests.conftest import examples, torch
from tests.engine.conftest import assert_memory_is_within_its_limit, assert_nothing_is_held


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    write_models(folder := tmp_path_factory.mktemp("models"))
    return Models(folder)


STEP_BY_STEP = {"stop_strings": ["a stop string that no text has"]}
"""It is looked for after each token, so no pass goes ahead."""


def alone(case, request, prompt, **limits):
    """A case of one request that evaluates all of its nodes, one after the other and step by step."""
    options = {name: value for name, value in request["options"].items() if "draft" not in name and name != "trace"}
    options |= {"share_prefix": False} | ({"bound_rule": False} if options.get("num_beams", 1) > 1 else {})
    plain = {"prompt": prompt, "limit": request.get("limit", {}), "options": STEP_BY_STEP | options}
    changes = {"limits": limits, "costs": None, "preempts": False}
    return case | changes | {"requests": [plain | {"draft": None, "rounds": 0}]}


FEW_TOKENS = {
    "model": "llama, confident",
    "format": "float32",
    "limits": {"max_batch_tokens": 7, "max_cache_tokens": 172},
    "costs": None,
    "requests": 2
    * [
        {
            "prompt": [*range(2, 10)],
            "options": {"num_beams": 8, "max_new_tokens": 14, "min_new_tokens": 13, "do_sample": True, "seed": 28}
            | {"num_draft_tokens": 2, "draft_width": 4},
            "draft": "itself",
            "limit": {"few": 1},
            "rounds": 0,
        }
    ],
}
"""The second request is preempted. Then its beams have the same tokens, and two nodes get one cached slot."""


def can_run(case):
    return torch is not None or case["format"] not in ("torch", "transformers")


@settings(max_examples=examples(6))
@given(case=st.integers(0, 10**9).map(lambda seed: draw_case(seed, 0)).filter(can_run))
@example(case=FEW_TOKENS)
def test_whatever_saves_time_or_memory_and_whatever_else_happens_changes_no_bit(models, case):
    """A request is refused for its length where the plain method is. Every other one finishes, with its result."""
    checks = {"stepped": assert_memory_is_within_its_limit, "ended": assert_nothing_is_held}
    outcomes = run_case(case, models, **checks)
    for number, (request, outcome) in enumerate(zip(case["requests"], outcomes, strict=True)):
        if "cancel" in request or "timeout" in request or outcome == {"broken": True}:
            continue
        if "text cannot bridge" in outcome.get("message", ""):
            assert request["draft"] in ("other vocabulary", "sibling of 6")
            continue
        limits = {}
        if refused := re.search(r"need (\d+) cache slots, the engine has (\d+)", outcome.get("message", "")):
            assert int(refused[1]) > int(refused[2]) == case["limits"]["max_cache_tokens"]
            limits = {name: case["limits"][name] for name in ("max_cache_tokens", "max_batch_tokens")}
        plain = alone(case, request, prompt_of(case, number, outcomes), **limits)
        (expected,) = run_case(plain, models)
        assert outcome == expected | ({"broken": True} if "broken" in outcome else {})
