"""ModelManager over a scripted shelf and scripted engines: who waits, who is refused, who gets a new child."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app import settings
from app.errors import AppError
from app.models.manager import ModelManager
from app.models.status import ModelStatus, total_of
from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.types import EngineStats
from tests.app.models.scripted import Child, Engines, ThreeModels, managed, until
from tests.fakes import memory_report


@pytest.fixture
async def manager(tmp_path: Path, shelf: ThreeModels, engines: Engines) -> AsyncIterator[ModelManager]:
    async with managed(tmp_path, shelf, engines, max_num_seqs=5, kv_gb=0.5) as made:
        yield made


async def test_a_request_waits_for_the_load_and_every_name_of_the_model_leads_to_it(
    manager: ModelManager, engines: Engines, tmp_path: Path
) -> None:
    engines.gate.clear()
    manager.load("uno")
    waiting = [asyncio.create_task(manager.acquire(name)) for name in ("", "one", "uno")]
    await until(lambda: manager.status().stage == "reading weights")
    assert (manager.status().state, manager.status().model, manager.status().fraction) == ("loading", "one", 0.25)
    engines.gate.set()
    models = await asyncio.gather(*waiting)
    assert all(model is models[0] for model in models)
    assert (models[0].id, models[0].folder, models[0].info.max_model_len) == ("one", tmp_path / "one", 1000)
    assert manager.status().state == "ready"


async def test_the_engine_gets_what_the_settings_say(manager: ModelManager, engines: Engines, tmp_path: Path) -> None:
    manager.load("one")
    await manager.acquire("")
    options = {"max_num_seqs": 5, "kv_gb": 0.5, "cache_dir": str(tmp_path / "cache")}
    assert engines.children[0].config == EngineConfig(model=str(tmp_path / "one"), **options)
    assert engines.silence_s == 600


async def test_a_models_own_way_of_loading_goes_before_the_settings(engines: Engines, tmp_path: Path) -> None:
    async with managed(tmp_path, ThreeModels(tmp_path), engines, max_model_len=99, max_num_seqs=5) as manager:
        for name in ("two", "three"):
            manager.load(name)
            await manager.acquire("")
    found = [(c.config.max_model_len, c.config.kv_cache_dtype, c.config.max_num_seqs) for c in engines.children]
    assert found == [(512, "int8", 5), (99, "auto", 5)]


async def test_settings_that_change_hold_for_the_next_load_and_what_is_loaded_stays(
    manager: ModelManager, engines: Engines, tmp_path: Path
) -> None:
    manager.load("one")
    await manager.acquire("")
    manager.follow(settings.load({"home": tmp_path, "max_model_len": 64, "load_on_request": False}, {}))
    with pytest.raises(AppError, match="not loaded"):
        await manager.acquire("three")
    assert len(engines.children) == 1
    manager.load("three")
    await manager.acquire("")
    assert engines.children[-1].config.max_model_len == 64


async def test_the_catalogues_sampling_goes_with_the_model(manager: ModelManager) -> None:
    manager.load("one")
    assert (await manager.acquire("")).sampling == {"temperature": 0.2}


async def test_what_was_made_smaller_to_fit_is_said_in_the_log(
    manager: ModelManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.load("one")
    await manager.acquire("")
    assert "one: The context was made smaller." in caplog.text


async def test_what_is_odd_about_the_models_text_is_said_at_the_load(
    manager: ModelManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.load("one")
    await manager.acquire("")
    assert "one: one has no template." in caplog.text


@pytest.mark.parametrize(
    ("model", "code"), [("four", "model_not_found"), ("two", "model_not_loaded"), ("owner/other", "model_not_found")]
)
async def test_without_loads_on_request_a_model_that_is_not_in_hand_is_refused_at_once(
    tmp_path: Path, shelf: ThreeModels, engines: Engines, model: str, code: str
) -> None:
    engines.gate.clear()
    async with managed(tmp_path, shelf, engines, load_on_request=False) as manager:
        manager.load("one")
        with pytest.raises(AppError) as refused:
            await manager.acquire(model)
        assert (refused.value.status, refused.value.code, refused.value.param) == (404, code, "model")
        assert "`one`" in refused.value.text


async def test_a_dead_child_is_replaced_once_however_many_ask(manager: ModelManager, engines: Engines) -> None:
    manager.load("one")
    first = await manager.acquire("")
    engines.children[0].die()
    assert manager.status().state == "failed"
    assert manager.stats() is None
    again = await asyncio.gather(*(manager.acquire("one") for _ in range(20)))
    assert len(engines.children) == 2
    assert all(model.child is engines.children[1] for model in again)
    assert first.child is engines.children[0]


async def test_a_failed_load_tells_its_reason_and_is_not_tried_again_at_once(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    engines.errors = [OutOfMemory("Needs 9 GB, 4 GB are free. Choose a smaller model.")]
    async with managed(tmp_path, shelf, engines, retry_pause_s=600) as manager:
        manager.load("one")
        for _ in range(2):
            with pytest.raises(AppError) as refused:
                await manager.acquire("")
            assert (refused.value.status, refused.value.code) == (503, "out_of_memory")
            assert "Needs 9 GB" in refused.value.text
        assert manager.status().state == "failed"
        assert "Needs 9 GB" in manager.health().detail


async def test_a_failed_load_is_tried_again_after_a_pause(manager: ModelManager, engines: Engines) -> None:
    engines.errors = [OutOfMemory("no")]
    manager.load("one")
    with pytest.raises(AppError):
        await manager.acquire("")
    await asyncio.sleep(0.25)
    assert (await manager.acquire("")).child is engines.children[0]


async def test_a_failed_load_can_be_begun_again_at_once(manager: ModelManager, engines: Engines) -> None:
    engines.errors = [OutOfMemory("no")]
    manager.load("one")
    with pytest.raises(AppError):
        await manager.acquire("")
    manager.load("two")
    assert (await manager.acquire("two")).id == "two"


async def test_a_bug_in_a_load_is_told_and_logged_and_the_app_goes_on(
    manager: ModelManager, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engines.errors = [ZeroDivisionError("oops")]
    manager.load("one")
    with pytest.raises(AppError, match="ZeroDivisionError: oops"):
        await manager.acquire("")
    assert "loading one failed" in caplog.text


async def test_an_unknown_model_at_the_start_is_a_failed_load(manager: ModelManager) -> None:
    manager.load("nowhere")
    with pytest.raises(AppError, match="no nowhere"):
        await manager.acquire("")
    assert manager.status().state == "failed"


async def test_loading_another_model_closes_the_child_first_and_one_chosen_before_is_given_up(
    manager: ModelManager, engines: Engines
) -> None:
    manager.load("one")
    await manager.acquire("")
    engines.gate.clear()
    manager.load("two")
    await until(lambda: manager.status().stage == "reading weights")
    assert engines.children[0].is_closed
    waiting = asyncio.create_task(manager.acquire(""))
    await asyncio.sleep(0)
    manager.load("three")
    await until(lambda: engines.num_cancelled == 1)
    engines.gate.set()
    assert (await waiting).id == "three"
    assert not manager.holds("two") and not manager.holds("one")


async def test_an_unknown_name_is_told_what_comes_near_and_who_lists_all(manager: ModelManager) -> None:
    manager.load("one")
    with pytest.raises(AppError) as refused:
        await manager.acquire("gpt-4o")
    assert refused.value.hint == "`one` is in hand. GET /v1/models lists all."
    with pytest.raises(AppError) as refused:
        await manager.acquire("on3")
    assert refused.value.hint == "`one` is in hand. Did you mean one? GET /v1/models lists all."


async def test_with_the_fallback_an_unknown_name_means_the_model_in_hand_and_a_known_one_itself(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    async with managed(tmp_path, shelf, engines, model_fallback=True) as manager:
        manager.load("one")
        assert (await manager.acquire("gpt-4o")).id == "one"
        assert (await manager.acquire("two")).id == "two"


async def test_closing_while_an_engine_starts_ends_it_and_whoever_waits(
    manager: ModelManager, engines: Engines
) -> None:
    engines.gate.clear()
    manager.load("one")
    waiting = asyncio.create_task(manager.acquire(""))
    await until(lambda: manager.status().stage == "reading weights")
    await manager.close()
    with pytest.raises(AppError, match="ending"):
        await waiting
    assert engines.num_cancelled == 1
    with pytest.raises(AppError, match="ending"):
        await manager.acquire("")


async def test_closing_in_the_middle_of_a_fetch_stops_its_thread(
    manager: ModelManager, shelf: ThreeModels, engines: Engines
) -> None:
    shelf.may_end.clear()
    before = {*threading.enumerate()}
    manager.load("one")
    await until(lambda: manager.status().stage == "Fetching")
    assert manager.health().detail == "Fetching (50%)"
    await manager.close()
    await until(lambda: before.issuperset(threading.enumerate()))
    assert engines.children == []


async def test_closing_ends_the_child(manager: ModelManager, engines: Engines) -> None:
    manager.load("one")
    await manager.acquire("")
    await manager.close()
    assert engines.children[0].is_closed


async def test_a_caller_that_leaves_does_not_end_the_load_for_the_others(
    manager: ModelManager, engines: Engines
) -> None:
    engines.gate.clear()
    manager.load("one")
    leaving, staying = (asyncio.create_task(manager.acquire("")) for _ in range(2))
    await until(lambda: manager.status().stage == "reading weights")
    leaving.cancel()
    await asyncio.sleep(0)
    engines.gate.set()
    assert (await staying).id == "one"


async def test_the_cards_tell_which_model_is_loaded_and_with_how_much_room(manager: ModelManager) -> None:
    assert [(card.id, card.state) for card in manager.cards()[:2]] == [("one", "unloaded"), ("two", "unloaded")]
    manager.load("one")
    assert manager.cards()[0].state == "loading"
    await manager.acquire("")
    one, two, _ = manager.cards()
    assert (one.state, one.max_model_len, one.context_length) == ("loaded", 1000, 2000)
    assert (two.state, two.max_model_len) == ("unloaded", None)
    assert manager.stats() == EngineStats(num_steps=7)


async def test_without_a_load_there_is_no_model(manager: ModelManager) -> None:
    assert manager.status().state == "empty"
    with pytest.raises(AppError, match="No model is loaded"):
        await manager.acquire("")


async def test_unloading_frees_the_engine_and_the_next_request_loads_it_again(
    manager: ModelManager, engines: Engines
) -> None:
    manager.load("uno")
    assert manager.holds("") and manager.holds("uno") and not manager.holds("two")
    await manager.acquire("")
    assert manager.holds("one") and manager.cards()[0].architecture == "llama"
    await manager.unload("uno")
    assert engines.children[0].is_closed and manager.status().state == "empty" and not manager.holds("")
    assert (await manager.acquire("")).child is engines.children[1]
    await manager.unload("")
    await manager.unload("")


async def test_without_loads_on_request_an_unloaded_model_stays_away(
    tmp_path: Path, shelf: ThreeModels, engines: Engines
) -> None:
    async with managed(tmp_path, shelf, engines, load_on_request=False) as manager:
        manager.load("one")
        await manager.acquire("")
        await manager.unload("one")
        for name, code in (("", "no_model"), ("one", "model_not_loaded")):
            with pytest.raises(AppError) as refused:
                await manager.acquire(name)
            assert refused.value.code == code and "POST /models/load" in refused.value.hint
        manager.load("two")
        assert (await manager.acquire("two")).id == "two"


async def test_unloading_in_the_middle_of_a_load_ends_it(manager: ModelManager, engines: Engines) -> None:
    engines.gate.clear()
    manager.load("one")
    await until(lambda: manager.status().stage == "reading weights")
    await manager.unload("one")
    assert engines.num_cancelled == 1 and manager.status().state == "empty"


async def test_memory_is_that_of_the_model_in_hand(manager: ModelManager) -> None:
    assert manager.memory() is None
    with pytest.raises(AppError, match="No model is loaded"):
        await manager.resize_kv(1)
    manager.load("one")
    await manager.acquire("one")
    assert manager.memory() == memory_report("The context was made smaller.")
    assert (await manager.resize_kv(40)).kv_bytes == 60
    with pytest.raises(AppError, match="At most 100 bytes") as refused:
        await manager.resize_kv(101)
    assert refused.value.status == 400


async def test_a_load_waits_until_what_was_unloaded_has_given_its_memory_back(
    manager: ModelManager, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_close, close = asyncio.Event(), Child.close

    async def close_slowly(child: Child) -> None:
        await may_close.wait()
        await close(child)

    monkeypatch.setattr(Child, "close", close_slowly)
    manager.load("one")
    await manager.acquire("one")
    unloading = asyncio.create_task(manager.unload("one"))
    await until(lambda: manager.status().state == "empty")
    manager.load("two")
    await asyncio.sleep(0.05)
    assert len(engines.children) == 1 and engines.children[0].is_alive
    may_close.set()
    await unloading
    assert (await manager.acquire("two")).id == "two" and not engines.children[0].is_alive


def test_figures_of_several_engines_are_counts_added_up_and_the_longest_times() -> None:
    one = EngineStats(num_requests_running=2, steps_by_tokens=(1, 2), last_step_age_s=0.5, prompt_tokens=7)
    two = EngineStats(num_requests_running=1, steps_by_tokens=(3, 4), last_step_age_s=2.5, load_s=9)
    total = EngineStats(num_requests_running=3, steps_by_tokens=(4, 6), last_step_age_s=2.5, prompt_tokens=7, load_s=9)
    assert total_of([one, two]) == total and total_of([one]) == one and total_of([one, EngineStats()]) == one


@pytest.mark.parametrize(("fraction", "told"), [(None, "reading weights"), (0.4, "reading weights (40%)")])
def test_a_status_is_one_line_for_people(fraction: float | None, told: str) -> None:
    assert ModelStatus(state="loading", stage="reading weights", fraction=fraction).detail == told
    left = ModelStatus(state="loading", stage="reading", fraction=0.5, seconds_left=3.4)
    assert left.detail == "reading (50%, about 3 s left)"
