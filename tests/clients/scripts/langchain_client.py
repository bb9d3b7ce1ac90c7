"""langchain-openai: ChatOpenAI, OpenAI, OpenAIEmbeddings."""

import asyncio
from typing import Any

import openai
from checks import STAGE, asks, check, fails, play, same
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

OPTIONS: Any = {"model": STAGE["model"], "base_url": f"{STAGE['url']}/v1", "api_key": "none", "max_retries": 0}


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**OPTIONS, **options)


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return STAGE["report"]


@check
def chat() -> None:
    answer = model(max_tokens=100).invoke(asks("plain"))
    same((answer.content, answer.response_metadata["finish_reason"]), ("Paris.", "stop"))


@check
def stream() -> None:
    same("".join(piece.content for piece in model().stream(asks("plain"))), "Paris.")


@check
def usage() -> None:
    same(model().invoke(asks("plain")).usage_metadata["output_tokens"], 7)
    told = [piece.usage_metadata for piece in model(stream_usage=True).stream(asks("plain"))]
    same([usage["output_tokens"] for usage in told if usage], [7])


@check
def unicode() -> None:
    same("".join(piece.content for piece in model().stream(asks("unicode"))), STAGE["unicode"])


@check
def stop() -> None:
    same(model(stop=["</s>", "zzz"]).invoke(asks("stop")).content, "one")


@check
def tools() -> None:
    bound = model().bind_tools([get_weather])
    asked = bound.invoke(asks("tool"))
    (call,) = asked.tool_calls
    same((call["name"], call["args"]), ("get_weather", {"city": "Paris"}))
    result: ToolMessage = get_weather.invoke(call)
    told = bound.invoke([HumanMessage("scene:tool"), asked, result])
    same(told.content, f"It is {STAGE['report']}.")


@check
def tool_stream() -> None:
    whole = None
    for piece in model().bind_tools([get_weather]).stream(asks("tool")):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    same([(call["name"], call["args"]) for call in whole.tool_calls], [("get_weather", {"city": "Paris"})])


@check
def parallel() -> None:
    whole = None
    for piece in model().bind_tools([get_weather]).stream(asks("tools")):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    same([call["args"]["city"] for call in whole.tool_calls], ["Paris", "Rome"])


@check
def schema() -> None:
    form = {"title": "person", **STAGE["ada_schema"]}
    same(model().with_structured_output(form).invoke(asks("json")), STAGE["ada"])
    same(model().with_structured_output(form, method="json_mode").invoke(asks("json")), STAGE["ada"])


@check
def logprobs() -> None:
    answer = model(logprobs=True, top_logprobs=2).invoke(asks("plain"))
    same(answer.response_metadata["logprobs"]["content"][0]["token"], "P")


@check
def completions() -> None:
    same(OpenAI(**OPTIONS).invoke("scene:plain"), "Paris.")


@check
def embeddings() -> None:
    # Else it counts tokens with tiktoken, whose tables come from another server.
    made = OpenAIEmbeddings(**OPTIONS, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    same([len(vector) > 0 for vector in made], [True, True])


@check
def errors() -> None:
    fails(lambda: model(temperature=-1).invoke(asks("plain")), openai.BadRequestError, "temperature")
    fails(lambda: list(model().stream(asks("breaks"))), openai.APIError, "The engine ended")


@check
def abort() -> None:
    async def leave() -> None:
        async for piece in model().astream(asks("endless")):
            if piece.content:
                return

    asyncio.run(leave())


play()
