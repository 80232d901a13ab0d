"""The last checkpoints and the best one are kept; half-written and half-deleted ones are ignored."""

import json

import pytest
from accelerate import Accelerator

from lr_attnres.errors import LRAttnResError
from lr_attnres.training.checkpoints import Checkpoints, hold_run_folder, read_state


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
    (checkpoints.folder / ".notes").mkdir()
    checkpoints.delete_leftovers()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [".notes", "step-00000001"]


def test_what_to_resume_from(checkpoints):
    assert checkpoints.find(None) is None and checkpoints.find("last") is None
    pretend(checkpoints, {1: None, 2: None})
    assert checkpoints.find("last") == checkpoints.find(str(checkpoints.path(2))) == checkpoints.path(2)
    with pytest.raises(LRAttnResError, match="already holds a run .up to step-00000002."):
        checkpoints.find(None)
    with pytest.raises(LRAttnResError, match="holds checkpoints after step 1"):
        checkpoints.find(str(checkpoints.path(1)))
    (checkpoints.path(1) / "training_state.json").write_text("{")
    with pytest.raises(LRAttnResError, match="training_state.json is not JSON"):
        checkpoints.find(str(checkpoints.path(1)))


def test_a_damaged_one_does_not_end_a_run(checkpoints):
    pretend(checkpoints, {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 4.0})
    (checkpoints.path(2) / "training_state.json").write_text("{")
    checkpoints.prune(keep_last=2)
    assert checkpoints.steps() == [3, 4, 5]


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{}", "cannot be used: it has no usable `step`"),
        ('{"step": "1", "settings": {}, "validation_loss": null}', "cannot be used: it has no usable `step`"),
        ("[]", "is not a JSON object"),
        ("3", "is not a JSON object"),
    ],
)
def test_states_that_are_refused(content, problem, checkpoints):
    pretend(checkpoints, {1: None})
    (checkpoints.path(1) / "training_state.json").write_text(content)
    with pytest.raises(LRAttnResError, match=f"training_state.json {problem}"):
        read_state(checkpoints.path(1))


@pytest.mark.parametrize("step", ["99", "-1", "true"])
def test_a_state_of_another_step(step, checkpoints):
    pretend(checkpoints, {2: None})
    (checkpoints.path(2) / "training_state.json").write_text(
        f'{{"step": {step}, "settings": {{}}, "validation_loss": null}}'
    )
    with pytest.raises(LRAttnResError, match="training_state.json has `step` = .*, but its folder is step-00000002"):
        read_state(checkpoints.path(2))


def test_one_run_at_a_time(tmp_path):
    """A folder is locked by one run, unlocked after it, and deleted if the run wrote nothing."""
    accelerator, folder = Accelerator(cpu=True), tmp_path / "run"
    busy = pytest.raises(LRAttnResError, match=f"another run works in {folder}")
    with hold_run_folder(folder, accelerator), busy, hold_run_folder(folder, accelerator):
        pass
    assert not folder.exists()
    with hold_run_folder(folder, accelerator):
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    no_folder = pytest.raises(LRAttnResError, match="`output_dir` is .*metrics.jsonl, which is a file")
    with no_folder, hold_run_folder(folder / "metrics.jsonl", accelerator):
        pass


def test_more_processes_than_wrote_it(checkpoints, monkeypatch):
    """Every process raises, also the one that finds its own random states."""
    pretend(checkpoints, {1: None})
    (checkpoints.path(1) / "random_states_0.pkl").touch()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(LRAttnResError, match="random_states_1.pkl is missing: .* of 1 processes, the run has 2"):
        checkpoints.load(checkpoints.path(1))
