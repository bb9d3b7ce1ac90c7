"""Stand-ins for the rooms behind a turn: a model folder whose tokens are bytes, a scripted engine, a source, a shelf.

With `byte_model_folder`, token id = byte, so a test writes an answer as text and cuts it into tokens where it likes.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.chat.tokenizer import byte_symbols
from app.errors import AppError
from engine.types import (
    ORDINARY,
    FinishReason,
    MemoryReport,
    ModelInfo,
    RequestTimes,
    SamplingParams,
    Standing,
    TokenEvent,
    TokenLogprobs,
)

BOS, EOS, FIM = 256, 257, 258
SPECIAL = {BOS: "<|im_start|>", EOS: "<|im_end|>", FIM: "<|fim_middle|>"}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TIMES = RequestTimes(queue_s=0.5, prefill_s=2.0, decode_s=4.0)


def byte_model_folder(
    folder: Path,
    *,
    chat_template: str | None = CHATML,
    generation_config: dict[str, Any] | None = None,
    words: Sequence[str] = (),
    left_out: Sequence[int] = (),
) -> Path:
    """Write the text side of a model: byte-level BPE, ids 0..255 the bytes, 256.. the control tokens, then `words`.

    words      further tokens of several characters, one id each from 259
    left_out   bytes that get no symbol in the vocabulary
    """
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols()) if byte not in left_out}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    spec = json.loads(inner.to_str())
    extra = [*((token_id, text, True) for token_id, text in SPECIAL.items())]
    extra += [(259 + index, word, False) for index, word in enumerate(words)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] = [{"id": i, "content": text, "special": special, **flags} for i, text, special in extra]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    config = {"bos_token": SPECIAL[BOS], "eos_token": {"content": SPECIAL[EOS]}, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return folder


def ids(text: str) -> tuple[int, ...]:
    """The tokens of `text`, a byte each; control tokens are not parsed."""
    return tuple(text.encode())


@dataclass(kw_only=True)
class Script:
    """What the engine does with a request.

    token_ids    sampled one after the other; without an end id the answer ends by max_tokens or goes on to `finish`
    finish       how it ends after the last of them: STOP samples EOS, LENGTH marks the last token
    gate         waited for before the first token
    pause_s      before each further token
    error        raised before token number `error_at`
    num_cached   prompt tokens from the prefix cache
    times        sent with the last event
    """

    token_ids: Sequence[int] = ()
    finish: FinishReason = FinishReason.STOP
    gate: asyncio.Event | None = None
    pause_s: float = 0.0
    error: Exception | None = None
    error_at: int = 0
    num_cached: int = 0
    times: RequestTimes = TIMES


@dataclass
class FakeEngine:
    """EngineLike by script. `script(prompt_ids)` picks what happens; a list of ids is the same answer for everyone.

    submitted   (request_id, prompt_ids, params) in order of arrival; `standings` beside it
    aborted     request ids whose iterator was closed before its end
    running     requests that are under way now
    """

    script: Script | Callable[[tuple[int, ...]], Script]
    submitted: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)
    standings: list[Standing] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        standing: Standing = ORDINARY,
    ) -> AsyncGenerator[TokenEvent, None]:
        self.standings.append(standing)
        script = self.script if isinstance(self.script, Script) else self.script(prompt_token_ids)
        assert request_id not in self.running, "a request id was used twice at once"
        self.submitted.append((request_id, prompt_token_ids, params))
        self.running.add(request_id)
        has_ended = False
        try:
            async for event in _events(script, request_id, prompt_token_ids, params):
                has_ended = event.finish_reason is not None
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            if not has_ended:
                self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)


def embedding_of(prompt: tuple[int, ...]) -> tuple[float, ...]:
    """Of length 1, and its own for each pair of first token and length."""
    angle = prompt[0] + len(prompt) / 10
    return (math.sin(angle), math.cos(angle) * 0.6, math.cos(angle) * 0.8, 0.0)


async def _events(
    script: Script, request_id: str, prompt: tuple[int, ...], params: SamplingParams
) -> AsyncGenerator[TokenEvent, None]:
    if params.embeds:
        yield TokenEvent(
            request_id=request_id,
            token_id=0,
            finish_reason=FinishReason.LENGTH,
            num_prompt_tokens=len(prompt),
            times=script.times,
            embedding=embedding_of(prompt),
        )
        return
    sampled = [*script.token_ids, *([EOS] if script.finish is FinishReason.STOP else [])]
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for index, token_id in enumerate(sampled):
        if script.error is not None and index == script.error_at:
            raise script.error
        if index == 0 and script.gate is not None:
            await script.gate.wait()
        await asyncio.sleep(script.pause_s if index else 0)
        finish = None
        if token_id in stop_ids:
            finish = FinishReason.STOP
        elif index + 1 == params.max_tokens:
            finish = FinishReason.LENGTH
        elif index + 1 == len(sampled):
            finish = script.finish
        yield TokenEvent(
            request_id=request_id,
            token_id=token_id,
            finish_reason=finish,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=script.num_cached,
            times=script.times if finish is not None else None,
            logprobs=_logprobs(token_id, params.logprobs),
            prompt_logprobs=_prompt_logprobs(prompt, params.prompt_logprobs) if index == 0 else None,
        )
        if finish is not None:
            return


def _logprobs(token_id: int, count: int | None) -> TokenLogprobs | None:
    """A token's is minus its id in thousandths; the likeliest are "z", half a letter and "a"."""
    if count is None:
        return None
    top = (ord("z"), 0xC3, ord("a"))[:count]
    return TokenLogprobs(-token_id / 1000, top, (-0.01, -0.02, -0.03)[:count])


def _prompt_logprobs(prompt: tuple[int, ...], count: int | None) -> tuple[TokenLogprobs, ...] | None:
    scored = (_logprobs(token_id, count) for token_id in prompt[1:])
    return None if count is None else tuple(entry for entry in scored if entry is not None)


def model_info(**changes: Any) -> ModelInfo:
    facts: dict[str, Any] = {
        "architecture": "llama",
        "quantization": None,
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 512,
        "num_layers": 1,
        "max_model_len": 1000,
        "context_length": 2000,
        "eos_token_ids": (EOS,),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }
    return ModelInfo(**facts | changes)


def memory_report(*notes: str) -> MemoryReport:
    return MemoryReport(
        total_bytes=0,
        free_bytes_at_start=0,
        weights_bytes=0,
        workspace_bytes=0,
        kv_bytes=0,
        reserve_bytes=0,
        num_blocks=64,
        block_size=16,
        notes=notes,
    )


@dataclass
class FakeModel:
    folder: Path
    engine: FakeEngine
    id: str = "fake-model"
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning: tuple[str, str] | None = None
    info: ModelInfo = field(default_factory=model_info)


@dataclass
class FakeSource:
    """ModelSource with one model; `gate` is waited for, like a load, and `failure` is how that load ended."""

    model: FakeModel
    gate: asyncio.Event | None = None
    failure: AppError | None = None

    @asynccontextmanager
    async def lease(self, model: str) -> AsyncIterator[FakeModel]:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        if model not in ("", self.model.id):
            raise AppError(404, "model_not_found", f"There is no model {model[:200]!r}.", param="model")
        yield self.model


@dataclass(kw_only=True)
class FakeCard:
    id: str
    created: int = 1_700_000_000
    state: str = "unloaded"
    max_model_len: int | None = None
    context_length: int | None = None
    aliases: tuple[str, ...] = ()
    format: str | None = None
    size_bytes: int = 0
    thinks: bool = False
    architecture: str | None = None
    error: str = ""


@dataclass(kw_only=True)
class FakeHealth:
    state: str = "ready"
    model: str = "fake-model"
    detail: str = ""
    fraction: float | None = None
    seconds_left: float | None = None


@dataclass
class FakeShelf:
    """app.api's Shelf. `asked` is what it was told to load and unload."""

    held: list[FakeCard] = field(
        default_factory=lambda: [
            FakeCard(
                id="fake-model",
                state="loaded",
                max_model_len=1000,
                context_length=2000,
                aliases=("fake",),
                format="gptq",
                architecture="llama",
            ),
            FakeCard(id="owner/other-4bit", context_length=4096, size_bytes=5_000_000_000, thinks=True),
        ]
    )
    now: FakeHealth = field(default_factory=FakeHealth)
    report: MemoryReport = field(
        default_factory=lambda: replace(memory_report(), weights_bytes=5 * 10**9, kv_bytes=10**10)
    )
    asked: list[str] = field(default_factory=list)
    is_closed: bool = False

    def cards(self) -> Sequence[FakeCard]:
        return self.held

    def health(self) -> FakeHealth:
        return self.now

    def check(self, name: str) -> None:
        if name not in [card.id for card in self.held]:
            raise AppError(404, "model_not_found", f"There is no model {name[:200]!r}.", param="model")

    def holds(self, name: str) -> bool:
        return bool(self.now.model) and name in ("", self.now.model)

    def load(self, name: str) -> str:
        self.asked.append(f"load {name}")
        self.now = FakeHealth(state="loading", model=name)
        return name

    async def unload(self, name: str) -> None:
        self.asked.append(f"unload {name}")
        self.now = FakeHealth(state="empty", model="")

    def statuses(self) -> Sequence[FakeHealth]:
        return [self.now] if self.now.model else []

    async def log_lines(self, name: str, num_lines: int) -> tuple[str, list[str]]:
        self.check(name or self.now.model)
        return name or self.now.model, ["one", "two", "three"][-num_lines:]

    def memory(self) -> MemoryReport | None:
        return self.report if self.now.model else None

    async def resize_kv(self, give_back_bytes: int) -> MemoryReport:
        if not self.now.model:
            raise AppError(503, "no_model", "No model is loaded.")
        self.asked.append(f"give back {give_back_bytes}")
        self.report = replace(self.report, kv_bytes=10**10 - give_back_bytes)
        return self.report
