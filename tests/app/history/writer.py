"""A process that writes into a history and says what was acknowledged, until it is killed. Run by the tests of kills.

python -m tests.app.history.writer FILE    prints "ID TEXT" once each write has returned
"""

import sys
from pathlib import Path

from app.history.history import History


def main() -> None:
    history = History(Path(sys.argv[1]))
    chat_id = history.create_chat("chat").id
    parent_id = None
    for turn in range(10**6):
        asked = history.add(chat_id, parent_id, "user", f"question {turn}")
        _acknowledge(asked.id, asked.text)
        parent_id = history.add(chat_id, asked.id, "assistant", state="writing").id
        text = ""
        for piece in range(5):
            text += f"piece {piece} of {turn} " * 20
            history.write(parent_id, text=text)
            _acknowledge(parent_id, text)
        history.write(parent_id, state="done")


def _acknowledge(node_id: str, text: str) -> None:
    sys.stdout.write(f"{node_id} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
