"""Find the final, the last or the named `.pt` file in a folder or Hub repository."""

import shutil

import pytest
from command_line import CommandLine, hub_environment
from hub_server import HubServer, Repo
from test_convert import REFERENCES

from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.released_source import choose_file, find_released_file


def test_final_then_highest_step():
    steps = ["ckpt_step:900.pt", "ckpt_step:1000.pt", "notes.txt", "ckpt_step:x.pt"]
    assert choose_file([*steps, "final_model.pt"], None, "here") == "final_model.pt"
    assert choose_file(steps, None, "here") == "ckpt_step:1000.pt"
    assert choose_file(steps, "ckpt_step:900.pt", "here") == "ckpt_step:900.pt"
    with pytest.raises(
        LRAttnResError, match="here has no absent.pt; its .pt files are: ckpt_step:1000.pt, .*`filename`"
    ):
        choose_file(steps, "absent.pt", "here")
    with pytest.raises(LRAttnResError, match="here has no final_model.pt or ckpt_step:N.pt; its .pt files are: none"):
        choose_file([], None, "here")


def test_folder_and_file(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("ckpt_step:2.pt", "ckpt_step:10.pt", "run/other.pt"):
        (tmp_path / name).touch()
    assert find_released_file(tmp_path) == tmp_path / "ckpt_step:10.pt"
    assert find_released_file(tmp_path, "run/other.pt") == tmp_path / "run/other.pt"
    file = tmp_path / "ckpt_step:2.pt"
    assert find_released_file(file) == file
    with pytest.raises(LRAttnResError, match="`filename` goes with a folder or a Hub repository"):
        find_released_file(file, filename="x.pt")
    with pytest.raises(LRAttnResError, match="`revision` goes with a Hub repository"):
        find_released_file(file, revision="main")
    with pytest.raises(LRAttnResError, match="is not on this machine, nor a Hub repository of the form owner/name"):
        find_released_file(tmp_path / "absent.pt")
    with pytest.raises(LRAttnResError, match="'' is not on this machine"):
        find_released_file("")


def test_convert_from_the_hub(tmp_path):
    with HubServer() as hub, CommandLine(hub_environment(hub.url, tmp_path / "hf_home")) as run:
        hub.repos["model", "writer/released"] = repo = Repo(private=True)
        first, second = ((REFERENCES / f"{name}.pt").read_bytes() for name in ("slr_full_r8", "attnres_full"))
        old = repo.commit("main", {"ckpt_step:5.pt": hub.store(first, lfs=True)})
        files = {"ckpt_step:5.pt": hub.store(first, lfs=True), "ckpt_step:40.pt": hub.store(second, lfs=True)}
        repo.commit("main", files)

        def variant(*options):
            result = run("convert", "writer/released", tmp_path / "model", "--token", "hf_writer", *options)
            assert result.code == 0, result.err
            text = (tmp_path / "model/README.md").read_text()
            shutil.rmtree(tmp_path / "model")
            return text.split("| variant | `")[1].split("`")[0], text.split("| converted from | ")[1].split(" |")[0]

        assert variant() == ("attnres-full", "writer/released, ckpt_step:40.pt")
        assert variant("--filename", "ckpt_step:5.pt") == ("sliced-full-r8", "writer/released, ckpt_step:5.pt")
        assert variant("--revision", old) == ("sliced-full-r8", "writer/released, ckpt_step:5.pt")

        for arguments, message in [
            (("writer/released",), "writer/released is not on this machine, and the Hub answered 401"),
            (("writer/absent", "--token", "hf_writer"), "writer/absent does not exist, or your token"),
            (("writer/released", "--token", "hf_writer", "--revision", "no"), "writer/released has no revision 'no'"),
            (
                ("writer/released", "--token", "hf_writer", "--filename", "x.pt"),
                "writer/released has no x.pt; its .pt",
            ),
        ]:
            result = run("convert", arguments[0], tmp_path / "model", *arguments[1:])
            assert result.code == 1 and message in result.err.splitlines()[-1], result
            assert not (tmp_path / "model").exists()
