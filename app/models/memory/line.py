"""Who may load: one at a time, in the order of asking. Whoever has to fetch files first lets the others by."""

import asyncio


class Line:
    def __init__(self) -> None:
        self._places: list[Place] = []
        self._at_work: Place | None = None

    def join(self) -> "Place":
        """A place behind all who asked before. Give it back with `leave`."""
        self._places.append(Place(self))
        return self._places[-1]

    def _move(self) -> None:
        first = next((place for place in self._places if not place.is_aside), None)
        if self._at_work is None and first is not None and first.waits:
            self._at_work = first
            first.call()

    def _left_by(self, place: "Place") -> None:
        self._places = [other for other in self._places if other is not place]
        if self._at_work is place:
            self._at_work = None
        self._move()


class Place:
    """is_aside  others may pass"""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._called: asyncio.Future[None] | None = None
        self.is_aside = False

    @property
    def waits(self) -> bool:
        return self._called is not None and not self._called.done()

    def call(self) -> None:
        assert self._called is not None
        self._called.set_result(None)

    def step_aside(self, is_aside: bool) -> None:
        self.is_aside = is_aside
        self._line._move()

    async def turn(self) -> None:
        """Wait for it; it lasts until `leave`."""
        self._called = asyncio.get_running_loop().create_future()
        self._line._move()
        await self._called

    def leave(self) -> None:
        """Twice is the same as once."""
        self._line._left_by(self)
