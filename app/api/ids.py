"""The two names of a request: the client's or ours (X-Request-Id), and the unique one that the engine sees."""

import uuid

from fastapi import Request


def engine_request_id(request: Request) -> str:
    """Unique, and starts with the id that the reply carries, so that one search of the log finds both."""
    return f"{request.state.request_id}/{uuid.uuid4().hex[:8]}"
