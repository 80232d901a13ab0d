"""Whatever can fail on the Hub, on the disk or in a config, as one line that says what to do."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


class HubError(RuntimeError):
    """The Hub, or the way to it, refused; the message is one line."""


@contextmanager
def clear_hub_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn everything that talking to the Hub about `repo_id` can raise into a `HubError`."""
    try:
        yield
    except HubError:
        raise
    except HfHubHTTPError as error:
        raise HubError(_explain_answer(error, repo_id, revision)) from error
    except HFValidationError as error:
        raise HubError(f"{repo_id!r} is not a repository name: {_first_line(error)}") from error
    except LocalTokenNotFoundError as error:
        raise HubError("there is no Hub token: run `hf auth login`, set HF_TOKEN or give a token.") from error
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set, so the Hub cannot be reached: unset it.") from error
    except (httpx2.HTTPError, ConnectionError, RuntimeError) as error:
        # The upload threads wrap the client's errors in a RuntimeError.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise HubError(_explain_answer(error.__cause__, repo_id, revision)) from error
        raise HubError(
            f"the connection to the Hub failed ({_first_line(error) or type(error).__name__}); "
            "run the same command again to go on."
        ) from error
    except LocalEntryNotFoundError as error:
        raise HubError(
            "the Hub cannot be reached: check the connection, and that HF_HUB_OFFLINE is not set."
        ) from error
    except OSError as error:
        raise HubError(explain_os_error(error)) from error
    except ValueError as error:
        raise HubError(f"{repo_id}: {_first_line(error)}") from error


def explain_os_error(error: OSError) -> str:
    """One line for a local file that cannot be read or written."""
    place = f" ({os.fspath(error.filename)})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"the disk is full{place}: free some space and run the same command again."
    return f"{(error.strerror or _first_line(error)).rstrip('.')}{place}."


def explain_field_error(error: Exception) -> str:
    """One line for a config that is refused: the cause says which field and why, without the frame around it."""
    return one_line(error.__cause__ or error)


def one_line(value: object) -> str:
    return " ".join(str(value).split())


def _explain_answer(error: HfHubHTTPError, repo_id: str, revision: str | None) -> str:
    status = error.response.status_code
    said = f"the Hub answered {status}"
    message = error.server_message or ""
    if message:
        said += f" ({_first_line(message)})"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated: ask for access on its page, then give the token of the account that has it."
    if isinstance(error, EntryNotFoundError):
        return f"{repo_id} has no such file ({error.response.request.url.path})."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}."
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return f"{said}: the token is missing or wrong; run `hf auth login`, set HF_TOKEN or give a token."
    if isinstance(error, RepositoryNotFoundError):
        return f"{said}: {repo_id} does not exist, or your token is missing, wrong or may not see it."
    if status == 403:
        return f"{said}: your token may not write to {repo_id}; use one with write permission for it."
    if status >= 500:
        return f"{said}: the server is in trouble; run the same command again later."
    request = error.response.request
    return f"{said} to {request.method} {request.url.path}."


def _first_line(value: object) -> str:
    return next((line.strip() for line in str(value).splitlines() if line.strip()), "")
