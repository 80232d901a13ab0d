"""Check a saved folder and push it to the Hub: weights, code, tokenizer and card in one commit."""

import fnmatch
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, logging

from .configuration_lr_attnres import AUTO_MAP, LRAttnResConfig
from .data.tokenizers import find_tokenizer
from .errors import HubError, LRAttnResError, clear_hub_errors
from .folders.adapter import copy_adapter, is_adapter
from .folders.card import GENERATED, PIPELINE_TAGS, PROVENANCE_FILE, model_card
from .folders.clean_process import check_code, load_in_clean_process
from .folders.loading import check_generation_config, check_weight_files, load_config
from .folders.staging import code_files
from .sources import check_not_special, read_json_object


logger = logging.get_logger(__name__)

CARD = "README.md"
WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
# The files to send, beside the code. A training folder also holds optimizer states, logs and pickles.
SENT = (
    *WEIGHTS,
    *("config.json", "generation_config.json", PROVENANCE_FILE, CARD, "LICENSE", "LICENSE.md", "LICENSE.txt"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
STALE = (*WEIGHTS, "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass
class StagedFolder:
    operations: list[CommitOperationAdd]
    left_out: list[str]  # names of files and folders that are not sent
    revision_tag: str | None  # the revision in the card's code example; None if the card is the user's own
    kind: str = "model"  # or "routing adapter"


def check_folder(folder: Path) -> LRAttnResConfig:
    """Raise unless the files to send load in a process without this package; returns the config."""
    with copied_files(folder) as (copy, _):
        return _check_copy(copy)


@contextmanager
def copied_files(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """A temporary folder with the files to send, and the names of those left out: what is checked is what is sent.

    Weights are links. Errors name the files of `folder`.
    """
    if not folder.is_dir():
        raise LRAttnResError(f"{folder} is not a folder.")
    check_code(folder)
    sent = _files_to_send(folder)
    left_out = _left_out(folder, sent)
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as temporary:
        for path in sent:
            if path.suffix == ".safetensors":
                Path(temporary, path.name).symlink_to(path.resolve())
            else:
                shutil.copyfile(path, Path(temporary, path.name))
        try:
            yield Path(temporary), left_out
        except LRAttnResError as error:
            if temporary not in str(error):
                raise
            raise type(error)(str(error).replace(temporary, str(folder))) from error


def _left_out(folder: Path, sent: list[Path]) -> list[str]:
    return sorted({path.name for path in folder.iterdir()} - {path.name for path in sent})


def _files_to_send(folder: Path) -> list[Path]:
    code = {path.name for path in code_files()}
    sent = []
    for path in sorted(folder.iterdir()):
        is_wanted = path.name in code or _matches(path.name, SENT)
        target = os.path.realpath(path)
        stays_inside = path.exists() and Path(target).is_relative_to(os.path.realpath(folder))
        if is_wanted and path.is_symlink() and not stays_inside:
            raise LRAttnResError(f"{path} is a link to {target}, outside the folder or gone: copy the file itself.")
        if path.exists() and (is_wanted or not path.is_symlink()):
            check_not_special(path)
        if is_wanted and path.is_file():
            sent.append(path)
    return sent


def _check_copy(folder: Path) -> LRAttnResConfig:
    config, path = load_config(folder), folder / CONFIG_NAME
    if read_json_object(path).get("auto_map") != AUTO_MAP:
        raise LRAttnResError(f"{path}: auto_map does not name the code in the folder: save it with `save_pretrained`.")
    if not config.architectures or config.architectures[0] not in PIPELINE_TAGS:
        known = ", ".join(PIPELINE_TAGS)
        raise LRAttnResError(f"{path}: architectures is {config.architectures}; expected one of {known}.")
    for installed in code_files():
        saved = folder / installed.name
        if not saved.is_file():
            raise LRAttnResError(f"{saved} is missing: save the model with `save_pretrained`, which copies its code.")
        if saved.read_bytes() != installed.read_bytes():
            advice = "load the folder and save it again with `save_pretrained`, or install the version that saved it"
            raise LRAttnResError(f"{saved} is not the code of the installed lr_attnres: {advice}.")
    for path in sorted(folder.glob("*.json")):
        read_json_object(path)
    check_generation_config(folder)
    check_weight_files(folder, config)

    found = load_in_clean_process(folder)
    problems = {
        "missing weights": found["missing_weights"],
        "unexpected weights": found["unexpected_weights"],
        "weights with NaN or infinite values": found["bad_weights"],
    }
    for problem, names in problems.items():
        if names:
            raise LRAttnResError(f"{folder} has {problem}: {', '.join(names)}.")
    size, limit = found["tokenizer_size"], config.vocab_size
    if size is None:
        logger.warning("The folder has no tokenizer: users of the repository will need their own.")
    elif size > limit:
        raise LRAttnResError(f"{folder}: the tokenizer has {size} tokens, the model's vocab_size is {limit}.")
    return config


def stage_folder(
    copy: Path, left_out: list[str], config: LRAttnResConfig, repo_id: str, tags: Iterable[str] = ()
) -> StagedFolder:
    """The commit of `copied_files`, with a generated card unless the folder has one written by the user."""
    operations = {path.name: CommitOperationAdd(path.name, path) for path in sorted(copy.iterdir())}
    if CARD in operations and GENERATED not in (copy / CARD).read_text(encoding="utf-8"):
        return StagedFolder([*operations.values()], left_out, None)
    operations.pop(CARD, None)
    tag = _contents_tag(operations.values())
    text = str(model_card(copy, config, repo_id.split("/")[-1], repo_id, tag, tags))
    return StagedFolder([*operations.values(), CommitOperationAdd(CARD, text.encode())], left_out, tag)


@contextmanager
def _staged(folder: Path, repo_id: str, tags: Iterable[str]) -> Iterator[StagedFolder]:
    """What to send of a model folder, or of a routing adapter."""
    if not is_adapter(folder):
        with copied_files(folder) as (copy, left_out):
            yield stage_folder(copy, left_out, _check_copy(copy), repo_id, tags)
        return
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as temporary:
        copy_adapter(folder, Path(temporary), repo_id)
        sent = sorted(Path(temporary).iterdir())
        left_out = _left_out(folder, sent)
        operations = [CommitOperationAdd(path.name, path) for path in sent]
        yield StagedFolder(operations, left_out, None, "routing adapter")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _contents_tag(operations: Iterable[CommitOperationAdd]) -> str:
    """A tag that the card can name before the commit exists: a hash of the files."""
    digest = hashlib.sha256()
    for operation in operations:
        digest.update(operation.path_in_repo.encode() + b"\0" + operation.upload_info.sha256)
    return f"contents-{digest.hexdigest()[:12]}"


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: Iterable[str] = (),
    token: str | None = None,
    dry_run: bool = False,
) -> str:
    """Check a saved folder and send it to the Hub in one commit; returns the URL of the commit (or pull request).

    If the check fails, nothing is sent. An interrupted push resumes when it is run again; without changes there is no
    new commit. The commit gets the tag that the card's code example names as `revision`.

    Args:
        folder: written by `save_pretrained` or `save_routing_adapter`.
        repo_id: `owner/name`, or `name` under the token's user; created if it does not exist.
        private: visibility of a new repository.
        revision: the branch to commit to, by default `main`; created if it does not exist.
        create_pr: open a pull request instead of committing.
        tags: more tags for the card.
        dry_run: only print the list of files; returns the URL of the repository.
    """
    api = HfApi(token=token, library_name="lr_attnres")
    _check_target(repo_id, revision, create_pr)
    if not dry_run:
        with clear_hub_errors(repo_id):
            build_hf_headers(token=token or True)  # raises if there is no token
            if "/" not in repo_id:
                repo_id = f"{api.whoami()['name']}/{repo_id}"
    with _staged(Path(folder), repo_id, tags) as staged:
        if dry_run:
            print(_describe(staged, repo_id, revision or "main"))
            return f"{api.endpoint}/{repo_id}"
        with clear_hub_errors(repo_id, revision):
            repo = _open_repo(api, repo_id, private, revision, create_pr)
            commit = api.create_commit(
                repo.id,
                [*staged.operations, *_deletions(repo, staged)],
                commit_message=commit_message or f"Upload an LR-AttnRes {staged.kind}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )
    if staged.revision_tag is not None:
        _tag(api, repo.id, commit.oid, staged.revision_tag)
    return commit.pr_url or commit.commit_url


def _check_target(repo_id: str, revision: str | None, create_pr: bool) -> None:
    kind = repo_id.split("/")[0]
    if repo_id.count("/") == 2 and kind in ("datasets", "spaces"):
        raise LRAttnResError(f"{repo_id} is the name of a repository of type {kind[:-1]}; a model goes to owner/name.")
    with clear_hub_errors(repo_id):
        validate_repo_id(repo_id)
    if create_pr and revision not in (None, "main"):
        raise LRAttnResError(f"`create_pr` opens a pull request on main; it cannot go with `revision` = {revision}.")


def _open_repo(api: HfApi, repo_id: str, private: bool | None, revision: str | None, create_pr: bool) -> ModelInfo:
    """Create the repository and the branch if they do not exist."""
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    except KeyError as error:  # a conflict other than "you have this repository already"
        raise HubError(f"the name {repo_id} is taken: choose another one.") from error
    try:
        return api.model_info(repo_id, revision=revision)
    except RevisionNotFoundError:
        if create_pr or revision is None:
            raise
        api.create_branch(repo_id, branch=revision)
        return api.model_info(repo_id, revision=revision)
    except RepositoryNotFoundError as error:
        for kind in ("dataset", "space"):
            if api.repo_exists(repo_id, repo_type=kind):
                raise HubError(f"{repo_id} is a repository of type {kind}: choose another name.") from error
        raise HubError(f"{repo_id} is taken by a repository that your token cannot see: choose another.") from error


def _deletions(repo: ModelInfo, staged: StagedFolder) -> list[CommitOperationDelete]:
    """Delete weight files of an earlier push: `from_pretrained` might load them instead of the new ones."""
    if staged.kind != "model":
        return []
    sent = {operation.path_in_repo for operation in staged.operations}
    present = [file.rfilename for file in repo.siblings or []]
    return [CommitOperationDelete(name) for name in present if _matches(name, STALE) and name not in sent]


def _tag(api: HfApi, repo_id: str, commit: str, tag: str) -> None:
    try:
        with clear_hub_errors(repo_id, commit):
            api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True)
    except HubError as error:
        logger.warning(f"The model is pushed without the tag {tag} that its card names; push again. Reason: {error}")


def _describe(staged: StagedFolder, repo_id: str, revision: str) -> str:
    sizes = {operation.path_in_repo: operation.upload_info.size for operation in staged.operations}
    lines = [f"Would send {len(sizes)} files, {sum(sizes.values()):,} bytes, to {repo_id} ({revision}):"]
    lines += [f"  {size:>15,}  {name}" for name, size in sizes.items()]
    if staged.left_out:
        lines.append(f"Would leave out: {', '.join(staged.left_out)}")
    return "\n".join(lines)


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: str = "5GB",
    tags: Iterable[str] | None = None,
    token: str | None = None,
    **options: Any,
) -> str:
    """Push a model in memory; for `options` see `push`. Returns the URL of the commit.

    `tokenizer` is by default that of the folder or repository from which the model was loaded.
    """
    tokenizer = tokenizer or find_tokenizer(model.name_or_path or "", token)
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return push(folder, repo_id, tags=[*(model.model_tags or []), *(tags or [])], token=token, **options)
