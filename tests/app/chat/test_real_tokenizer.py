"""The embedded model's own tokenizer and template beside transformers, from one folder: the same ids, the same text."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from app.chat.detokenizer import Detokenizer
from app.chat.model_text import ModelText
from app.chat.types import ChatRequest, Message

TEXTS = [
    "The capital of France is",
    "  two blanks, a tab\tand 1234567 digits\n\n",
    "Grüße, 日本語, 한국어, عربى — and 👩‍👩‍👧 emoji",
    "<|im_start|>user\nraw control tokens<|im_end|>\n",
]


@pytest.fixture(scope="module")
def folder(embedded_home: Path) -> Path:
    return embedded_home / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def ours(folder: Path) -> ModelText:
    return ModelText.load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_transformers(ours: ModelText, theirs: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = ours.tokenizer.encode(text, add_special_tokens=True)
    assert list(token_ids) == theirs(text).input_ids
    assert ours.tokenizer.decode(token_ids) == text
    detokenizer = Detokenizer(ours.tokenizer)
    pieces = [*map(detokenizer.feed, token_ids), detokenizer.finish()]
    assert "".join(pieces) == theirs.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", [*TEXTS, " " * 3000, "-" * 3000, "\U00040000" * 50, "<|im_start|>" * 50])
def test_no_text_has_fewer_tokens_than_is_said_beforehand(ours: ModelText, text: str) -> None:
    assert 1 <= ours.tokenizer.fewest_tokens(text) <= len(ours.tokenizer.encode(text, add_special_tokens=False))


async def test_a_chats_prompt_is_transformers(ours: ModelText, theirs: PreTrainedTokenizerFast) -> None:
    talk = [("user", "Hi, 日本!"), ("assistant", " Hello."), ("user", "And?\n")]
    messages = tuple(Message(role=role, content=content) for role, content in talk)  # type: ignore[arg-type]
    request = ChatRequest(request_id="r", model="", messages=messages)
    _, token_ids = await ours.chat_prompt(request, lambda fewest: None)
    dicts = [{"role": role, "content": content} for role, content in talk]
    assert list(token_ids) == theirs.apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)


def test_a_byte_that_this_vocabulary_lacks_does_not_vanish(ours: ModelText) -> None:
    token_ids = ours.tokenizer.encode("end of transmission \x04", add_special_tokens=True)
    assert ours.tokenizer.decode(token_ids) == "end of transmission \ufffd"
