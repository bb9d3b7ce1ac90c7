"""What tabs ask of a conversation, over HTTP and the tab's socket, with a service that follows a script."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.chat.types import ScoredToken
from app.errors import AppError
from app.history.book import Book
from app.ui import refusals
from app.ui.chat_room import chat_room
from app.ui.live import Hub
from app.ui.status import ModelStatus
from tests.app.ui import scripted
from tests.app.ui.scripted import ScriptedService


async def _count(text: str) -> int:
    return len(text.split())


def _status(model_id: str) -> ModelStatus:
    """The one in hand has a short context."""
    is_other = model_id not in ("", "tiny")
    return ModelStatus(model_id=model_id or "tiny", state="ready", max_model_len=4000 if is_other else 100)


class House:
    def __init__(self, path: Path) -> None:
        self.service = ScriptedService()
        self.book = Book(path)
        app, hub = FastAPI(), Hub()
        refusals.install(app)
        app.include_router(hub.router())
        chat_room(self.service, _status, self.book, _count)(app, hub)
        self.client = TestClient(app)

    def post(self, path: str, **body: Any) -> Any:
        reply = self.client.post(f"/ui/{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, **body: Any) -> tuple[int, str]:
        reply = self.client.post(f"/ui/{path}", json=body)
        return reply.status_code, reply.json()["error"]["code"]

    def nodes(self, chat_id: str) -> list[Any]:
        return list(self.client.get(f"/ui/talk/chat/{chat_id}").json()["nodes"])

    def say(self, text: str, **more: Any) -> tuple[str, Any]:
        """Send, wait for the end: the chat's id and its last message."""
        chat_id = self.post("talk/send", text=text, **more)["chat_id"]
        return chat_id, self.ended(chat_id)

    def ended(self, chat_id: str) -> Any:
        wait_until(lambda: self.nodes(chat_id)[-1]["state"] != "writing")
        return self.nodes(chat_id)[-1]


def _slow(work: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any, **kwargs: Any) -> Any:
        threading.Event().wait(0.1)
        return work(*args, **kwargs)

    return later


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("what was waited for did not happen")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "history.db")
    with house.client:
        yield house


def test_a_message_begins_a_chat_and_its_answer_is_kept_with_its_figures(house: House) -> None:
    chat_id, answer = house.say("think: hm | hello there")
    assert [node["role"] for node in house.nodes(chat_id)] == ["user", "assistant"]
    assert (answer["text"], answer["reasoning"], answer["state"]) == ("hello there", "hm", "done")
    meta = answer["meta"]
    assert meta["model_id"] == "tiny" and meta["max_model_len"] == 100 and meta["finish_reason"] == "stop"
    assert meta["usage"]["completion_tokens"] == 3 and meta["timings"]["predicted_per_second"] == 42.5
    assert 0 <= meta["wait_s"] <= meta["ttft_s"] and meta["thinking_s"] >= 0


def test_the_next_message_brings_the_conversation_with_its_system_prompt_and_sampling(house: House) -> None:
    chat_id, answer = house.say("say: one")
    house.post(f"chats/{chat_id}", system="Be brief.", sampling={"temperature": 0.2, "reasoning_effort": "low"})
    house.say("say: two", chat_id=chat_id, parent_id=answer["id"])
    asked = house.service.requests[-1]
    roles = [(message.role, message.content) for message in asked.messages]
    assert roles == [("system", "Be brief."), ("user", "say: one"), ("assistant", "one"), ("user", "say: two")]
    assert (asked.sampling.temperature, asked.reasoning_effort, asked.sampling.top_p) == (0.2, "low", None)


def test_files_go_before_the_words_of_their_message(house: House) -> None:
    file = house.client.post("/ui/attachments?name=notes.txt", content=b"a note").json()
    house.say("say: read", attachment_ids=[file["id"]])
    content = house.service.requests[-1].messages[-1].content
    assert "notes.txt" in content and content.index("a note") < content.index("say: read")


def test_a_message_without_any_answer_is_left_out_of_the_next_prompt(house: House) -> None:
    chat_id, failed = house.say("refuse: no room")
    assert failed["state"] == "failed" and failed["meta"]["error"] == "no room"
    house.say("say: two", chat_id=chat_id, parent_id=failed["id"])
    assert [message.content for message in house.service.requests[-1].messages] == ["say: two"]


def test_an_answer_asked_of_a_model_by_name_says_so_while_it_waits(house: House) -> None:
    house.service.is_ready = False
    _, begun = house.post("talk/send", text="say: hi", ways=[{"model_id": "other"}])["nodes"]
    assert begun["meta"]["model_id"] == "other"
    house.service.is_ready = True
    assert house.ended(begun["chat_id"])["meta"]["model_id"] == "other"


def test_without_a_model_the_page_says_what_to_do_at_the_page(house: House) -> None:
    house.service.refusal = AppError(503, "no_model", "No model is loaded.", hint="POST /models/load loads one.")
    _, failed = house.say("say: hi")
    assert failed["meta"]["error"].startswith("No model is loaded. Choose one at the top of the page")


def test_a_failure_in_mid_answer_keeps_what_had_come(house: House) -> None:
    _, failed = house.say("fail: the engine ended")
    assert (failed["state"], failed["text"]) == ("failed", "It began well ")
    assert failed["meta"]["error"] == "the engine ended"


def test_stop_ends_the_work_and_what_was_shown_stays(house: House) -> None:
    chat_id = house.post("talk/send", text="count: 5000 every 0.005 as n")["chat_id"]
    wait_until(lambda: "n3 " in house.nodes(chat_id)[-1]["text"])
    shown = house.nodes(chat_id)[-1]
    assert house.post("talk/stop", node_id=shown["id"])["is_stopped"]
    stopped = house.nodes(chat_id)[-1]
    assert stopped["state"] == "stopped" and stopped["text"].startswith(shown["text"])
    assert stopped["meta"]["usage"]["prompt_tokens"] == 6 and stopped["meta"]["timings"]["decode_s"] > 0
    assert len(house.service.closed) == 1 and house.service.num_open == 0
    assert not house.post("talk/stop", node_id=shown["id"])["is_stopped"]


def test_a_stopped_answer_goes_on_in_its_own_words(house: House) -> None:
    chat_id = house.post("talk/send", text="count: 5000 every 0.005 as n")["chat_id"]
    wait_until(lambda: "n3 " in house.nodes(chat_id)[-1]["text"])
    node_id = house.nodes(chat_id)[-1]["id"]
    house.post("talk/stop", node_id=node_id)
    before = house.nodes(chat_id)[-1]["text"]
    house.post("talk/go_on", node_id=node_id)
    assert house.ended(chat_id)["text"] == before + " and on"
    asked = house.service.requests[-1]
    assert asked.continue_final_message and asked.messages[-1].content == before


def test_an_answer_that_never_began_is_begun_by_going_on(house: House) -> None:
    house.service.is_ready = False
    chat_id = house.post("talk/send", text="say: at last")["chat_id"]
    node_id = house.nodes(chat_id)[-1]["id"]
    house.post("talk/stop", node_id=node_id)
    house.service.is_ready = True
    house.post("talk/go_on", node_id=node_id)
    assert house.ended(chat_id)["text"] == "at last"
    assert not house.service.requests[-1].continue_final_message


def test_a_message_after_one_that_is_still_answered_is_refused(house: House) -> None:
    begun = house.post("talk/send", text="count: 5000 every 0.01 as n")
    answer = begun["nodes"][-1]
    next_one = {"chat_id": begun["chat_id"], "parent_id": answer["id"], "text": "x"}
    assert house.refused("talk/send", **next_one) == (409, "still_writing")
    assert house.refused("talk/go_on", node_id=answer["id"]) == (409, "cannot_go_on")
    house.post("talk/stop", node_id=answer["id"])


def test_of_two_tabs_that_go_on_at_once_the_later_one_is_refused_and_nothing_of_it_is_kept(house: House) -> None:
    chat_id, answer = house.say("say: one")
    next_one = {"chat_id": chat_id, "parent_id": answer["id"]}
    house.say("say: from here", **next_one)
    assert house.refused("talk/send", text="say: from there", **next_one) == (409, "chat_moved_on")
    assert [node["text"] for node in house.nodes(chat_id)] == ["say: one", "one", "say: from here", "from here"]
    assert all(node["num_versions"] == 1 for node in house.nodes(chat_id)) and len(house.service.requests) == 2
    empty = house.post("chats", system="Be brief.")["id"]  # two tabs show it, and neither has said anything
    house.say("say: first", chat_id=empty)
    assert house.refused("talk/send", text="say: second", chat_id=empty) == (409, "chat_moved_on")


def test_tabs_that_send_at_the_same_moment_leave_one_answer_and_one_refusal(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id, answer = house.say("say: one")
    for name in ("add", "write"):  # all of them have looked before the first has written
        monkeypatch.setattr(house.book.kept, name, _slow(getattr(house.book.kept, name)))
    body = {"chat_id": chat_id, "parent_id": answer["id"], "text": "count: 200 every 0.01 as n"}
    with ThreadPoolExecutor(4) as tabs:
        replies = list(tabs.map(lambda _: house.client.post("/ui/talk/send", json=body).status_code, range(4)))
    assert sorted(replies) == [200, 409, 409, 409] and house.service.num_open == 1
    node_id = house.nodes(chat_id)[-1]["id"]
    house.post("talk/stop", node_id=node_id)
    house.service.is_ready = False
    asked = {"json": {"node_id": node_id}}
    with ThreadPoolExecutor(4) as tabs:
        replies = list(tabs.map(lambda _: house.client.post("/ui/talk/go_on", **asked).status_code, range(4)))
    assert sorted(replies) == [200, 409, 409, 409]
    wait_until(lambda: house.service.num_open == 1)
    house.service.is_ready = True
    house.ended(chat_id)


def test_an_answer_is_made_again_once_however_many_tabs_ask_it(house: House) -> None:
    chat_id, first = house.say("count: 30 every 0.01 as n")
    house.post("talk/again", node_id=first["parent_id"])
    assert house.refused("talk/again", node_id=first["parent_id"]) == (409, "still_writing")
    assert house.ended(chat_id)["num_versions"] == 2


def test_an_edit_ends_what_another_tab_has_answered_in_its_place(house: House) -> None:
    chat_id, first = house.say("count: 100 every 0.01 as n")
    house.post("talk/again", node_id=first["parent_id"])  # the tab that edits does not know of it
    again = house.nodes(chat_id)[-1]
    wait_until(lambda: "n1 " in house.book.kept.node(again["id"]).text)
    _, answer = house.say("say: two", chat_id=chat_id, parent_id=None, is_version=True)
    ended = house.book.kept.node(again["id"])
    assert (ended.state, answer["text"]) == ("stopped", "two") and ended.text.startswith("n0 n1 ")
    assert [node["num_versions"] for node in house.nodes(chat_id)] == [2, 1]


def test_a_chat_that_is_deleted_while_a_message_is_sent_has_nothing_running(house: House) -> None:
    chat_id, answer = house.say("say: one")
    body = {"chat_id": chat_id, "parent_id": answer["id"], "text": "count: 5000 every 0.01 as n"}
    with ThreadPoolExecutor(2) as tabs:
        sent = tabs.submit(house.client.post, "/ui/talk/send", json=body)
        house.post(f"chats/{chat_id}/delete")
        assert sent.result().status_code in (200, 404)
    wait_until(lambda: house.service.num_open == 0)


def test_versions_are_turned_to_within_their_range(house: House) -> None:
    chat_id, first = house.say("say: one")
    house.post("talk/again", node_id=first["parent_id"])
    second = house.ended(chat_id)
    assert (second["version"], second["num_versions"]) == (2, 2)
    assert house.post("talk/turn", node_id=second["id"], step=-1)["node_id"] == first["id"]
    assert house.nodes(chat_id)[-1]["id"] == first["id"]
    assert house.post("talk/turn", node_id=first["id"], step=-1)["node_id"] == first["id"]


def test_ways_side_by_side_are_told_together(house: House) -> None:
    ways = [{}, {"model_id": "other", "sampling": {"temperature": 0.1}}]
    chat_id, answer = house.say("say: one", ways=ways)
    wait_until(lambda: all(each["state"] == "done" for each in house.nodes(chat_id)[-1]["beside"]))
    beside = house.nodes(chat_id)[-1]["beside"]
    assert [each["meta"]["model_id"] for each in beside] == ["tiny", "other"] and beside[0]["id"] == answer["id"]
    assert [each["meta"]["max_model_len"] for each in beside] == [100, 4000], "each its own model's context"
    assert [request.sampling.temperature for request in house.service.requests] == [None, 0.1]


def test_an_option_out_of_its_range_is_refused_in_words(house: House) -> None:
    reply = house.client.post("/ui/talk/send", json={"text": "x", "ways": [{"sampling": {"temperature": 9}}]})
    assert reply.status_code == 422 and "temperature" in reply.json()["error"]["message"]


def test_an_incognito_chat_never_gets_into_the_file(house: House) -> None:
    chat_id, _ = house.say("say: hush", is_incognito=True)
    assert chat_id.startswith("incognito-")
    assert house.book.kept.chats() == [] and house.book.incognito.chat(chat_id)


def test_an_answer_side_by_side_is_gone_on_with_in_its_own_way(house: House) -> None:
    """A preset takes the place of all settings of the chat; an option stands over both."""
    chat = house.book.kept.create_chat(system="The chat's own.", sampling={"top_k": 7, "temperature": 1.5})
    preset = {"name": "Mine", "system": "Be brief.", "sampling": {"top_p": 0.5, "temperature": 0.9}}
    ways = [{}, {"model_id": "other", "preset": preset, "sampling": {"temperature": 0.1}}]
    house.post("talk/send", chat_id=chat.id, text="count: 500 every 0.01 as n", ways=ways)
    _, second = house.nodes(chat.id)[-1]["beside"]
    wait_until(lambda: bool(house.book.kept.node(second["id"]).text))
    house.post("talk/stop", node_id=second["id"])
    house.post("talk/go_on", node_id=second["id"])
    wait_until(lambda: house.nodes(chat.id)[-1]["beside"][1]["state"] == "done")
    own, begun, gone_on = house.service.requests
    assert (own.messages[0].content, own.sampling.top_k, own.sampling.temperature) == ("The chat's own.", 7, 1.5)
    for asked in (begun, gone_on):
        told = (asked.sampling.top_k, asked.sampling.top_p, asked.sampling.temperature)
        assert (asked.model, asked.messages[0].content, told) == ("other", "Be brief.", (None, 0.5, 0.1))
    assert gone_on.continue_final_message


def test_probabilities_are_kept_beside_the_text_and_read_by_themselves(house: House) -> None:
    _, answer = house.say("say: one two", shows_probabilities=True)
    assert answer["has_tokens"] and "tokens" not in answer["meta"]
    tokens = house.client.get(f"/ui/talk/tokens/{answer['id']}").json()["tokens"]
    assert tokens == [[word, -0.6931, [[word, -0.6931], ["other", -1.3863]]] for word in ("one ", "two")]


def test_a_token_that_is_a_part_of_a_character_is_told_by_its_bytes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ScoredToken(b"\xf0\x9f", True, -0.5, ((b"\xf0\x9f", -0.5), ("é".encode(), -1.0)))
    monkeypatch.setattr(scripted, "_scored", lambda delta: replace(delta, logprobs=(part,)))
    _, answer = house.say("say: one", shows_probabilities=True)
    tokens = house.client.get(f"/ui/talk/tokens/{answer['id']}").json()["tokens"]
    assert tokens == [["\\xf0\\x9f", -0.5, [["\\xf0\\x9f", -0.5], ["é", -1.0]]]]


def test_only_the_last_messages_of_a_long_chat_are_read_and_earlier_ones_on_request(house: House) -> None:
    history = house.book.kept
    chat, parent = history.create_chat(), None
    for number in range(100):
        parent = history.add(chat.id, parent and parent.id, "user" if number % 2 == 0 else "assistant", f"m{number}")
    nodes = house.nodes(chat.id)
    assert [node["text"] for node in nodes] == [f"m{number}" for number in range(60, 100)]
    earlier = house.client.get(f"/ui/talk/earlier/{nodes[0]['parent_id']}").json()["nodes"]
    assert earlier[-1]["text"] == "m59"


def test_a_watching_tab_gets_an_answer_in_pieces_that_make_up_the_whole(house: House) -> None:
    chat_id = house.post("talk/send", text="count: 60 every 0.01 as n")["chat_id"]
    text, kinds = "", []
    with house.client.websocket_connect("/ui/live") as tab:
        tab.send_json({"watch": [f"chat:{chat_id}"]})
        while kinds.count("changed") < 2:  # at the beginning and at the end
            for event in tab.receive_json():
                kinds.append(event["kind"])
                if event["kind"] in ("answer", "piece"):
                    text = (text if event["kind"] == "piece" else "") + event["text"]
                    assert house.book.kept.node(event["node_id"]).text.startswith(text), "shown before it was kept"
    assert kinds.count("answer") == 1 and 2 <= kinds.count("piece") <= 30
    assert house.ended(chat_id)["text"].startswith(text)


def test_the_end_of_the_server_keeps_what_was_shown_and_says_that_it_is_cut(tmp_path: Path) -> None:
    house = House(tmp_path / "history.db")
    with house.client:
        chat_id = house.post("talk/send", text="count: 5000 every 0.005 as n")["chat_id"]
        wait_until(lambda: "n3 " in house.nodes(chat_id)[-1]["text"])
        shown = house.nodes(chat_id)[-1]["text"]
    again = House(tmp_path / "history.db")
    with again.client:
        last = again.nodes(chat_id)[-1]
        assert last["state"] == "cut" and last["text"].startswith(shown)
    assert len(house.service.closed) == 1


def test_deleting_a_chat_ends_its_answers(house: House) -> None:
    chat_id = house.post("talk/send", text="count: 5000 every 0.01 as n")["chat_id"]
    wait_until(lambda: "n1 " in house.nodes(chat_id)[-1]["text"])
    house.post(f"chats/{chat_id}/delete")
    assert house.service.num_open == 0


def test_what_cannot_be_kept_is_not_gone_on_with(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.errors import AppError

    def full(*_: object, **__: object) -> None:
        raise AppError(503, "history_unusable", "The disk is full.")

    house.post("talk/send", text="say: first")
    monkeypatch.setattr(house.book.kept, "write", full)
    house.post("talk/send", text="count: 5000 every 0.01 as n")
    wait_until(lambda: house.service.num_open == 0)
