"""Of the checkpoints, the last ones and the best are kept; what is half-written or half-deleted is not seen."""

import json

import pytest
from accelerate import Accelerator

from lr_attnres.checkpoints import CheckpointError, Checkpoints


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path, Accelerator(cpu=True))


def pretend(checkpoints: Checkpoints, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        checkpoints.path(step).mkdir(parents=True)
        state = {"step": step, "settings": {}, "validation_loss": loss}
        (checkpoints.path(step) / "training_state.json").write_text(json.dumps(state))


def test_the_last_and_the_best_are_kept(checkpoints):
    pretend(checkpoints, {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 10: 2.5, 11: None})
    checkpoints.prune(keep_last=2)
    assert checkpoints.steps() == [2, 10, 11]
    assert checkpoints.last() == checkpoints.path(11)


def test_without_validation_the_last_are_kept(checkpoints):
    pretend(checkpoints, dict.fromkeys(range(5)))
    checkpoints.prune(keep_last=3)
    assert checkpoints.steps() == [2, 3, 4]


def test_leftovers_are_neither_seen_nor_kept(checkpoints):
    pretend(checkpoints, {1: None})
    for name in (".step-00000002.partial", ".step-00000001.deleted"):
        (checkpoints.folder / name).mkdir()
    assert checkpoints.steps() == [1]
    checkpoints.clean()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_what_to_resume_from(checkpoints):
    assert checkpoints.find(None) is None and checkpoints.find("last") is None
    pretend(checkpoints, {1: None, 2: None})
    assert checkpoints.find("last") == checkpoints.find(str(checkpoints.path(2))) == checkpoints.path(2)
    with pytest.raises(CheckpointError, match="already holds a run .up to step-00000002."):
        checkpoints.find(None)
    with pytest.raises(CheckpointError, match="holds checkpoints after step 1"):
        checkpoints.find(str(checkpoints.path(1)))
    (checkpoints.path(1) / "training_state.json").write_text("{")
    with pytest.raises(CheckpointError, match="training_state.json cannot be read"):
        checkpoints.find(str(checkpoints.path(1)))
