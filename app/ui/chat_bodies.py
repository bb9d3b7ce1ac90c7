"""What the routes of chats take. A number out of its range is told in words, as a person may have typed it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Form = Literal["json", "markdown"]

Title = Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)]
Folder = Annotated[str, StringConstraints(strip_whitespace=True, max_length=80)]
System = Annotated[str, StringConstraints(max_length=1_000_000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SamplingBody(_Body):
    """What a chat asks in place of the model's own. Names and ranges are the API's; null is as left out."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    stop: list[Annotated[str, Field(min_length=1, max_length=500)]] | None = Field(default=None, max_length=16)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ChangeBody(_Body):
    title: Title | None = None
    folder: Folder | None = None
    is_pinned: bool | None = None
    model_id: str | None = Field(default=None, max_length=500)
    system: System | None = None
    sampling: SamplingBody | None = None


class CreateBody(ChangeBody):
    is_incognito: bool = False


class NodeBody(_Body):
    node_id: str


class NameBody(_Body):
    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=80)]


class PresetBody(NameBody):
    system: System = ""
    sampling: SamplingBody = SamplingBody()


class _Kept(BaseModel):
    """A part of what is kept with an answer. Numbers that later versions add are no fault."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)


class KeptTimings(_Kept):
    decode_s: float
    predicted_per_second: float
    queue_s: float | None = None
    prefill_s: float | None = None


class KeptUsage(_Kept):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class KeptMeta(_Kept):
    """What the page draws of a message beside its text (`app.ui.answers.Figures`)."""

    model_id: str | None = None
    error: str = ""
    beside: str | None = None
    preset: PresetBody | None = None
    sampling: SamplingBody = SamplingBody()
    finish_reason: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    wait_s: float | None = None
    ttft_s: float | None = None
    thinking_s: float | None = None
    timings: KeptTimings | None = None
    usage: KeptUsage | None = None
    tokens: list[tuple[str, float, list[tuple[str, float]]]] = Field(default_factory=list)


def chosen(body: _Body) -> dict[str, Any]:
    """What was named in it, as the history keeps it: nothing that is left to the model or stays as it is."""
    return {name: value for name, value in body.model_dump(exclude_none=True).items() if name != "is_incognito"}
