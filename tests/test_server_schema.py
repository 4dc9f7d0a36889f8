"""Requests made from the server's own description, good and bad, by schemathesis: none is a failure of the server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from canvax.server.app import APIS
from canvax.server.openapi import description
from tests.support.server_stub import StubEngine
from tests.support.serving import Web, web

try:  # not among what the tests install: it brings a pytest plugin, and three dozen packages
    import schemathesis
    from schemathesis.generation import GenerationMode
except ImportError:
    pytest.skip("schemathesis is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

DESCRIBED = json.loads(json.dumps(description([path for api in APIS for path in api.routes(StubEngine())])))
SCHEMA = schemathesis.openapi.from_dict(DESCRIBED)
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
EXAMPLES = int(os.environ.get("CANVAX_EXAMPLES", "30"))


@pytest.fixture(scope="module")
def site() -> Iterator[Web]:
    with web() as site:
        yield site


def test_every_operation_is_read() -> None:
    assert len(OPERATIONS) == sum(len(methods) for methods in DESCRIBED["paths"].values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, one in OPERATIONS.items()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or "{index}" in name or "$ref" in json.dumps(one.definition.raw)
    ],
)
def test_requests(site: Web, name: str, mode: Any) -> None:
    operation = OPERATIONS[name]
    described = {int(status) for status in operation.definition.raw["responses"]}

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call(base_url=site.base, timeout=20)
        assert answer.status_code < 500, (answer.status_code, case.body, answer.text[:300])
        assert answer.status_code in described | {405}, (answer.status_code, answer.text[:300])
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0] == "application/json"
        site.engine.asks.clear()

    ask()
    assert site.http.get("/health").status_code == 200
