"""The list of chats, their settings and files, as a person uses them: a real Chromium against the real page."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.history.history import History
from tests.e2e.tabs import CHROMIUM, House, Tab, axe_findings, wait_until

playwright_api = pytest.importorskip("playwright.sync_api")
expect = playwright_api.expect

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the server's history."""
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def running_house(folder: Path) -> Iterator[House]:
    with House(folder / "history.db") as house:
        yield house


@pytest.fixture
def house(running_house: House, folder: Path) -> House:
    """With three chats in its history, written beside the server as another process would."""
    history = History(folder / "history.db")
    for chat in history.chats():
        history.delete_chat(chat.id)
    for title in ("Lifetimes in Rust", "A week in Lisbon", "What RoPE is"):
        chat = history.create_chat(title)
        asked = history.add(chat.id, None, "user", f"Tell me: {title}?")
        history.add(chat.id, asked.id, "assistant", f"An answer about {title.upper()}, with a needle in it.")
    history.close()
    running_house.service.requests.clear()
    return running_house


def _chat(tab: Tab, title: str) -> Any:
    return tab.page.locator("#fs-sidebar").get_by_role("link", name=title)


def _titles(tab: Tab) -> list[str]:
    return list(tab.page.locator("#fs-sidebar a[data-id]").all_inner_texts())


def _choose(tab: Tab, title: str, action: str) -> None:
    tab.page.get_by_role("button", name=f"What to do with {title}").click()
    tab.page.get_by_role("menuitem", name=action, exact=True).click()


def test_a_chat_is_opened_renamed_pinned_and_put_into_a_folder(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    _chat(tab, "A week in Lisbon").click()
    expect(tab.answers.last).to_contain_text("LISBON")
    expect(_chat(tab, "A week in Lisbon")).to_have_attribute("aria-current", "page")
    expect(tab.page).to_have_title("A week in Lisbon · Fireside")
    _choose(tab, "A week in Lisbon", "Rename")
    tab.page.keyboard.type("Two weeks in Porto")
    tab.page.keyboard.press("Enter")
    expect(_chat(tab, "Two weeks in Porto")).to_be_focused()
    expect(tab.page).to_have_title("Two weeks in Porto · Fireside")
    _choose(tab, "Lifetimes in Rust", "Pin")
    wait_until(lambda: _titles(tab)[0] == "Lifetimes in Rust")
    _choose(tab, "Two weeks in Porto", "Move to a folder")
    tab.page.keyboard.type("Travel")
    tab.page.keyboard.press("Enter")
    folder = tab.page.locator("#fs-sidebar details", has_text="Two weeks in Porto")
    expect(folder.locator("summary")).to_have_text("Travel")
    _choose(tab, "What RoPE is", "Rename")
    tab.page.keyboard.type("never mind")
    tab.page.keyboard.press("Escape")
    expect(_chat(tab, "What RoPE is")).to_be_visible()
    tab.shoot("chats")
    assert tab.complaints == []


def test_a_deleted_chat_is_brought_back_by_undo_and_another_tab_stays_in_step(
    open_tab: Callable[..., Tab],
) -> None:
    tab, other = open_tab(), open_tab()
    _chat(tab, "What RoPE is").click()
    expect(tab.answers).to_have_count(1)
    _choose(tab, "What RoPE is", "Delete")
    expect(_chat(tab, "What RoPE is")).to_have_count(0)
    expect(_chat(other, "What RoPE is")).to_have_count(0)
    expect(tab.answers).to_have_count(0)
    tab.page.get_by_role("button", name="Undo").click()
    expect(_chat(other, "What RoPE is")).to_be_visible()
    expect(tab.answers.last).to_contain_text("ROPE")


def test_several_deletions_are_undone_each_and_a_draft_in_another_tab_is_not_lost(
    open_tab: Callable[..., Tab],
) -> None:
    tab, other = open_tab(), open_tab()
    _chat(other, "What RoPE is").click()
    expect(other.answers).to_have_count(1)
    other.box.fill("half a thought")
    _choose(tab, "What RoPE is", "Delete")
    _choose(tab, "Lifetimes in Rust", "Delete")
    expect(_chat(tab, "Lifetimes in Rust")).to_have_count(0)
    expect(other.page.get_by_text("This chat is not there any more.")).to_be_visible()
    expect(other.box).to_have_value("half a thought")
    told = tab.page.locator(".fs-chats-told")
    told.locator("p", has_text="RoPE").get_by_role("button", name="Undo").click()
    expect(_chat(tab, "What RoPE is")).to_be_focused()
    expect(told).to_contain_text("Lifetimes in Rust")
    told.get_by_role("button", name="Undo").click()
    expect(_chat(tab, "Lifetimes in Rust")).to_be_visible()
    expect(told).to_have_text("")


def test_a_pinned_chat_in_a_folder_tells_both_in_both_places(open_tab: Callable[..., Tab], folder: Path) -> None:
    history = History(folder / "history.db")
    for chat in history.chats():
        if "Lisbon" in chat.title:
            history.change_chat(chat.id, folder="Travel", is_pinned=True)
    history.close()
    tab = open_tab()
    pinned = tab.page.locator("#fs-sidebar section", has_text="A week in Lisbon")
    in_folder = tab.page.locator("#fs-sidebar details", has_text="Travel")
    expect(pinned.get_by_role("heading")).to_have_text("Pinned")
    expect(pinned.get_by_role("link")).to_have_text("A week in LisbonTravel")
    expect(in_folder.get_by_role("link")).to_have_text("A week in LisbonPinned")
    in_folder.get_by_role("button", name="What to do with").click()
    tab.page.get_by_role("menuitem", name="Rename").click()
    expect(in_folder.get_by_label("Title")).to_be_focused()
    tab.page.keyboard.type("Porto")
    tab.page.keyboard.press("Enter")
    expect(_chat(tab, "Porto")).to_have_count(2)
    for _ in range(2):  # both are one step
        tab.page.keyboard.press("Alt+ArrowDown")
    expect(_chat(tab, "What RoPE is")).to_have_attribute("aria-current", "page")
    tab.shoot("pinned-in-a-folder")


def test_a_search_opens_a_chat_at_the_message_that_it_found(open_tab: Callable[..., Tab], folder: Path) -> None:
    history = History(folder / "history.db")
    chat, parent = history.create_chat("Long"), None
    for number in range(120):
        words = "the hidden treasure" if number == 3 else f"words {number}\n" * 8
        parent = history.add(chat.id, parent, "assistant" if number % 2 else "user", words).id
    history.close()
    tab = open_tab()
    tab.page.keyboard.press("Control+k")
    tab.page.keyboard.type('"hidden treasure"')
    expect(tab.page.locator("#fs-sidebar mark")).to_have_text(["hidden treasure"])
    tab.page.keyboard.press("Enter")
    expect(tab.answers.filter(has_text="hidden treasure")).to_be_in_viewport()


def test_keys_search_and_switch_chats(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    expect(_chat(tab, "Lifetimes in Rust")).to_be_visible()
    tab.page.keyboard.press("Control+k")
    tab.page.keyboard.type("needle LISB")
    expect(tab.page.locator("#fs-sidebar mark")).to_have_text(["Lisb", "LISB", "needle"])
    tab.page.keyboard.press("Enter")
    expect(tab.answers.last).to_contain_text("LISBON")
    tab.page.keyboard.press("Control+k")
    tab.page.keyboard.type("nowhere")
    expect(tab.page.locator("#fs-sidebar")).to_contain_text("Nothing has")
    tab.page.keyboard.press("Escape")
    wait_until(lambda: _titles(tab) == ["What RoPE is", "A week in Lisbon", "Lifetimes in Rust"])
    tab.page.keyboard.press("Alt+ArrowDown")
    expect(tab.answers.last).to_contain_text("RUST")
    tab.page.keyboard.press("Alt+ArrowUp")
    tab.page.keyboard.press("Alt+ArrowUp")
    expect(tab.answers.last).to_contain_text("ROPE")


@pytest.mark.parametrize(("form", "ending"), [("JSON", "json"), ("Markdown", "md")])
def test_a_chat_goes_out_as_a_file_and_comes_in_again(
    open_tab: Callable[..., Tab],
    tmp_path: Path,
    form: str,
    ending: str,
) -> None:
    tab = open_tab()
    expect(_chat(tab, "What RoPE is")).to_be_visible()
    with tab.page.expect_download() as download:
        _choose(tab, "What RoPE is", f"Export as {form}")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == f"What RoPE is.{ending}"
    (tmp_path / "bad.json").write_text("{}")
    tab.page.get_by_label("Import chats").set_input_files([file, tmp_path / "bad.json"])
    expect(_chat(tab, "What RoPE is")).to_have_count(2)
    expect(tab.page.locator("#fs-sidebar").get_by_role("alert")).to_contain_text(
        "bad.json: This file cannot be imported"
    )


def test_a_chats_settings_reach_the_model_and_are_kept_as_a_preset(
    open_tab: Callable[..., Tab],
    house: House,
) -> None:
    tab = open_tab()
    tab.box.fill("hello")
    tab.page.get_by_role("button", name="Chat settings").click()
    tab.page.get_by_label("Model of this chat").select_option("other-model")
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature", exact=True).fill("3")
    tab.press("Save")
    assert not tab.page.get_by_label("Temperature", exact=True).evaluate("box => box.validity.valid")
    tab.page.get_by_label("Temperature", exact=True).fill("0.25")
    tab.page.get_by_label("Stop texts").fill("END\n\\n\\n")
    tab.page.get_by_label("Keep these as a preset").fill("Mine")
    tab.press("Keep preset")
    expect(tab.page.get_by_role("combobox", name="Preset")).to_contain_text("Mine")
    tab.shoot("chat_settings")
    tab.press("Save")
    expect(tab.page.get_by_role("dialog")).to_have_count(0)
    expect(tab.box).to_have_value("hello")
    tab.box.press("Enter")
    expect(tab.finished).to_have_count(1)
    request = house.service.requests[-1]
    assert request.messages[0].content == "Be brief." and request.model == "other-model"
    assert (request.sampling.temperature, request.sampling.stop) == (0.25, ("END", "\n\n"))
    expect(_chat(tab, "hello")).to_be_visible()
    tab.press("New chat")
    tab.page.get_by_role("button", name="Chat settings").click()
    expect(tab.page.get_by_label("System prompt")).to_have_value("")
    tab.page.get_by_role("combobox", name="Preset").select_option("Mine")
    expect(tab.page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(tab.page.get_by_label("Temperature", exact=True)).to_have_value("0.25")


def test_a_file_is_counted_sent_along_and_refused_where_it_is_no_text(
    open_tab: Callable[..., Tab],
    house: House,
) -> None:
    tab = open_tab()
    code = {"name": "sum.py", "mimeType": "text/plain", "buffer": b"print(1 + 1)\n"}
    photo = {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\0"}
    tab.page.get_by_label("Attach").last.set_input_files([code, photo])
    attached = tab.page.get_by_role("list", name="Attached files").get_by_role("listitem")
    expect(attached.filter(has_text="sum.py")).to_contain_text("7 tokens")
    tab.send("What does it print?")
    expect(tab.page.get_by_text("photo.png could not be read. Remove it")).to_be_visible()
    assert house.service.requests == [] and tab.box.input_value() == "What does it print?"
    tab.shoot("attachments")
    tab.page.get_by_role("button", name="Remove photo.png").click()
    expect(tab.page.get_by_text("photo.png could not be read. Remove it")).to_be_hidden()
    expect(tab.box).to_be_focused()
    tab.box.press("Enter")
    expect(tab.finished).to_have_count(1)
    assert house.service.requests[-1].messages[-1].content == (
        "File: sum.py\n```py\nprint(1 + 1)\n```\n\nWhat does it print?"
    )
    expect(attached).to_have_count(0)


def test_files_that_have_no_room_in_the_context_are_not_sent(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    halves = [{"name": f"{i}.txt", "mimeType": "text/plain", "buffer": b"word " * 5000} for i in (1, 2)]
    tab.page.get_by_label("Attach").last.set_input_files(halves)
    attached = tab.page.get_by_role("list", name="Attached files").get_by_role("listitem")
    expect(attached).to_contain_text(["5,004 tokens", "5,004 tokens"])
    tab.send("What do they say?")
    expect(tab.page.get_by_text("have 10,008 tokens, and the model's context has 8,192")).to_be_visible()
    assert house.service.requests == [] and tab.box.input_value() == "What do they say?"
    tab.page.get_by_role("button", name="Remove 2.txt").click()
    tab.box.press("Enter")
    wait_until(lambda: len(house.service.requests) == 1)
    tab.stop.click()


def test_what_an_edit_was_refused_for_goes_with_it(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.send("say: hello")
    expect(tab.finished).to_have_count(1)
    for leave in ("Escape", "Enter"):
        tab.box.press("ArrowUp")
        edited = tab.page.get_by_role("textbox", name="Edit your message")
        edited.fill(" ")
        edited.press("Enter")
        expect(tab.page.get_by_text("The message is empty")).to_be_visible()
        edited.fill("say: again")
        edited.press(leave)
        expect(tab.page.get_by_text("The message is empty")).to_have_count(0)
    expect(tab.finished.last).to_contain_text("again")


def test_a_message_goes_with_its_file_to_the_chat_that_it_was_written_in(
    open_tab: Callable[..., Tab], house: House, tmp_path: Path
) -> None:
    tab, held = open_tab(), list[Any]()
    tab.page.route("**/ui/attachments?*", lambda route: held.append(route))
    (tmp_path / "note.txt").write_text("the note")
    _chat(tab, "A week in Lisbon").click()
    tab.page.get_by_label("Attach", exact=True).set_input_files(tmp_path / "note.txt")
    wait_until(lambda: (tab.page.wait_for_timeout(20), len(held) == 1)[1])
    tab.send("say: for Lisbon")
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    tab.box.fill("a draft about RoPE")
    held[0].continue_()
    wait_until(lambda: (tab.page.wait_for_timeout(20), len(house.service.requests) == 1)[1])
    tab.page.wait_for_timeout(200)
    assert tab.box.input_value() == "a draft about RoPE"
    expect(tab.answers).to_have_count(1)
    _chat(tab, "A week in Lisbon").click()
    expect(tab.finished.last).to_contain_text("for Lisbon")
    expect(tab.page.get_by_text("note.txt", exact=True)).to_be_visible()


def test_a_refused_message_is_the_draft_of_its_own_chat(open_tab: Callable[..., Tab]) -> None:
    tab, held = open_tab(), list[Any]()
    tab.page.route("**/ui/talk/send", lambda route: held.append(route))
    _chat(tab, "A week in Lisbon").click()
    tab.send("about Lisbon")
    wait_until(lambda: (tab.page.wait_for_timeout(20), len(held) == 1)[1])
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    held[0].fulfill(status=503, json={"error": {"message": "Not now."}})
    tab.page.wait_for_timeout(200)
    assert tab.box.input_value() == ""
    _chat(tab, "A week in Lisbon").click()
    expect(tab.box).to_have_value("about Lisbon")
    expect(tab.page.get_by_text("Not now.")).to_be_visible()
    tab.complaints.clear()


def test_files_of_a_new_chat_do_not_follow_into_another(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    tab = open_tab()
    (tmp_path / "words.txt").write_text("some words")
    tab.page.get_by_label("Attach", exact=True).set_input_files(tmp_path / "words.txt")
    expect(tab.page.get_by_text("words.txt", exact=True)).to_be_visible()
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    expect(tab.page.get_by_text("words.txt")).to_have_count(0)


def test_a_chat_that_is_only_settings_is_listed_and_found_again(open_tab: Callable[..., Tab], house: House) -> None:
    tab, other = open_tab(), open_tab()
    tab.press("Chat settings")
    tab.press("Save")  # nothing was chosen: nothing is kept
    expect(tab.page.locator("#fs-chat-settings")).to_be_hidden()
    assert house.book.kept.chats()[0].title == "What RoPE is"
    tab.press("Chat settings")
    tab.page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    tab.press("Save")
    expect(_chat(tab, "New chat")).to_have_attribute("aria-current", "page")
    expect(_chat(other, "New chat")).to_be_visible()
    tab.page.reload()
    _chat(tab, "What RoPE is").click()
    expect(tab.answers).to_have_count(1)
    _chat(tab, "New chat").click()
    expect(_chat(tab, "New chat")).to_have_attribute("aria-current", "page")
    tab.send("say: short")
    expect(tab.finished.last).to_contain_text("short")
    assert [message.content for message in house.service.requests[-1].messages] == ["Be brief.", "say: short"]


def test_settings_changed_in_two_tabs_are_both_kept(open_tab: Callable[..., Tab], house: House) -> None:
    tab, other = open_tab(), open_tab()
    for each in (tab, other):
        _chat(each, "What RoPE is").click()
        expect(each.answers).to_have_count(1)
        each.press("Chat settings")
    tab.page.get_by_label("Temperature", exact=True).fill("0.5")
    other.page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    for each in (tab, other):
        each.press("Save")
        expect(each.page.locator("#fs-chat-settings")).to_be_hidden()
    (chat,) = (chat for chat in house.book.kept.chats() if chat.title == "What RoPE is")
    assert (chat.system, chat.sampling) == ("Be brief.", {"temperature": 0.5})


def test_of_two_tabs_that_send_at_once_one_gets_its_words_back(open_tab: Callable[..., Tab], house: House) -> None:
    tab, other = open_tab(), open_tab()
    for each in (tab, other):
        _chat(each, "What RoPE is").click()
        expect(each.answers).to_have_count(1)
    held: list[Any] = []
    other.page.route("**/ui/talk/send", lambda route: held.append(route))
    other.send("say: from there")
    wait_until(lambda: len(held) == 1 or other.page.wait_for_timeout(20))
    tab.send("count: 300 every 0.02 as n")
    expect(other.writing).to_have_count(1)
    held[0].continue_()
    expect(other.page.get_by_text("has gone on in another tab")).to_be_visible()
    expect(other.box).to_have_value("say: from there")
    expect(other.page.get_by_role("button", name="Version before")).to_have_count(0)
    other.stop.click()  # from the tab that did not begin it
    expect(tab.finished).to_have_count(2)
    assert house.service.num_open == 0
    other.complaints.clear()


def test_what_is_not_sent_yet_outlives_a_reload_and_a_visit_elsewhere(
    open_tab: Callable[..., Tab], house: House, tmp_path: Path
) -> None:
    for name in ("notes.txt", "bad.bin"):
        (tmp_path / name).write_bytes(b"four words of note" if name == "notes.txt" else b"\0")
    tab = open_tab()
    files = tab.page.get_by_label("Attached files")
    _chat(tab, "What RoPE is").click()
    expect(tab.answers).to_have_count(1)
    tab.page.locator('#fs-composer input[type="file"]').set_input_files([tmp_path / "notes.txt", tmp_path / "bad.bin"])
    expect(files).to_contain_text("tokens")
    tab.box.fill("say: read them")
    _chat(tab, "A week in Lisbon").click()
    expect(files).to_be_hidden()
    expect(tab.box).to_have_value("")
    _chat(tab, "What RoPE is").click()
    expect(files.locator("li")).to_have_count(2)
    tab.page.reload()
    expect(tab.box).to_have_value("say: read them")
    expect(files.locator("li").first).to_contain_text("tokens")
    expect(files).to_contain_text("zero bytes")
    tab.press("Remove bad.bin")
    tab.box.press("Enter")
    expect(tab.finished.last).to_contain_text("read them")
    assert "four words of note" in house.service.requests[-1].messages[-1].content
    tab.page.reload()
    expect(tab.answers).to_have_count(2)
    expect(files).to_be_hidden()
    tab.complaints.clear()


def test_a_long_refusal_leaves_the_name_of_its_file_to_be_read(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    tab = open_tab()
    tab.page.set_viewport_size({"width": 360, "height": 700})
    name = "quarterly-report-with-a-long-name.bin"
    (tmp_path / name).write_bytes(b"\xff\0")
    tab.page.locator('#fs-composer input[type="file"]').set_input_files(tmp_path / name)
    tab.box.fill("a new chat's draft")
    chip = tab.page.get_by_label("Attached files").locator("li")
    expect(chip).to_contain_text("Save it as UTF-8")
    shown, told = chip.locator(".fs-attached-name"), chip.locator(".fs-note")
    for part in (shown, told):
        assert part.evaluate("e => e.scrollWidth <= e.clientWidth && e.getBoundingClientRect().right <= innerWidth")
    assert shown.bounding_box()["width"] > 150 and told.bounding_box()["y"] > shown.bounding_box()["y"]
    tab.shoot("attachment-refused-360")
    tab.page.reload()
    expect(tab.box).to_have_value("a new chat's draft")
    expect(chip).to_contain_text("Save it as UTF-8")
    tab.complaints.clear()


def test_an_incognito_chat_stays_one_over_a_reload_and_its_words_get_into_no_storage(
    open_tab: Callable[..., Tab], tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("hush")
    tab = open_tab()
    tab.press("Incognito")
    tab.box.fill("a secret")
    tab.page.locator('#fs-composer input[type="file"]').set_input_files(tmp_path / "secret.txt")
    expect(tab.page.get_by_label("Attached files")).to_contain_text("tokens")
    assert "secret" not in tab.page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")
    tab.page.get_by_role("link", name="Models", exact=True).click()
    tab.page.get_by_role("link", name="Chat", exact=True).click()
    expect(tab.box).to_have_value("a secret")
    expect(tab.page.locator("#fs-incognito-note")).to_be_visible()
    tab.page.reload()
    expect(tab.page.locator("#fs-incognito-note")).to_be_visible()


def test_settings_belong_to_the_chat_that_they_were_opened_for(open_tab: Callable[..., Tab], folder: Path) -> None:
    tab = open_tab()
    _chat(tab, "A week in Lisbon").click()
    expect(tab.answers.last).to_contain_text("LISBON")
    settings = tab.page.get_by_role("button", name="Chat settings")
    settings.click()
    system = tab.page.get_by_label("System prompt")
    system.fill("Only Lisbon.")
    for keys in ("Alt+ArrowUp", "Alt+ArrowDown", "Alt+ArrowDown", "Control+Shift+O"):
        tab.page.keyboard.press(keys)
    tab.page.get_by_role("button", name="Save", exact=True).click()
    expect(tab.page.locator("#fs-chat-settings")).to_be_hidden()
    history = History(folder / "history.db")
    assert {chat.title: chat.system for chat in history.chats() if chat.system} == {"A week in Lisbon": "Only Lisbon."}
    history.close()
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    tab.page.route("**/ui/chats/*", lambda route: route.abort())
    settings.click()
    expect(tab.page.get_by_text("cannot be reached").first).to_be_visible()
    expect(tab.page.locator("#fs-chat-settings")).to_be_hidden()  # the settings of the other chat stand in it
    tab.complaints.clear()


def test_an_edit_ends_the_answer_that_it_replaces(open_tab: Callable[..., Tab], house: House) -> None:
    tab = open_tab()
    tab.send("count: 5000 every 0.03 as n")
    expect(tab.writing).to_have_count(1)
    tab.press("Edit")
    edited = tab.page.get_by_role("textbox", name="Edit your message")
    edited.fill("say: shorter")
    edited.press("Enter")
    expect(tab.finished.last).to_contain_text("shorter")
    expect(tab.writing).to_have_count(0)
    tab.press("Version before")
    expect(tab.finished.last).to_contain_text("Stopped")


def test_an_incognito_chat_is_not_listed_and_is_gone_once_it_is_left(
    open_tab: Callable[..., Tab],
    house: House,
    folder: Path,
) -> None:
    tab = open_tab()
    expect(_chat(tab, "What RoPE is")).to_be_visible()
    tab.box.fill("not for it")
    tab.page.get_by_label("Attach").last.set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    expect(tab.page.get_by_role("list", name="Attached files")).to_contain_text("tokens")
    tab.press("Incognito")
    expect(tab.box).to_have_value("")
    expect(tab.page.get_by_role("list", name="Attached files")).to_be_hidden()
    tab.send("a secret")
    expect(tab.finished).to_have_count(1)
    address = tab.page.url
    assert "incognito-" in address and len(_titles(tab)) == 3
    tab.page.reload()
    expect(tab.finished.last).to_contain_text("a secret")
    tab.page.get_by_role("link", name="Models", exact=True).click()
    expect(tab.finished).to_be_hidden()
    tab.page.get_by_role("link", name="Chat", exact=True).click()
    expect(tab.finished.last).to_contain_text("a secret")
    expect(tab.page).to_have_url(address)
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    other = open_tab()
    other.page.goto(address)
    expect(other.page.get_by_text("This chat is not there any more")).to_be_visible()
    assert all(b"a secret" not in path.read_bytes() for path in folder.iterdir())


def test_a_screen_reader_finds_no_fault(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    _chat(tab, "What RoPE is").click()
    expect(tab.answers).to_have_count(1)
    tab.page.get_by_role("button", name="What to do with What RoPE is").click()
    faults = axe_findings(tab.page)
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("button", name="Chat settings").click()
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    assert faults + axe_findings(tab.page) == []


def test_a_narrow_window_has_the_list_in_a_drawer(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(width=360, height=740, colors="dark")
    expect(_chat(tab, "What RoPE is")).to_be_hidden()
    tab.page.get_by_role("button", name="List of chats").click()
    tab.shoot("chats_narrow_dark")
    _chat(tab, "What RoPE is").click()
    expect(tab.answers.last).to_contain_text("ROPE")
    expect(_chat(tab, "What RoPE is")).to_be_hidden()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_history_that_cannot_be_read_is_told_and_set_aside(browser: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "history.db"
    damaged.write_bytes(b"no database" * 1000)
    with House(damaged) as broken:
        tab = Tab(browser.new_page(), broken)
        alert = tab.page.locator("#fs-sidebar").get_by_role("alert")
        expect(alert).to_contain_text("its beginning is damaged")
        tab.page.get_by_role("button", name="Move it aside and begin a new history").click()
        expect(tab.page.locator("#fs-sidebar")).to_contain_text("No chats yet")
        tab.send("hello")
        expect(_chat(tab, "hello")).to_be_visible()
        tab.page.close()
    (kept,) = damaged.parent.glob("history-set-aside-*.db")
    assert kept.read_bytes() == b"no database" * 1000
