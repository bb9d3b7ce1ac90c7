"""Which models there are, in the words of several servers; loading and unloading; tokens of a text."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.api import loading
from app.api.keys import ApiKey, Keyring, digest_of
from tests.app.api.answers import error_of
from tests.app.api.house import USER, House
from tests.fakes import EOS, FakeCard, FakeHealth, FakeShelf, Script, byte_model_folder, ids

USER_WORDS, ADMIN_WORDS = "user-key-1", "admin-key-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model_folder(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
def house(folder: Path) -> House:
    return House(folder, Script(token_ids=ids("Hello")))


async def test_lm_studios_list_has_what_its_clients_read(house: House) -> None:
    loaded, other = (await house.ask("GET", "/api/v0/models")).json()["data"]
    assert (loaded["id"], loaded["type"], loaded["state"]) == ("fake-model", "llm", "loaded")
    assert (loaded["max_context_length"], loaded["loaded_context_length"]) == (2000, 1000)
    assert (other["state"], other["max_context_length"]) == ("not-loaded", 4096)
    assert "loaded_context_length" not in other
    assert (await house.ask("GET", "/api/v0/models/fake-model")).json() == loaded
    error_of(await house.ask("GET", "/api/v0/models/none"), 404)


async def test_props_begin_no_load(house: House) -> None:
    house.shelf.now = FakeHealth(state="empty", model="")
    assert error_of(await house.ask("GET", "/props"), 503)["code"] == "no_model"


async def test_llamacpps_props_tell_the_loaded_context_and_the_template(house: House) -> None:
    props = (await house.ask("GET", "/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 200 and props["total_slots"] == 8
    assert (props["bos_token"], props["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in props["chat_template"] and props["model_alias"] == "fake-model"


async def test_tabbys_and_textgens_names_for_the_model_in_hand(house: House) -> None:
    tabby = (await house.ask("GET", "/v1/model")).json()
    assert (tabby["id"], tabby["parameters"]["max_seq_len"]) == ("fake-model", 1000)
    assert len((await house.ask("GET", "/v1/model/list")).json()["data"]) == 2
    assert (await house.ask("GET", "/v1/internal/model/info")).json()["model_name"] == "fake-model"
    assert (await house.ask("GET", "/v1/internal/model/list")).json()["model_names"][1] == "owner/other-4bit"
    house.shelf.now = FakeHealth(state="empty", model="")
    error_of(await house.ask("GET", "/v1/model"), 404)
    assert (await house.ask("GET", "/v1/internal/model/info")).json()["model_name"] == "None"


# Loading


async def test_a_model_is_loaded_and_unloaded_in_the_routers_words(house: House) -> None:
    for name in ("fake-model", "owner/other-4bit"):
        reply = await house.ask("POST", "/models/load", json={"model": name})
        assert reply.json() == {"success": True, "model": name} and house.shelf.asked[-1] == f"load {name}"
    error_of(await house.ask("POST", "/models/load", json={"model": "none"}), 404)
    error = error_of(await house.ask("POST", "/models/unload", json={"model": "fake-model"}), 400)
    assert "in memory is owner/other-4bit" in error["message"]
    assert (await house.ask("POST", "/models/unload", json={"model": "owner/other-4bit"})).json() == {"success": True}
    assert house.shelf.asked[-1] == "unload owner/other-4bit"
    error_of(await house.ask("POST", "/models/unload", json={"model": ""}), 400)
    house.shelf.now = FakeHealth(state="failed", model="fake-model", detail="no room")
    error = error_of(await house.ask("POST", "/models/unload", json={"model": "none"}), 400)
    assert "in memory is no model" in error["message"], "what failed is not there to be unloaded"
    for body in ({}, {"model": 3}, []):
        error_of(await house.ask("POST", "/models/load", json=body), 400)


async def test_only_an_admin_key_loads_unloads_and_watches(folder: Path) -> None:
    ring = [ApiKey("someone", digest_of(USER_WORDS)), ApiKey("boss", digest_of(ADMIN_WORDS), True)]
    for keys, words, status in (
        (ring, USER_WORDS, 403),
        (ring, ADMIN_WORDS, 200),
        (ring, "neither", 401),
        (ring[:1], USER_WORDS, 403),
    ):
        house = House(folder, keys=Keyring(keys))
        headers = {"authorization": f"Bearer {words}"}
        for method, path in (
            ("POST", "/models/unload"),
            ("POST", "/models/load"),
            ("GET", "/logs?model=fake-model"),
            ("GET", "/models/sse"),
        ):
            if (status, path) != (200, "/models/sse"):  # it has no end
                reply = await house.ask(method, path, json={"model": "fake-model"}, headers=headers)
                assert reply.status_code == status, path
        assert house.shelf.asked == (["unload fake-model", "load fake-model"] if status == 200 else [])
        if status == 403:
            assert error_of(reply, 403)["code"] == "admin_key_required"


@pytest.mark.parametrize(
    ("state", "value"), [("failed", {"value": "unloaded", "failed": True}), ("loading", {"value": "loading"})]
)
async def test_the_routers_list_tells_a_failed_load(house: House, state: str, value: dict[str, Any]) -> None:
    house.shelf.held = [FakeCard(id="fake-model", state=state)]
    assert (await house.ask("GET", "/models")).json()["data"][0]["status"] == value


async def test_the_events_tell_the_state_now_and_every_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(loading, "_LOOKS_TO_KEEP_ALIVE", 10)
    shelf = FakeShelf()
    told: list[Any] = []

    async def watch() -> None:
        async for frame in loading._events(shelf, list):
            told.append(frame if frame.startswith(b":") else json.loads(frame.removeprefix(b"data: ")))

    watching = asyncio.create_task(watch())
    states = [
        FakeHealth(),
        FakeHealth(state="loading", model="two", detail="reading", fraction=0.5),
        FakeHealth(state="failed", model="two", detail="no room"),
        FakeHealth(state="empty", model=""),
    ]
    for state in states:
        shelf.now = state
        seen = len(told)
        while len(told) < seen + 3:  # keep-alives: all changes have been told
            await asyncio.sleep(0.001)
    shelf.is_closed = True
    await watching
    assert b": keep-alive\n\n" in told
    progress = {"stages": ["reading"], "current": "reading", "value": 0.5}
    assert [(event["model"], event["data"]) for event in told if isinstance(event, dict)] == [
        ("fake-model", {"status": "loaded"}),
        ("fake-model", {"status": "unloaded"}),
        ("two", {"status": "loading", "progress": progress}),
        ("two", {"status": "unloaded", "failed": True, "message": "no room"}),
        ("two", {"status": "unloaded"}),
    ]


async def test_the_engines_last_lines_are_shown(house: House) -> None:
    assert (await house.ask("GET", "/logs?lines=2")).json() == {"model": "fake-model", "lines": ["two", "three"]}
    error_of(await house.ask("GET", "/logs?model=none"), 404)
    for lines in ("0", "many", "100000"):
        error_of(await house.ask("GET", f"/logs?lines={lines}"), 400)


# Tokens


async def test_a_text_is_made_into_tokens_and_back(house: House) -> None:
    reply = (await house.ask("POST", "/tokenize", json={"prompt": "aé<|im_end|>", "return_token_strs": True})).json()
    assert reply["tokens"] == [*ids("aé"), EOS] and reply["count"] == 4 and reply["max_model_len"] == 200
    assert reply["token_strs"][0] == "a" and reply["token_strs"][-1] == "<|im_end|>"
    assert (await house.ask("POST", "/tokenize", json={"prompt": ""})).json()["tokens"] == []
    back = await house.ask("POST", "/detokenize", json={"model": "fake-model", "tokens": reply["tokens"]})
    assert back.json() == {"prompt": "aé<|im_end|>"}
    assert (await house.ask("POST", "/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_is_counted_as_a_turn_would_count_it_even_beyond_the_context(house: House) -> None:
    used = (await house.chat()).json()["usage"]["prompt_tokens"]
    asked = {"messages": [USER], "temperature": 0}
    assert (await house.ask("POST", "/tokenize", json=asked)).json()["count"] == used
    long = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await house.ask("POST", "/tokenize", json=long)).json()["count"] > 5000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
async def test_what_cannot_be_made_into_tokens_is_a_400_that_names_the_place(
    house: House, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(await house.ask("POST", path, json=body), 400)["param"] == param


async def test_a_text_beyond_all_reason_is_not_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.chat.service.MAX_COUNTED_CHARS", 10)
    for body in ({"prompt": "x" * 11}, {"messages": [{"role": "user", "content": "x" * 11}]}):
        assert error_of(await house.ask("POST", "/tokenize", json=body), 400)["code"] == "text_too_long"


async def test_the_tokenizers_special_tokens_are_told_plain(house: House) -> None:
    told = (await house.ask("GET", "/tokenizer_info")).json()
    assert (told["bos_token"], told["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in told["chat_template"]


# Memory


async def test_memory_is_told_by_part_and_given_back_while_the_model_stays(house: House) -> None:
    told = (await house.ask("GET", "/memory")).json()
    assert (told["weights_bytes"], told["kv_bytes"], told["kv_tokens"]) == (5 * 10**9, 10**10, 1024)
    smaller = await house.ask("POST", "/memory", json={"give_back_gb": 2.5})
    assert smaller.status_code == 200 and smaller.json()["kv_bytes"] == 7_500_000_000
    assert house.shelf.asked[-1] == "give back 2500000000"
    for wrong in ({"give_back_gb": -1}, {}, {"give_back_gb": 1, "now": True}, {"give_back_gb": "all"}):
        error_of(await house.ask("POST", "/memory", json=wrong), 400)


async def test_without_a_model_the_machines_memory_is_told_and_nothing_of_it_is_ours(house: House) -> None:
    house.shelf.now = FakeHealth(state="empty", model="")
    told = (await house.ask("GET", "/memory")).json()
    assert told["total_bytes"] >= told["free_bytes_at_start"] > 0
    assert (told["weights_bytes"], told["kv_bytes"], told["kv_tokens"]) == (0, 0, 0)
    assert told["notes"] == ["No model is in memory. POST /models/load loads one; GET /v1/models lists all."]


async def test_only_an_admin_gives_memory_back(folder: Path) -> None:
    keys = Keyring([ApiKey("u", digest_of(USER_WORDS)), ApiKey("a", digest_of(ADMIN_WORDS), is_admin=True)])
    house = House(folder, Script(token_ids=ids("Hello")), keys=keys)
    user, admin = ({"Authorization": f"Bearer {words}"} for words in (USER_WORDS, ADMIN_WORDS))
    error_of(await house.ask("POST", "/memory", json={"give_back_gb": 1}, headers=user), 403)
    assert (await house.ask("GET", "/memory", headers=user)).status_code == 200
    assert (await house.ask("POST", "/memory", json={"give_back_gb": 1}, headers=admin)).status_code == 200
