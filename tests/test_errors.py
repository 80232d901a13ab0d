"""Each error of the Hub client becomes one line that says what to do."""

import errno
from importlib import import_module

import pytest
import torch
from huggingface_hub import errors

from lr_attnres.errors import HubError, clear_hub_errors, explain


client = import_module(errors.HTTPError.__module__.split(".")[0])  # httpx or httpx2


def answer(status: int, error_class=errors.HfHubHTTPError, message: str = "") -> errors.HfHubHTTPError:
    response = client.Response(status, request=client.Request("POST", "https://hub/api/models/owner/name"))
    return error_class("several\nlines", response=response, server_message=message)


def wrapped(error: Exception) -> RuntimeError:
    outer = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
    outer.__cause__ = error
    return outer


CASES = [
    (
        answer(401, message="Bad token"),
        "the Hub answered 401 (Bad token): the token is missing or wrong; run `hf auth",
    ),
    (answer(403), "the Hub answered 403: your token may not write to owner/name"),
    (answer(404, errors.RepositoryNotFoundError), "owner/name does not exist, or your token is missing, wrong or may"),
    (answer(404, errors.RevisionNotFoundError), "owner/name has no revision 'v9'."),
    (answer(403, errors.GatedRepoError), "owner/name is gated: ask for access on its page"),
    (answer(502), "the Hub answered 502: the server failed; run the same command again later."),
    (
        answer(404, errors.RemoteEntryNotFoundError),
        "owner/name has no such file (/api/models/owner/name).",
    ),
    (
        errors.LocalEntryNotFoundError("several\nlines"),
        "the Hub cannot be reached: check the connection, and that HF_HUB_OFFLINE is not set.",
    ),
    (OSError("A sentence."), "A sentence."),
    (answer(412), "the Hub answered 412 to POST /api/models/owner/name."),
    (wrapped(answer(403)), "the Hub answered 403: your token may not write to owner/name"),
    (
        wrapped(client.ReadError("reset")),
        "the connection to the Hub failed (Error while uploading 'model.safetensors'",
    ),
    (
        client.ConnectError("refused"),
        "the connection to the Hub failed (refused); run the same command again to continue.",
    ),
    (ConnectionResetError(), "the connection to the Hub failed (ConnectionResetError); run the same command again"),
    (errors.LocalTokenNotFoundError("x"), "there is no Hub token: run `hf auth login`, set HF_TOKEN or give a token."),
    (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE is set, so the Hub cannot be reached: unset it."),
    (errors.HFValidationError("Repo id is bad\nmore"), "'owner/name' is not a repository name: Repo id is bad"),
    (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: free some space and run the same command"),
    (OSError(errno.EACCES, "Permission denied", "/a/b"), "Permission denied (/a/b)."),
    (ValueError("Invalid metadata in README.md.\n- more"), "owner/name: Invalid metadata in README.md."),
    (HubError("already clear"), "already clear"),
]


@pytest.mark.parametrize("error, message", CASES, ids=[row[1][:40] for row in CASES])
def test_one_line(error, message):
    with pytest.raises(HubError) as raised, clear_hub_errors("owner/name", revision="v9"):
        raise error
    assert message in str(raised.value)
    assert "\n" not in str(raised.value) and ".." not in str(raised.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2**62, 2**10),
        lambda: torch.empty(2**45),
        lambda: torch.empty(2**70),
        lambda: torch.ones(1).expand(2**40, 2**30).numel(),
        lambda: bytearray(2**60),
        lambda: [0] * 2**62,
    ],
    ids=["storage", "allocation", "argument", "numel", "bytes", "list"],
)
def test_sizes_that_no_memory_holds(make):
    with pytest.raises((RuntimeError, TypeError, MemoryError, OverflowError)) as raised:
        make()
    assert explain(raised.value) == "the memory is full: take smaller batches, shorter rows or a smaller model."
