"""What the page's routes answer when they cannot do what was asked: {"error": {"message": ..., "hint": ...}}."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response

from app.errors import AppError


def install(app: FastAPI) -> None:
    app.add_exception_handler(AppError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return JSONResponse({"error": error.as_fields()}, error.status)


async def _malformed(request: Request, error: Exception) -> Response:
    """The first fault with its place: a person may have typed a number that is out of its range."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"][1:])
    return await _refused(
        request, AppError(422, "invalid_value", f"{place}: {fault['msg']}." if place else fault["msg"])
    )
