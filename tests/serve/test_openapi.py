"""The server against its own OpenAPI page: whatever schemathesis sends, right or wrong, is answered as the page says.

Many more examples, and the phases beyond random ones, against a server that runs (docs/serving.md):

    schemathesis run http://127.0.0.1:8000/openapi.json -n 1000 --exclude-checks positive_data_acceptance
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import Running, serve, wait_for


@pytest.fixture(scope="module")
def running():
    with serve(max_tokens=8, max_choices=3) as running:
        yield running
        assert wait_for(lambda: running.service.live == 0 and not running.service.calls)
        assert running.request("GET", "/health").status == 200


@pytest.fixture(scope="module")
def page(running: Running):
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/completions", RIGHT),
        ("/v1/completions", WRONG),
        ("/v1/chat/completions", RIGHT),
        ("/v1/chat/completions", WRONG),
        ("/v1/models/{model}", RIGHT),  # any name is right there, and any request of the other paths
        ("/v1/models", RIGHT),
        ("/health", RIGHT),
        ("/metrics", RIGHT),
    ],
)
def test_answers_are_those_of_the_page(page, path: str, mode: schemathesis.GenerationMode):
    operation = page[path]["POST" if "completions" in path else "GET"]

    # A page cannot say all that makes a request right: which characters a tokenizer has, how many tokens a text is.
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


def test_page_tells_the_limits_and_has_no_status_422(running: Running):
    page = running.request("GET", "/openapi.json").json
    assert set(page["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/health",
        "/metrics",
    }
    operation = page["paths"]["/v1/completions"]["post"]
    keys = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert keys["model"]["enum"] == ["tiny"] and keys["n"]["anyOf"][0]["maximum"] == 3
    assert "422" not in operation["responses"] and "text/event-stream" in operation["responses"]["200"]["content"]
    assert "default" in keys["temperature"] and "422" not in str(page)
