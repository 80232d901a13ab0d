"""Folders that name code, or lead elsewhere: `push` runs nothing of theirs and refuses them by name."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from attack_harness import Bug

from lr_attnres import hub_upload, push


JSON_FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json")


def make_maker(original: Path, sentinel: Path) -> Callable:
    code = f"open({str(sentinel)!r}, 'w').close()\n"

    def write_code(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(code + "class Tokenizer: pass\ndef generate(*args, **kwargs): pass\n")

    def name_code(chance: random.Random, folder: Path) -> str:
        """A JSON file points to code in the folder, or in a repository."""
        name = chance.choice(JSON_FILES)
        write_code(folder / "evil.py")
        entry = chance.choice(["evil.Tokenizer", "owner/name--evil.Tokenizer", ["evil.Tokenizer", None]])
        value = {chance.choice(["AutoTokenizer", "AutoProcessor", "AutoModelForCausalLM", "AutoConfig"]): entry}
        content = json.loads((folder / name).read_text())
        content[chance.choice(["auto_map", "custom_pipelines"])] = value
        (folder / name).write_text(json.dumps(content))
        return f"{name} names {value}"

    def custom_generate(chance: random.Random, folder: Path) -> str:
        write_code(folder / "custom_generate" / "generate.py")
        return "custom_generate/generate.py"

    def change_code(chance: random.Random, folder: Path) -> str:
        name = chance.choice(["modeling_lr_attnres.py", "configuration_lr_attnres.py", "depth_routing.py"])
        (folder / name).write_text(code + (folder / name).read_text())
        return f"code before {name}"

    def lead_elsewhere(chance: random.Random, folder: Path) -> str:
        name = chance.choice([*JSON_FILES, "model.safetensors", "README.md", "LICENSE"])
        (folder / name).unlink(missing_ok=True)
        kind = chance.choice(["link", "fifo"])
        if kind == "link":
            (folder / name).symlink_to(chance.choice(["/etc/passwd", "../../x", name]))
        else:
            os.mkfifo(folder / name)
        return f"{name} is a {kind}"

    def not_json(chance: random.Random, folder: Path) -> str:
        name = chance.choice(JSON_FILES)
        (folder / name).write_text(chance.choice(["", "{", "[]", "null", "3", '{"a": NaN', "\x00"]))
        return f"{name} is not a JSON object"

    def make_case(chance: random.Random, folder: Path) -> tuple[str, Callable[[], str | None]]:
        shutil.copytree(original, folder)
        description = chance.choice([name_code, custom_generate, change_code, lead_elsewhere, not_json])(
            chance, folder
        )

        def try_push() -> str | None:
            started: list[Path] = []
            check = hub_upload.load_in_clean_process

            def load(staged: Path, *options: str) -> dict:
                started.append(staged)
                return check(staged, *options)

            hub_upload.load_in_clean_process = load
            try:
                push(folder, "owner/name", dry_run=True)
            finally:
                hub_upload.load_in_clean_process = check
                shutil.rmtree(folder, ignore_errors=True)
                if sentinel.exists():
                    sentinel.unlink()
                    raise Bug(f"foreign code ran ({len(started)} processes)")
            return None

        return description, try_push

    return make_case
