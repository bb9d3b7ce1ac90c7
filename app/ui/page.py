"""The page: one Gradio Blocks app mounted at the root of the server. Holds the frame; the parts live beside it.

`mount` is the whole public face. It must be called after every other route, since a mount at "/" takes what is left.
"""

from fastapi import FastAPI

from app.ui.status import Answerer, StatusSource


def mount(app: FastAPI, service: Answerer, status: StatusSource) -> None:
    """Put the page at "/" of `app`, after its other routes.

    service  answers; one object for every tab
    status   gives the model's state now; called from the event loop, so it must not block
    """
    raise NotImplementedError
