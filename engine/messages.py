"""The wire between `client` (the app's side) and `process` (the child). Plain dataclasses over two pipes.

to the child:    Submit  Abort  ResizeKV  Shutdown
from the child:  Loading ... Ready | Failed(request_id=None);  then Tokens, Failed(request_id), Resized, Stats
"""

from dataclasses import dataclass

from engine.types import ORDINARY, EngineStats, MemoryReport, ModelInfo, SamplingParams, Standing, TokenEvent


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    standing: Standing = ORDINARY


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResizeKV:
    """Have the KV cache smaller by so much than it was made; answered by Resized, or Failed under this id."""

    request_id: str
    give_back_bytes: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of a load: `stage` for people ("reading weights"), `fraction` 0 to 1 of the whole load."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo
    memory: MemoryReport


@dataclass(frozen=True, slots=True)
class Tokens:
    """All events of one step: one message a step, however many sequences ran."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """One request was refused or broke; request_id None means that the engine itself did not start or cannot go on."""

    request_id: str | None
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Resized:
    request_id: str
    memory: MemoryReport


@dataclass(frozen=True, slots=True)
class Stats:
    stats: EngineStats


ToChild = Submit | Abort | ResizeKV | Shutdown
FromChild = Loading | Ready | Tokens | Failed | Resized | Stats
