"""What an engine does besides a request changes no bit of it, and neither does anything that only saves time.

:mod:`tests.cases` draws models, options, drafts, constraints, limits, and requests that come, go and are read.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Models, draw_case, run_case, write_models
from tests.conftest import examples


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


@settings(max_examples=examples(4))
@given(seed=st.integers(0, 10**9))
def test_drafts_deferred_beams_prefixes_preemption_batch_and_order_change_no_bit(models, seed):
    case = draw_case(seed, 0)
    for request, outcome in zip(case["requests"], run_case(case, models), strict=True):  # and no slot is held
        if "cancel" in request or "timeout" in request:
            continue
        if "text cannot bridge" in outcome.get("message", ""):
            assert request["draft"] in ("other vocabulary", "sibling of 6")
            continue
        assert [outcome] == run_case(alone(case, request), models)
