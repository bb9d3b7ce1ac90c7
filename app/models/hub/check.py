"""The files of a folder against what each must be, every byte read; tells how far that is meanwhile."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from app.models.hub.manifest import Manifest, Verdict, verdict
from app.models.hub.report import OnReport, Report, Speed, Transfer, unheard

_REPORT_EVERY_S = 0.2


def verdicts(folder: Path, manifest: Manifest, on_report: OnReport = unheard) -> dict[str, Verdict]:
    """Of every file that the manifest names. on_report is called several times a second; what it raises ends it."""
    return _Check(folder, manifest, on_report).run()


@dataclass(slots=True)
class _Check:
    folder: Path
    manifest: Manifest
    on_report: OnReport
    transfers: list[Transfer] = field(default_factory=list)
    speed: Speed = field(default_factory=Speed)
    told_at: float = -_REPORT_EVERY_S

    def run(self) -> dict[str, Verdict]:
        self.transfers = [Transfer(file.name, file.num_bytes) for file in self.manifest.files]
        found: dict[str, Verdict] = {}
        for file, transfer in zip(self.manifest.files, self.transfers, strict=True):
            transfer.state = "verifying"

            def on_read(num_bytes: int, transfer: Transfer = transfer) -> None:
                transfer.done_bytes += num_bytes
                self.tell()

            found[file.name] = verdict(self.folder / file.name, file, on_read)
            transfer.done_bytes, transfer.state = file.num_bytes, found[file.name]
        self.told_at = -_REPORT_EVERY_S
        self.tell()
        return found

    def tell(self) -> None:
        now = time.monotonic()
        if now - self.told_at < _REPORT_EVERY_S:
            return
        self.told_at = now
        done = sum(transfer.done_bytes for transfer in self.transfers)
        files = tuple(transfer.snapshot() for transfer in self.transfers)
        self.on_report(Report(self.manifest.repo or self.folder.name, "verifying", files, self.speed.of(done)))
