"""Download models from Hugging Face's hub, or find them in its cache, and explain failures in a sentence.

The library reads its own variables: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and HF_ENDPOINT, for a mirror.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import huggingface_hub  # which imports its parts, and an HTTP client, when one of them is used

from servekit.errors import ConfigError

log = logging.getLogger("servekit")

# Weights as safetensors, configuration and tokenizer as JSON or plain text; no Python files and no pickles.
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# Further copies of the same weights, for their authors' own code and for other programs.
IGNORED = ["original/*", "consolidated*", "onnx/*"]
PICKLED_WEIGHTS = "pytorch_model*.bin"

UNREACHED_S = 10.0  # for so long, a hub that could not be reached is not asked again


class ModelNotDownloaded(ConfigError):
    """The model is named by an id of Hugging Face, and has not been downloaded to this machine."""


class FileNotInRepository(ConfigError):
    """The repository has no such file, or the cache has none and HF_HUB_OFFLINE forbids to look further."""


def split_revision(model: str, revision: str | None) -> tuple[str, str | None]:
    """Return the id and the revision of `org/name@revision`. `revision` is the value of --revision.

    Raises ConfigError if both name a revision, and not the same one.
    """
    name, separator, named = model.partition("@")
    if not separator:
        return model, revision
    if not named or revision not in (None, named):
        raise ConfigError(
            f"model {model!r} names the revision {named!r}, and --revision {revision!r}; give one of them"
            if named
            else f"model {model!r} ends with @ and names no revision; write it like org/name@main"
        )
    return name, named


def download_snapshot(
    model: str, revision: str | None, *, may_download: bool = True, with_pickled_weights: bool = False
) -> Path:
    """Return the directory of a model in the cache; download what it lacks.

    Raises ConfigError, and ModelNotDownloaded for what would have to be downloaded, and must not be.
    """
    patterns = [*DOWNLOADED, PICKLED_WEIGHTS] if with_pickled_weights else DOWNLOADED
    return _download(
        model,
        revision,
        lambda: huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=IGNORED,
            local_files_only=not (may_download and _hub.is_reached(model, "config.json", revision)),
        ),
        may_download,
    )


def download_file(repository: str, name: str, revision: str | None, *, may_download: bool = True) -> Path:
    """Return the path of one file of a repository in the cache; download it if necessary. Raises the same errors."""
    return _download(
        repository,
        revision,
        lambda: huggingface_hub.hf_hub_download(
            repository,
            name,
            revision=revision,
            local_files_only=not (may_download and _hub.is_reached(repository, name, revision)),
        ),
        may_download,
    )


def list_files(model: str, revision: str | None) -> list[str]:
    """Return the names of all files in a model's repository; none if it cannot be asked."""
    try:
        return huggingface_hub.HfApi().list_repo_files(model, revision=revision)
    except Exception:  # of the library, and of the HTTP client that it happens to use
        return []


class _Hub:
    """Asks the hub once before a download, so that a server without a network reports a missing model within seconds.

    For a file that is not in the cache, the library asks six more times. That takes 23 s if there is no network, and
    six minutes if the network drops packets. For a snapshot, it then waits without limit. It has no setting for that.
    This class asks once, with the timeout HF_HUB_ETAG_TIMEOUT, which is 10 s by default.
    """

    def __init__(self) -> None:
        self._unreached_s = -inf  # when the hub could last not be reached; files are often looked for one after another

    def is_reached(self, repository: str, name: str, revision: str | None) -> bool:
        """Return whether the hub answers a request for this file, with whatever status.

        Raises the library's HFValidationError.
        """
        from huggingface_hub import errors

        url = huggingface_hub.hf_hub_url(repository, name, revision=revision)
        if time.monotonic() - self._unreached_s < UNREACHED_S:
            return False
        try:
            huggingface_hub.get_hf_file_metadata(url)
        except errors.HfHubHTTPError:
            return True
        except Exception:  # of the HTTP client that the library uses, which may change, or because of HF_HUB_OFFLINE
            self._unreached_s = time.monotonic()
            return False
        return True


_hub = _Hub()


def _download(model: str, revision: str | None, download: Callable[[], str], may_download: bool) -> Path:
    from huggingface_hub.errors import HFValidationError

    at = "" if revision is None else f" at revision {revision}"
    if may_download:
        log.info("looking for %s%s %s", model, at, _place())
    try:
        return Path(download())
    except HFValidationError as error:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id: {error}") from None
    except Exception as error:  # of the library, and of the HTTP client that it happens to use
        if not may_download:
            raise ModelNotDownloaded(f"model {model!r} is not a local directory, and has not been downloaded") from None
        kind = FileNotInRepository if _says_no_such_file(error) else ConfigError
        raise kind(f"model {model!r} {_explain(model, revision, error)}") from None


def _place() -> str:
    from huggingface_hub import constants

    return f"in the cache {constants.HF_HUB_CACHE}" if constants.HF_HUB_OFFLINE else f"at {constants.ENDPOINT}"


def _says_no_such_file(error: Exception) -> bool:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return bool(constants.HF_HUB_OFFLINE)  # otherwise the network has failed
    return isinstance(error, errors.RemoteEntryNotFoundError)


def _explain(model: str, revision: str | None, error: Exception) -> str:
    """Return why a download failed, and what to do, as the end of a sentence that begins with the model."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # why it looked in the cache
    match error:
        case errors.GatedRepoError():
            if huggingface_hub.get_token() is None:
                return (
                    f"is gated: ask for access at {page} with your Hugging Face account, and set HF_TOKEN to a token "
                    "of this account with the permission to read (https://huggingface.co/settings/tokens)"
                )
            return (
                f"is gated, and the account of the token in HF_TOKEN has no access to it: ask for access at {page}, or "
                "set HF_TOKEN to a token of an account that has it"
            )
        case errors.RevisionNotFoundError():
            return f"has no branch, tag or commit {revision!r}; {page}/tree/main lists them"
        case errors.RepositoryNotFoundError():
            rest = (
                "if it is private, set HF_TOKEN to a token of an account that can read it"
                if huggingface_hub.get_token() is None
                else "if it is private, the account of the token in HF_TOKEN cannot read it, or the token is not valid"
            )
            return f"is not a local directory, and there is no repository {page}; check the name; {rest}"
        case errors.RemoteEntryNotFoundError():
            return f"has no such file; {page}/tree/{revision or 'main'} lists its files"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            rest = "; the token in HF_TOKEN is not valid: renew it, or unset it" if status in (401, 403) else ""
            return f"could not be downloaded: {constants.ENDPOINT} answered with HTTP status {status}{rest}"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            command = f"hf download {model}" + ("" if revision is None else f" --revision {revision}")
            return (
                f"is not in the cache {constants.HF_HUB_CACHE}, or not all of it, and HF_HUB_OFFLINE forbids to "
                f"download it: run `{command}` where there is a network and copy the cache (HF_HOME names its "
                "directory), or give a directory"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"is not a local directory, not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot "
                "be reached; check the name and the network, or give a directory"
            )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())[:300]
    return f"could not be downloaded to {constants.HF_HUB_CACHE}: {type(error).__name__}: {reason}"
