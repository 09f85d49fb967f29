"""What an engine does besides a request changes no bit of it, and neither does anything that only saves time.

:mod:`tests.cases` draws models, options, drafts, constraints, limits, and requests that come, go and are read.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cases import Models, draw_case, run_case, write_models
from tests.conftest import examples, torch
from tests.engine.conftest import assert_nothing_is_held


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    write_models(folder := tmp_path_factory.mktemp("models"))
    return Models(folder)


def alone(case, request):
    """A case of one request that evaluates all of its nodes, one after the other."""
    options = {name: value for name, value in request["options"].items() if "draft" not in name and name != "trace"}
    options |= {"share_prefix": False} | ({"bound_rule": False} if options.get("num_beams", 1) > 1 else {})
    plain = {"prompt": request["prompt"], "limit": request.get("limit", {}), "options": options}
    return case | {"limits": {}, "costs": None, "requests": [plain | {"draft": None, "rounds": 0}]}


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


@settings(max_examples=examples(4))
@given(case=st.integers(0, 10**9).map(lambda seed: draw_case(seed, 0)).filter(can_run))
@example(case=FEW_TOKENS)
def test_drafts_deferred_beams_prefixes_preemption_batch_and_order_change_no_bit(models, case):
    outcomes = run_case(case, models, ended=assert_nothing_is_held)
    for request, outcome in zip(case["requests"], outcomes, strict=True):
        if "cancel" in request or "timeout" in request:
            continue
        if "text cannot bridge" in outcome.get("message", ""):
            assert request["draft"] in ("other vocabulary", "sibling of 6")
            continue
        assert [outcome] == run_case(alone(case, request), models)
