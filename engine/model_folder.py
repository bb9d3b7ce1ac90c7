"""From a model's name to its folder, for the engine's command-line tools. The engine itself takes folders alone."""

import subprocess
import sys
from pathlib import Path


def model_folder(name: str) -> str:
    """A folder as it is; any other name through the app, in a process of its own: the engine knows no catalogue.

    Raises SystemExit, after the app has said on standard error why there is no such model.
    """
    if Path(name, "config.json").exists():
        return name
    command = [sys.executable, "-m", "app.models.fetch", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.strip().splitlines()[-1]
