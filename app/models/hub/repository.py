"""The Hugging Face hub, as far as a model needs it: what a repository holds, its bytes, and its refusals in our words.

huggingface_hub knows the endpoint, the protocol and the token (HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN hold); a token
that was given to Fireside is kept by `token.py`.
"""

import errno
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.errors import AppError

if TYPE_CHECKING:
    import httpx2

# Each of its tries again is a line there; what came of them all is told once, in `hub_errors`.
logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)

BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers after which the same question may be asked again


class RemoteFile(NamedTuple):
    """sha256 is known for large files (LFS), git's blob id for the others; a mirror may know neither."""

    name: str
    num_bytes: int
    sha256: str | None
    blob_id: str | None

    @property
    def is_known_by_hash(self) -> bool:
        return bool(self.sha256 or self.blob_id)


class Listing(NamedTuple):
    """commit: what the revision meant when it was asked. licence: as its card says; "" where it is silent."""

    commit: str
    files: tuple[RemoteFile, ...]
    licence: str = ""

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


def list_repo(repo: str, revision: str | None, token: str | None = None) -> Listing:
    """All files. Raises what huggingface_hub raises: call it inside `hub_errors`.

    A mirror may leave sizes and hashes out of what it says of a repository, and have them in its tree.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    info = api.model_info(repo, revision=revision, files_metadata=True)
    assert info.sha is not None, "the hub names the commit of every model_info answer"
    siblings = info.siblings or []
    if all(found.size is not None and (found.lfs or found.blob_id) for found in siblings):
        files = [_remote(found.rfilename, found) for found in siblings]
    else:
        files = _tree(api, repo, info.sha) or [_remote(found.rfilename, found) for found in siblings]
    return Listing(info.sha, tuple(files), licence_of(info.tags or ()))


def _remote(name: str, found: Any) -> RemoteFile:
    return RemoteFile(name, found.size or 0, found.lfs.sha256 if found.lfs else None, found.blob_id)


def _tree(api: Any, repo: str, commit: str) -> list[RemoteFile]:
    """Empty where there is none to be had."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = list(api.list_repo_tree(repo, revision=commit, recursive=True))
    except HfHubHTTPError:
        return []
    return [_remote(file.path, file) for file in found if hasattr(file, "blob_id")]  # the others are folders


def licence_of(tags: Iterable[str]) -> str:
    """Of a repository's tags; "" where none says."""
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), "")


@contextmanager
def opened(repo: str, commit: str, name: str, byte_range: str, token: str | None = None) -> Iterator["httpx2.Response"]:
    """One file of a commit, streamed; byte_range as HTTP has it, "0-" for all. A server may ignore it: look at the
    status. Raises as `list_repo`, and httpx2.TransportError where the line breaks.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    # Compressed bytes could not be counted, nor taken up in the middle.
    headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity", "Range": f"bytes={byte_range}"}
    url = hf_hub_url(repo, name, revision=commit, endpoint=constants.ENDPOINT)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        hf_raise_for_status(response)
        yield response


@contextmanager
def hub_errors(repo: str, folder: Path | None = None) -> Iterator[None]:
    """Every failure of the hub or the disk becomes an AppError with the next step. folder: where files were to go."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repo}"
    again = "Start again: the download goes on where it stopped." if folder else "Try again."
    try:
        yield
    except GatedRepoError as error:
        hint = (
            f"Accept its terms at {page}, make a token there, and give it in the page's Models, with "
            "`python launch.py models token`, `hf auth login` or HF_TOKEN."
        )
        raise AppError(
            401, "gated_model", f"{repo} is given only to people who accepted its terms.", hint=hint
        ) from error
    except RepositoryNotFoundError as error:
        hint = (
            "Check the spelling (owner/name). A private one needs a token, given in the page's Models or with "
            "`python launch.py models token`."
        )
        raise AppError(404, "model_not_found", f"{page} does not exist, or is private.", hint=hint) from error
    except RevisionNotFoundError as error:
        hint = "Correct `revision` in models.yaml, or leave it out."
        raise AppError(404, "model_not_found", f"{page} has no such revision.", hint=hint) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise AppError(502, "download_failed", f"{page} answered with HTTP {status}.", hint=again) from error
    except OfflineModeIsEnabled as error:
        hint = "Unset HF_HUB_OFFLINE" + (f", or put the model's files into {folder}." if folder else ".")
        raise AppError(503, "download_failed", f"{repo} is not here, and HF_HUB_OFFLINE is set.", hint=hint) from error
    except httpx2.TransportError as error:
        what = f"{constants.ENDPOINT} could not be reached ({type(error).__name__}: {error})."
        hint = f"Check the network, or HF_ENDPOINT where you use a mirror. {again}"
        raise AppError(503, "download_failed", what, hint=hint) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise AppError(507, "disk_full", f"The disk of {folder} is full.", hint=f"Free some space. {again}") from error
