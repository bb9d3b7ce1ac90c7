"""What a load and a batch show on standard error while they run."""

import time

from tqdm import tqdm


class Stages:
    """What a load is doing, on one line that vanishes. Nothing where standard error is no terminal."""

    def __enter__(self) -> "Stages":
        self._bar = tqdm(total=1.0, leave=False, disable=None, bar_format="{desc} {percentage:3.0f}% |{bar:20}|")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, stage: str, fraction: float | None) -> None:
        self._bar.n = fraction or 0.0
        self._bar.set_description_str(stage)


class Bar:
    """Prompts done, and tokens a second read and written so far."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._bar = tqdm(total=num_prompts, desc="Prompts", unit="prompt", disable=not is_shown)
        self._read = self._written = 0
        self._started_s = time.perf_counter()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        self._bar.close()

    def token(self) -> None:
        self._written += 1

    def prompt_done(self, num_tokens: int) -> None:
        self._read += num_tokens
        self._show()
        self._bar.update()

    def _show(self) -> None:
        elapsed_s = time.perf_counter() - self._started_s
        rates = f"in {self._read / elapsed_s:.1f}, out {self._written / elapsed_s:.1f} tokens/s"
        self._bar.set_postfix_str(rates, refresh=False)
