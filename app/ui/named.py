"""What `gradio_client` may call of the page: one endpoint, `/chat`. Everything else has the API at /v1.

client = gradio_client.Client("http://127.0.0.1:8000")
client.predict("Hello!", api_name="/chat")
"""

from collections.abc import AsyncIterator
from uuid import uuid4

import gradio as gr
from gradio.events import api

from app.chat.types import ChatRequest, Message
from app.errors import AppError
from app.ui.answers import closing
from app.ui.status import Answerer


class NamedChat:
    """Built inside a `gr.Blocks` context."""

    def __init__(self, service: Answerer) -> None:
        self._service = service
        api(self.chat, api_name="chat", concurrency_limit=None)

    async def chat(self, message: str, system_prompt: str = "") -> AsyncIterator[str]:
        """The answer as far as it has come, again and again; the last is the whole. Without its thinking."""
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        asked = (*system, Message(role="user", content=message))
        request = ChatRequest(request_id=f"page-{uuid4().hex}", model="", messages=asked)
        text = ""
        try:
            async with closing(self._service.stream(request)) as deltas:
                async for delta in deltas:
                    if delta.text:
                        text += delta.text
                        yield text
        except AppError as error:
            raise gr.Error(error.text) from error
