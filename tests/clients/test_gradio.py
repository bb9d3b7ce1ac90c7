"""gradio_client, which speaks to the page."""

from collections.abc import Iterator
from pathlib import Path

import gradio_client
import pytest
from gradio_client.exceptions import AppError as ClientsError

from app.ui.page import mount
from app.ui.status import ModelStatus
from tests.clients.scenes import UNICODE
from tests.clients.stage import MODEL, Stage
from tests.clients.table import Client

CLIENT = Client("gradio_client", "gradio-client")
proves = pytest.mark.proves


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    """With the page, as the server mounts it."""
    made = Stage(folder)
    mount(made.house.app, made.house.service, lambda: ModelStatus(model_id=MODEL, state="ready", max_model_len=1000))
    with made as running:
        yield running


@pytest.fixture(scope="module")
def client(stage: Stage) -> gradio_client.Client:
    return gradio_client.Client(stage.url, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 200})


@proves("chat", "unicode")
def test_predict_gives_the_whole_answer(client: gradio_client.Client, stage: Stage) -> None:
    assert client.predict("scene:unicode", api_name="/chat") == UNICODE
    assert client.predict("scene:plain", "Be brief.", api_name="/chat") == "Paris."
    assert "Be brief." in stage.last_prompt()


@proves("stream")
def test_a_job_gives_the_answer_as_it_grows(client: gradio_client.Client) -> None:
    pieces = list(client.submit("scene:plain", api_name="/chat"))
    assert pieces[-1] == "Paris." and all("Paris.".startswith(piece) for piece in pieces)


@proves("errors")
def test_a_refusal_is_the_clients_own_error(client: gradio_client.Client) -> None:
    with pytest.raises(ClientsError, match="maximum context length"):
        client.predict("x" * 200_001, api_name="/chat")


@proves("abort")
def test_cancelling_a_job_aborts_in_the_engine(client: gradio_client.Client, stage: Stage) -> None:
    left = stage.num_left()
    job = client.submit("scene:endless", api_name="/chat")
    next(iter(job))
    job.cancel()
    stage.until_left(left + 1)
