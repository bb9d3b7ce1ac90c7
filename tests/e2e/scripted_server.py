"""The server of tabs.py as a process of its own, which a test can kill.

python -m tests.e2e.scripted_server HISTORY [PORT]

It tells its port in its first line, and ends with its input.
"""

import sys
from pathlib import Path

from tests.e2e.tabs import House


def main() -> None:
    with House(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) as house:
        print(house.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
