"""LLM: a loaded model to call from Python.

The same engine child, chat templates and detokeniser as the server's. They live in an event loop in a thread of its
own, so that calls are plain ones, in a script, a REPL or a notebook (whose loop runs already).
"""

import asyncio
import functools
import logging
import multiprocessing
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from app.chat.model_text import ModelText
from app.chat.types import ChatRequest, SamplingOptions
from app.errors import AppError, from_engine_error
from app.llm.desk import Desk, Job
from app.llm.loop import LoopThread
from app.llm.outputs import RequestOutput
from app.llm.params import SamplingParams, names_its_keywords
from app.llm.prompts import Conversation, Prepare, Prompt, as_list, check_room, conversations_of, plain_prompt
from app.llm.terminal import Bar, Stages
from app.models.shelf import ModelShelf
from app.settings import load
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError
from engine.types import ModelInfo, Standing

_log = logging.getLogger("fireside.llm")

_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names; the rest is the engine's
_GUARD = """An LLM starts its engine as a process of its own, and that process reads your script again.
Put what the script does under a guard, so that it is done once:

    if __name__ == "__main__":
        llm = LLM(model=...)
"""


class LLM:
    """A loaded model. `close()`, the end of a `with`, or dropping the last reference ends its process and frees all.

    model         catalogue id, Hugging Face repository or folder; fetched first where it is not there
    quantization  the format that the checkpoint must have; None takes what it has
    Other keywords as in `engine.config.EngineConfig`.
    Raises AppError (the model cannot be had or loaded as asked), ValueError and TypeError (arguments).
    """

    @names_its_keywords
    def __init__(
        self,
        model: str,
        *,
        quantization: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        scheduler_policy: str = "priority",
        gpu_memory_utilization: float = 0.90,
        enable_prefix_caching: bool = True,
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        device: str = "auto",
        kv_gb: float | None = None,
        kv_cache_dtype: str = "auto",
        quantize_lm_head: str = "auto",
        num_threads: int | None = None,
    ) -> None:
        _refuse_second_start()
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; Fireside runs a model on 1 device.")
        with _explained(), Stages() as show:
            shelf = ModelShelf(load({}, os.environ).models_folder)
            entry = shelf.resolve(model)
            folder = shelf.ensure(entry, show)
            config = EngineConfig(
                model=str(folder),
                quantization=quantization,
                dtype=_DTYPES.get(dtype, dtype),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                scheduler_policy=scheduler_policy,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_prefix_caching=enable_prefix_caching,
                seed=seed,
                device=device,
                kv_gb=kv_gb,
                kv_cache_dtype=kv_cache_dtype,
                quantize_lm_head=quantize_lm_head,
                num_threads=num_threads,
            )
            self._text = ModelText.load(folder)
            self._catalogue = entry.sampling
            self._loop = LoopThread()
            try:
                self._engine = self._loop.run(EngineClient.start(config, on_loading=show))
            except BaseException:
                self._loop.close()
                raise
        for note in self._engine.memory.notes:
            _log.warning("%s: %s", entry.id, note)
        self._num_requests = 0
        self._end = weakref.finalize(self, _end, self._loop, self._engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's process. Twice is the same as once."""
        self._end()

    @property
    def info(self) -> ModelInfo:
        """What came out of the load: format, arithmetic, the context that fits, and so on."""
        return self._engine.info

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own: from the catalogue and its generation_config.json."""
        params = self._text.sampling(SamplingOptions(), self._catalogue)
        return SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)

    @names_its_keywords
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt: Prompt | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue raw texts. A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.

        sampling_params  one for all, or one for each; None takes the model's own defaults
        priority         one for each prompt, lower first; needs scheduler_policy="priority"
        Returns the outputs in the order of the prompts. Raises ValueError before anything is computed if a prompt does
        not fit, AppError where the engine refuses one; then the others are given up.
        """
        if (prompts is None) == (prompt is None):
            raise ValueError("Give prompts or prompt, one of them.")
        given = as_list(prompts if prompt is None else prompt)
        prepare = [functools.partial(plain_prompt, self._text, prompt) for prompt in given]
        return self._answer(prepare, sampling_params, priority, use_tqdm)

    @names_its_keywords
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}; otherwise as `generate`.

        chat_template_kwargs  passed to the model's chat template (enable_thinking, ...)
        """
        requests = [
            ChatRequest(
                request_id="",
                model="",
                messages=conversation,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations_of(messages)
        ]
        prepare = [functools.partial(self._text.chat_prompt, request) for request in requests]
        return self._answer(prepare, sampling_params, None, use_tqdm)

    def _answer(
        self,
        prepare: Sequence[Prepare],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [params] * len(prepare) if isinstance(params, SamplingParams) else list(params)
        for value in each:
            if not isinstance(value, SamplingParams):
                raise TypeError(f"sampling_params is or holds {value!r:.100}; it must be SamplingParams(...).")
        priorities = [0] * len(prepare) if priority is None else list(priority)
        for name, values in (("sampling_params", each), ("priority", priorities)):
            if len(values) != len(prepare):
                raise ValueError(f"There are {len(prepare)} prompts and {len(values)} {name}; give one for each.")
        first = self._num_requests
        self._num_requests += len(prepare)
        with _explained(), Bar(len(prepare), is_shown=use_tqdm) as bar:
            return self._loop.run(self._answer_all(first, list(zip(prepare, each, priorities, strict=True)), bar))

    async def _answer_all(
        self, first: int, asked: Sequence[tuple[Prepare, SamplingParams, int]], bar: Bar
    ) -> list[RequestOutput]:
        jobs = []
        for index, (prepare, params, priority) in enumerate(asked):
            room = functools.partial(check_room, self._engine.info, index, params.max_tokens or 0)
            text, token_ids = await prepare(room)
            room(len(token_ids))
            jobs.append(Job(str(first + index), text, token_ids, params, Standing(priority=priority)))
        desk = Desk(self._engine, self._text, bar)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(desk.answer(job)) for job in jobs]
        except BaseExceptionGroup as failed:
            raise _first_of(failed) from None
        return [task.result() for task in tasks]


def _first_of(failed: BaseException) -> BaseException:
    return _first_of(failed.exceptions[0]) if isinstance(failed, BaseExceptionGroup) else failed


def _end(loop: LoopThread, engine: EngineClient) -> None:
    loop.run(engine.close())
    loop.close()


@contextmanager
def _explained() -> Iterator[None]:
    """Every refusal as an AppError that shows its next step beside the words."""
    try:
        yield
    except EngineDied as error:
        refusal = AppError(503, error.code, error.message)
        refusal.add_note(f"Make a new LLM. If it ended while it started:\n{_GUARD}")
        raise refusal from None
    except (AppError, EngineError) as error:
        refusal = error if isinstance(error, AppError) else from_engine_error(error)
        if refusal.hint:
            refusal.add_note(refusal.hint)
        raise refusal from None


def _refuse_second_start() -> None:
    """In the engine's process, while it reads a script without a guard: end it with words, not with one more engine."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_GUARD)
