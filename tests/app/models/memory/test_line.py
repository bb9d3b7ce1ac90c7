"""The line of loads: order, and whom it lets by."""

import asyncio

from app.models.memory.line import Line, Place


async def _next(place: Place) -> bool:
    """Whether its turn has come."""
    turn = asyncio.ensure_future(place.turn())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return turn.done()


async def test_turns_come_in_the_order_of_joining_not_of_waiting() -> None:
    line = Line()
    first, second = line.join(), line.join()
    waiting = asyncio.ensure_future(second.turn())
    await asyncio.sleep(0)
    assert not waiting.done(), "the first looks at its files still, and is before it"
    assert await _next(first)
    first.leave()
    await waiting


async def test_whoever_fetches_lets_others_by_and_has_its_place_when_it_is_back() -> None:
    line = Line()
    fetching, second, third = line.join(), line.join(), line.join()
    fetching.step_aside(True)
    assert await _next(second)
    fetching.step_aside(False)
    waiting = [asyncio.ensure_future(third.turn()), asyncio.ensure_future(fetching.turn())]
    await asyncio.sleep(0)
    second.leave()
    await waiting[1]
    assert not waiting[0].done()
    fetching.leave()
    await waiting[0]


async def test_whoever_leaves_before_its_turn_holds_nobody_up() -> None:
    line = Line()
    first, second, third = line.join(), line.join(), line.join()
    assert await _next(first)
    waiting = asyncio.ensure_future(second.turn())
    await asyncio.sleep(0)
    waiting.cancel()
    second.leave()
    first.leave()
    first.leave()
    assert await _next(third)
