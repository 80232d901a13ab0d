"""The errors of this package, and one-line explanations of errors of the Hub, the disk and configs."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the client that the Hub's package uses: httpx or, since 2.0, httpx2
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)


# Parts of the messages of torch and Python for sizes that no memory can hold.
TOO_LARGE = (
    *("allocate memory", "overflowed with sizes", "multiplication overflow", "Overflow when unpacking"),
    "too large to convert",
)


class LRAttnResError(ValueError):
    """Unusable input. The message names the file, field or option, its value, and what to do."""


class HubError(LRAttnResError):
    """A request to the Hub failed."""


@contextmanager
def clear_hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn everything that a request about `repo_id` can raise into a `HubError`."""
    try:
        yield
    except HubError:
        raise
    except HfHubHTTPError as error:
        raise HubError(_explain_status(error, repo_id, revision)) from error
    except HFValidationError as error:
        raise HubError(f"{repo_id!r} is not a repository name: {_first_line(error)}") from error
    except LocalTokenNotFoundError as error:
        raise HubError("there is no Hub token: run `hf auth login`, set HF_TOKEN or give a token.") from error
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set, so the Hub cannot be reached: unset it.") from error
    except (HTTPError, ConnectionError, RuntimeError) as error:
        # The upload threads wrap the client's errors in a RuntimeError.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise HubError(_explain_status(error.__cause__, repo_id, revision)) from error
        raise HubError(
            f"the connection to the Hub failed ({_first_line(error) or type(error).__name__}); "
            "run the same command again to continue."
        ) from error
    except LocalEntryNotFoundError as error:
        raise HubError(
            "the Hub cannot be reached: check the connection, and that HF_HUB_OFFLINE is not set."
        ) from error
    except OSError as error:
        raise HubError(explain_file_error(error)) from error
    except ValueError as error:
        raise HubError(f"{repo_id}: {_first_line(error)}") from error


def explain(error: Exception) -> str | None:
    """One line for an error that the user can fix; None for a bug, which needs its traceback."""
    if isinstance(error, OSError):
        return explain_file_error(error)
    if isinstance(error, StrictDataclassError):
        return explain_field_error(error)
    if isinstance(error, (ValueError, ImportError)):
        return one_line(error)
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":
        return f"{one_line(error)} Take smaller batches, shorter rows or another `dtype`."
    is_size_error = isinstance(error, (RuntimeError, TypeError, OverflowError))
    if isinstance(error, MemoryError) or (is_size_error and any(part in str(error) for part in TOO_LARGE)):
        return "the memory is full: take smaller batches, shorter rows or a smaller model."
    return None


def explain_file_error(error: BaseException) -> str:
    """One line for a local file that cannot be read or written."""
    path, reason = "", _first_line(error) or type(error).__name__
    if isinstance(error, OSError):
        path, reason = f" ({os.fspath(error.filename)})" if error.filename else "", error.strerror or reason
        if error.errno == errno.ENOSPC:
            return f"the disk is full{path}: free some space and run the same command again."
    return f"{reason.rstrip('.')}{path}."


def explain_field_error(error: Exception) -> str:
    """One line for an invalid config: the cause names the field and the rule, its wrapper adds nothing."""
    return one_line(error.__cause__ or error)


def one_line(value: object) -> str:
    return " ".join(str(value).split())


def _explain_status(error: HfHubHTTPError, repo_id: str, revision: str | None) -> str:
    status, request = error.response.status_code, error.response.request
    reason = f" ({_first_line(error.server_message)})" if error.server_message else ""
    answer = f"the Hub answered {status}{reason}"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, then give the token of the account that has it."
    if isinstance(error, EntryNotFoundError):
        return f"{repo_id} has no such file ({request.url.path})."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}."
    if isinstance(error, RepositoryNotFoundError):
        return f"{answer}: {repo_id} does not exist, or your token is missing, wrong or may not see it."
    if status == 401:
        return f"{answer}: the token is missing or wrong; run `hf auth login`, set HF_TOKEN or give a token."
    if status == 403:
        return f"{answer}: your token may not write to {repo_id}; use one with write permission for it."
    if status >= 500:
        return f"{answer}: the server failed; run the same command again later."
    return f"{answer} to {request.method} {request.url.path}."


def _first_line(value: object) -> str:
    return next((line.strip() for line in str(value).splitlines() if line.strip()), "")
