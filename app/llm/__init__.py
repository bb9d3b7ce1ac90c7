"""The offline API, with vLLM's names: prompts in, texts out, no server. `from app.llm import LLM, SamplingParams`."""

from app.llm.llm import LLM
from app.llm.outputs import CompletionOutput, Logprob, RequestOutput
from app.llm.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
