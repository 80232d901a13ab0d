"""Stage, verify and push a self-contained Hub repository: weights, code, tokenizer and card in one commit."""

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from . import modeling_lr_attnres
from .clean_process import load_in_clean_process
from .configuration_lr_attnres import AUTO_MAP, LRAttnResConfig
from .errors import HubError, clear_hub_errors, explain_field_error
from .loading import tokenizer_beside
from .model_card import GENERATED, PIPELINE_TAGS, PROVENANCE_FILE, model_card


logger = logging.get_logger(__name__)

CARD = "README.md"
WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
# A training folder also holds optimizer states, logs and pickles: only what a user of the model needs is sent.
SENT = (
    *WEIGHTS,
    *("config.json", "generation_config.json", PROVENANCE_FILE, CARD, "LICENSE", "LICENSE.md", "LICENSE.txt"),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
    ),
    *("chat_template.jinja", "chat_template.json"),
)
STALE = (*WEIGHTS, "pytorch_model*.bin", "pytorch_model.bin.index.json")


class PushError(ValueError):
    """A folder that must not be pushed as it is; the message names the file and says what to do."""


@dataclass
class StagedFolder:
    """What would be sent, what would not, and the tag that the card's snippet pins (None with a card of one's own)."""

    operations: list[CommitOperationAdd]
    left_out: list[str]
    revision_tag: str | None


def code_files() -> list[Path]:
    """The modeling file and every sibling it imports."""
    main = Path(modeling_lr_attnres.__file__)
    return [main, *map(Path, get_relative_import_files(main))]


def copy_code(folder: Path) -> None:
    """What `save_pretrained` does beside writing weights: the folder carries its code."""
    for path in code_files():
        shutil.copyfile(path, folder / path.name)


def check_folder(folder: Path) -> LRAttnResConfig:
    """The config of a folder that a stranger can load; a `PushError` for any other."""
    config = _check_config(folder)
    for installed in code_files():
        saved = folder / installed.name
        if not saved.is_file():
            raise PushError(f"{saved} is missing: save the model with `save_pretrained`, which copies its code.")
        if saved.read_bytes() != installed.read_bytes():
            raise PushError(
                f"{saved} is not the code of the installed lr_attnres: load the folder and save it again with "
                "`save_pretrained`, or install the version that saved it."
            )
    if not any(folder.glob("model*.safetensors")):
        raise PushError(f"{folder} has no model.safetensors: save the model with `save_pretrained`.")

    found = load_in_clean_process(folder)
    for problem in ("missing", "unexpected"):
        if names := found[f"{problem}_weights"]:
            raise PushError(f"{folder} has {problem} weights: {', '.join(names)}.")
    if names := found["bad_weights"]:
        raise PushError(f"{folder} has weights with NaN or infinite values: {', '.join(names)}.")
    if found["tokenizer_size"] is None:
        logger.warning(f"{folder} has no tokenizer: users of the repository will have to bring their own.")
    elif found["tokenizer_size"] > config.vocab_size:
        raise PushError(
            f"{folder}: the tokenizer has {found['tokenizer_size']} tokens, the model's vocab_size is "
            f"{config.vocab_size}."
        )
    return config


def _check_config(folder: Path) -> LRAttnResConfig:
    if not folder.is_dir():
        raise PushError(f"{folder} is not a folder.")
    path = folder / "config.json"
    if not path.is_file():
        raise PushError(f"{path} is missing: save the model with `save_pretrained`.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PushError(f"{path} is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise PushError(f"{path} is not a JSON object: save the model with `save_pretrained`.")
    if fields.get("model_type") != LRAttnResConfig.model_type:
        raise PushError(f"{path}: model_type is {fields.get('model_type')!r}, not {LRAttnResConfig.model_type!r}.")
    try:
        config = LRAttnResConfig.from_dict(fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise PushError(f"{path} is not a valid config: {explain_field_error(error)}") from error
    if fields.get("auto_map") != AUTO_MAP:
        raise PushError(f"{path}: auto_map does not name the code in the folder: save it with `save_pretrained`.")
    if not config.architectures or config.architectures[0] not in PIPELINE_TAGS:
        raise PushError(
            f"{path}: architectures is {config.architectures}; expected one of {', '.join(PIPELINE_TAGS)}."
        )
    return config


def stage_folder(folder: Path, config: LRAttnResConfig, repo_id: str, tags: Iterable[str] = ()) -> StagedFolder:
    """Choose the files to send and write the card, unless the folder has one of the user's own."""
    code = {path.name for path in code_files()}
    entries = sorted(folder.iterdir())
    sent = [path for path in entries if path.is_file() and (path.name in code or _matches(path.name, SENT))]
    left_out = [path.name for path in entries if path not in sent]
    if (card := folder / CARD) in sent:
        if GENERATED not in card.read_text(encoding="utf-8"):
            return StagedFolder([CommitOperationAdd(path.name, path) for path in sent], left_out, None)
        sent.remove(card)
    operations = [CommitOperationAdd(path.name, path) for path in sent]
    tag = _contents_tag(operations)
    text = str(model_card(folder, config, repo_id.split("/")[-1], repo_id, tag, tags))
    return StagedFolder([*operations, CommitOperationAdd(CARD, text.encode())], left_out, tag)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _contents_tag(operations: list[CommitOperationAdd]) -> str:
    """A name that is known before the commit and belongs to these contents alone."""
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

    Nothing is sent if the check fails, and nothing changes in the repository before the commit. Running it again goes
    on where it stopped, and makes no commit if nothing changed. The commit is tagged with the name that the card's
    snippet pins.

    Args:
        folder: what `save_pretrained` wrote.
        repo_id: `owner/name`, or a name of the token's own; created if it does not exist.
        private: visibility of a repository that is created.
        revision: the branch to commit to, `main` by default; created if it does not exist.
        create_pr: open a pull request instead of committing.
        tags: more tags for the card that is written.
        dry_run: only print what would be sent; returns the URL of the repository.
    """
    folder = Path(folder)
    api = HfApi(token=token, library_name="lr_attnres")
    _check_target(repo_id, revision, create_pr)
    if not dry_run and token is None and get_token() is None:
        raise HubError("there is no Hub token: run `hf auth login`, set HF_TOKEN or give a token.")
    if not dry_run and "/" not in repo_id:
        with clear_hub_errors(repo_id):
            repo_id = f"{api.whoami()['name']}/{repo_id}"
    staged = stage_folder(folder, check_folder(folder), repo_id, tags)
    if dry_run:
        print(_describe(staged, repo_id, revision or "main"))
        return f"{api.endpoint}/{repo_id}"
    with clear_hub_errors(repo_id, revision):
        repo = _open_repo(api, repo_id, private, revision, create_pr)
        commit = api.create_commit(
            repo.id,
            [*staged.operations, *_deletions(repo, staged)],
            commit_message=commit_message or "Upload an LR-AttnRes model",
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
        raise PushError(f"{repo_id} names a repository of type {kind.removesuffix('s')}; a model goes to owner/name.")
    with clear_hub_errors(repo_id):
        validate_repo_id(repo_id)
    if create_pr and revision not in (None, "main"):
        raise PushError(f"`create_pr` opens a pull request on main; it cannot go with `revision` = {revision}.")


def _open_repo(api: HfApi, repo_id: str, private: bool | None, revision: str | None, create_pr: bool) -> ModelInfo:
    """A model repository (and branch) that exists now, created if need be."""
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    except KeyError as error:  # a conflict that is not "you have this repository already"
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
        raise HubError(f"the name {repo_id} is taken by what your token cannot see: choose another one.") from error


def _deletions(repo: ModelInfo, staged: StagedFolder) -> list[CommitOperationDelete]:
    """Weights of an earlier push in other files would be loaded instead of the new ones."""
    sent = {operation.path_in_repo for operation in staged.operations}
    present = [file.rfilename for file in repo.siblings or []]
    return [CommitOperationDelete(name) for name in present if _matches(name, STALE) and name not in sent]


def _tag(api: HfApi, repo_id: str, commit: str, tag: str) -> None:
    try:
        with clear_hub_errors(repo_id, commit):
            api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True)
    except HubError as error:
        logger.warning(f"The model is pushed, but not the tag {tag} that its card pins; push again. Reason: {error}")


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
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: str = "5GB",
    tags: list[str] | None = None,
) -> str:
    """Send the model to the Hub as `lr-attnres push` would: checked, complete, in one commit; returns its URL.

    Without `tokenizer`, the one beside the weights that the model was loaded from is sent, if there is one.
    """
    tokenizer = tokenizer or tokenizer_beside(model, token)
    with tempfile.TemporaryDirectory(prefix="lr-attnres-") as staging:
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        return push(
            staging,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            tags=[*(model.model_tags or []), *(tags or [])],
            token=token,
        )
