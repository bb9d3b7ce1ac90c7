"""litellm, through its providers for OpenAI-style servers (`openai/`, `hosted_vllm/`)."""

import json
from typing import Any

import litellm
from checks import STAGE, asks, check, fails, play, same

litellm.telemetry = False
litellm.suppress_debug_info = True
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": STAGE["weather_schema"]},
}


def ask(scene: str, provider: str = "openai", **fields: Any) -> Any:
    fields = {"messages": asks(scene), "model": f"{provider}/{STAGE['model']}"} | fields
    return litellm.completion(api_base=f"{STAGE['url']}/v1", api_key="none", num_retries=0, max_retries=0, **fields)


def joined(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@check
def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = ask("plain", provider)
        same((answer.choices[0].message.content, answer.choices[0].finish_reason), ("Paris.", "stop"))


@check
def stream() -> None:
    for provider in ("openai", "hosted_vllm"):
        same(joined(ask("plain", provider, stream=True)), "Paris.")


@check
def usage() -> None:
    chunks = list(ask("plain", stream=True, stream_options={"include_usage": True}))
    same(chunks[-1].usage.completion_tokens, 7)
    same(ask("plain").usage.completion_tokens, 7)


@check
def unicode() -> None:
    same(joined(ask("unicode", stream=True)), STAGE["unicode"])


@check
def stop() -> None:
    same(ask("stop", stop=["</s>", "zzz"]).choices[0].message.content, "one")


@check
def tools() -> None:
    for provider in ("openai", "hosted_vllm"):
        asked = ask("tool", provider, tools=[WEATHER]).choices[0]
        (call,) = asked.message.tool_calls
        same((asked.finish_reason, call.function.name), ("tool_calls", "get_weather"))
        same(json.loads(call.function.arguments), {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": STAGE["report"]}
        told = ask("tool", provider, tools=[WEATHER], messages=[*asks("tool"), asked.message.model_dump(), result])
        same(told.choices[0].message.content, f"It is {STAGE['report']}.")


def cities_of(scene: str) -> list[str]:
    chunks = list(ask(scene, stream=True, tools=[WEATHER]))
    whole = litellm.stream_chunk_builder(chunks, messages=asks(scene))
    return [json.loads(call.function.arguments)["city"] for call in whole.choices[0].message.tool_calls]


@check
def tool_stream() -> None:
    same(cities_of("tool"), ["Paris"])


@check
def parallel() -> None:
    same(cities_of("tools"), ["Paris", "Rome"])


@check
def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": STAGE["ada_schema"], "strict": True}}
    for provider in ("openai", "hosted_vllm"):
        same(json.loads(ask("json", provider, response_format=form).choices[0].message.content), STAGE["ada"])


@check
def reasoning() -> None:
    message = ask("reasoning", "hosted_vllm").choices[0].message
    same((message.content, message.reasoning_content), ("Four.", "Two and two."))


@check
def completions() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{STAGE['model']}",
        prompt="scene:plain",
        api_base=f"{STAGE['url']}/v1",
        api_key="none",
    )
    same(answer.choices[0].text, "Paris.")


@check
def embeddings() -> None:
    made = litellm.embedding(
        model=f"openai/{STAGE['model']}", input=["a", "b"], api_base=f"{STAGE['url']}/v1", api_key="none"
    )
    same([item["index"] for item in made.data], [0, 1])


@check
def errors() -> None:
    fails(lambda: ask("plain", model="openai/no-such"), litellm.NotFoundError, "no-such")
    fails(lambda: ask("plain", temperature=-1), litellm.BadRequestError, "temperature")
    long = [{"role": "user", "content": "x" * 200_001}]
    fails(lambda: ask("plain", messages=long), litellm.ContextWindowExceededError, "200000 tokens")
    fails(lambda: joined(ask("breaks", stream=True)), Exception, "The engine ended")


@check
def abort() -> None:
    stream = ask("endless", stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.completion_stream.close()


play()
