"""Schemathesis against /openapi.json: whatever a client sends, no fault of ours, and each reply as the schema says.

Left out: a stream that never ends. Two of schemathesis's checks do not hold by design: clients send numbers as strings
and fields that nobody knows, and are served; and what one field allows, another beside it may forbid.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies
from schemathesis import GenerationMode, checks

from tests.clients.stage import MODEL, Stage, model_folder
from tests.fakes import FakeHealth

ENDLESS = {"/models/sse"}

_PATIENCE_S = 200.0

checks.load_all_checks()
CHECKED = [
    checks.CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(model_folder(tmp_path_factory.mktemp("schema") / "byte-model")) as running:
        yield running


@pytest.fixture(scope="module")
def operations(stage: Stage) -> list[Any]:
    api = schemathesis.openapi.from_url(f"{stage.url}/openapi.json")
    found = [result.ok() for result in api.get_all_operations()]
    return [operation for operation in found if operation.path not in ENDLESS]


def test_no_reply_breaks_the_schema(stage: Stage, operations: list[Any], subtests: pytest.Subtests) -> None:
    for operation in operations:
        with subtests.test(operation.label):
            _play(stage, operation, num_examples=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_reply_breaks_the_schema_for_long(stage: Stage, operations: list[Any], subtests: pytest.Subtests) -> None:
    for operation in operations:
        with subtests.test(operation.label):
            _play(stage, operation, num_examples=450)  # five minutes


def _play(stage: Stage, operation: Any, num_examples: int) -> None:
    stage.house.shelf.now = FakeHealth()  # another operation may have unloaded the model
    assert _send(_plain(operation)) == 200, "the plain request is not served: the others would tell little"
    if operation.body or operation.path_parameters:
        _valid(operation, num_examples)
    if operation.body:
        _anything(operation, num_examples)


def _plain(operation: Any) -> Any:
    """The schema's own example."""
    path = {"model_id": MODEL} if operation.path_parameters else {}
    if not operation.body:
        return operation.Case(path_parameters=path)
    body = operation.body[0].definition.get("example") or {"model": MODEL}
    return operation.Case(path_parameters=path, body=body, media_type="application/json")


def _send(case: Any) -> int:
    reply = case.call(timeout=_PATIENCE_S)
    case.validate_response(reply, checks=CHECKED)
    return int(reply.status_code)


def _valid(operation: Any, num_examples: int) -> None:
    """Requests as the schema has them. Most fields are left out, or hardly one body would be right as a whole."""

    @_settings(num_examples)
    @hypothesis.given(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE), strategies.integers(0, 3), strategies.randoms()
    )
    def play(case: Any, num_fields: int, random: Any) -> None:
        if "model_id" in case.path_parameters:
            case.path_parameters["model_id"] = random.choice([MODEL, case.path_parameters["model_id"]])
        if isinstance(case.body, dict):
            _thin_out(case.body, operation.body[0].raw_schema.get("required", ()), num_fields, random)
        _send(case)

    play()


def _thin_out(body: dict[str, Any], required: Sequence[str], num_fields: int, random: Any) -> None:
    others = sorted({*body} - {*required})
    for name in random.sample(others, max(0, len(others) - num_fields)):
        del body[name]
    if "model" in body:
        body["model"] = MODEL


def _anything(operation: Any, num_examples: int) -> None:
    """Bodies that break the schema somewhere."""

    @_settings(num_examples)
    @hypothesis.given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def play(case: Any) -> None:
        _send(case)

    play()


def _settings(num_examples: int) -> Any:
    return hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
