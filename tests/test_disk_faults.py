"""Runs whose disk fails them: damaged checkpoints are passed over, and a save that fails costs no older one."""

import json
import os
import re
import resource
import shutil

import pytest

from meshpar import checkpoint_files
from meshpar.checkpoint_files import finish_replacing, publish, read_manifest, reading
from meshpar.train.metrics import MetricsFile
from tests import jobs_train as jobs
from tests.test_checkpoint import assert_whole, flip, truncate
from tests.test_train import DP2, PP2, checkpoints, metrics, numbers, train
from tests.workspace import recipe


@pytest.fixture(scope="module")
def whole(pool, no_dropout, tmp_path_factory):
    """A whole run with the checkpoints of steps 2, 4 and 6."""
    out = tmp_path_factory.mktemp("whole")
    train(pool, recipe(no_dropout, out, DP2, checkpoint__every=2, checkpoint__keep=3))
    return out


def remove_manifest(path):
    path.with_name("meshpar.json").unlink()


@pytest.mark.parametrize(
    ("damage", "what"),
    [(truncate, "__1_0.distcp is damaged: it has"), (remove_manifest, "it has no meshpar.json"), (flip, "checksum")],
    ids=["truncated", "missing", "flipped"],
)
def test_resume_passes_over_damaged_checkpoints_and_says_so(pool, no_dropout, whole, tmp_path, damage, what):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in (4, 6):
        damage(run / "checkpoints" / f"step-{step}" / "__1_0.distcp")
    (run / "checkpoints" / "step-3.tmp").mkdir()
    warnings = train(pool, recipe(no_dropout, run, DP2, checkpoint__every=2))
    for step, warning in zip((6, 4), warnings[0], strict=False):
        assert f"step-{step}" in warning
        assert what in warning
        assert warning.endswith("; skipped")
    assert warnings[1] == []
    assert numbers(run) == numbers(whole)
    assert {name for name in checkpoints(run) if "superseded" not in name} == {"step-4", "step-6"}
    assert_whole(run / "checkpoints" / "step-4")


def test_resume_from_a_damaged_path_is_refused(pool, no_dropout, whole, tmp_path):
    source = shutil.copytree(whole / "checkpoints" / "step-4", tmp_path / "step-4")
    flip(source / "__0_0.distcp")
    message = rf"ConfigError: checkpoint\.resume={source} cannot be used: {source}/__0_0\.distcp is damaged: .*checksum"
    with pytest.raises(AssertionError, match=message):
        train(pool, recipe(no_dropout, tmp_path / "run", DP2, checkpoint__resume=str(source)))


CAUSES = {
    "full": r"could not write .*/step-3\.tmp: OSError on rank 1: \[Errno 27\] File too large",
    "read-only": r"\[Errno 30\] Read-only file system: '.*/step-3'",
    "vanished": r"FileNotFoundError: \[Errno 2\] No such file or directory: '.*/step-3\.tmp/config\.json'",
    "lost": r"step-3\.tmp is no complete checkpoint: __1_0\.distcp is missing: something else changed it",
}


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize("fault", CAUSES)
def test_a_failed_save_stops_training_or_not_and_names_what_is_left(
    pool, no_dropout, tmp_path, fault, on_error, background
):
    changes = {"checkpoint__every": 1, "checkpoint__async": background, "checkpoint__on_error": on_error}
    raw = recipe(no_dropout, tmp_path, PP2, **changes, train__steps=5)
    (warnings, error), (_, error_there) = pool.run(2, jobs.train_with_fault, raw, fault, 3)
    goes_on = on_error == "continue"
    left = "there is no whole checkpoint" if fault == "vanished" else "the newest whole checkpoint is .*/step-2"
    then = "training goes on" if goes_on else "training stops"
    assert error == error_there
    assert (error is None) == goes_on
    assert re.search(
        rf"^step 3 could not be saved; {then}; {left}; the cause is .*{CAUSES[fault]}",
        warnings[0] if goes_on else error,
    )
    steps = [row["step"] for row in metrics(tmp_path)]
    if goes_on:
        assert steps == [1, 2, 3, 4, 5]
        assert checkpoints(tmp_path) == ["step-4", "step-5"]
    else:
        assert steps in ([1, 2, 3], [1, 2, 3, 4] if background else [])
        kept = [] if fault == "vanished" else ["step-1", "step-2"]
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*")) == kept
    for path in (tmp_path / "checkpoints").glob("step-?"):
        assert_whole(path)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_when_the_last_save_fails_the_model_is_written_and_the_run_fails(pool, no_dropout, tmp_path, on_error):
    raw = recipe(no_dropout, tmp_path, PP2, train__steps=2, checkpoint__async=True, checkpoint__on_error=on_error)
    (_, error), _ = pool.run(2, jobs.train_with_fault, raw, "full", 2)
    assert error.startswith("step 2 could not be saved; it was the last; there is no whole checkpoint; the cause is ")
    assert (tmp_path / "model" / "model.safetensors").exists()
    train(pool, recipe(no_dropout, tmp_path, PP2, train__steps=2))
    assert checkpoints(tmp_path) == ["step-2"]


def test_old_checkpoints_go_when_a_newer_one_is_complete_but_not_what_is_read(pool, no_dropout, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole / "checkpoints" / "step-2", run / "checkpoints" / "step-2")
    changes = {"checkpoint__every": 1, "checkpoint__keep": 1}
    with reading(run / "checkpoints" / "step-2"):
        train(pool, recipe(no_dropout, run, DP2, train__stop_at=4, **changes))
        assert checkpoints(run) == ["step-2", "step-4"]
        assert_whole(run / "checkpoints" / "step-2")
    train(pool, recipe(no_dropout, run, DP2, **changes))
    assert checkpoints(run) == ["step-6"]


def test_training_does_not_wait_for_the_removal_of_old_checkpoints_of_background_saves(pool, no_dropout, tmp_path):
    changes = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__async": True, "train__steps": 3}
    threads, others = pool.run(2, jobs.threads_of_removals, recipe(no_dropout, tmp_path, PP2, **changes))
    assert [name.partition("_")[0] for name in threads] == ["checkpoint", "checkpoint"]
    assert others == []
    assert checkpoints(tmp_path) == ["step-3"]


def test_training_goes_on_while_metrics_cannot_be_written(pool, no_dropout, tmp_path):
    warnings, _ = pool.run(2, jobs.train_with_full_metrics, recipe(no_dropout, tmp_path, PP2), 2, 4)
    assert warnings == [
        f"{tmp_path / 'metrics.jsonl'} failed, and training goes on: OSError: [Errno 27] File too large",
    ]
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


class Killed(BaseException):
    pass


@pytest.fixture
def replacing(whole, tmp_path):
    """step-6, and beside it what is to take its place: the same files with another manifest."""
    directory = shutil.copytree(whole / "checkpoints" / "step-6", tmp_path / "step-6")
    aside = shutil.copytree(directory, tmp_path / "step-6.tmp")
    manifest = read_manifest(aside)
    (aside / "meshpar.json").unlink()
    files = manifest.pop("files")
    del manifest["format"]

    def replace() -> None:
        publish(aside, directory, manifest | {"extra": {"step": 6, "new": True}}, {}, files)

    return directory, replace


def is_new(directory) -> bool:
    return "new" in read_manifest(directory)["extra"]


def fails_once(monkeypatch, at, error):
    """`os.replace` raises at its call number ``at``, and works from then on."""
    replace, calls = os.replace, []

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise error
        replace(*args)

    monkeypatch.setattr(checkpoint_files.os, "replace", failing)


@pytest.fixture
def without_exchange(monkeypatch):
    """A file system on which two directories cannot change names at once."""
    monkeypatch.setattr(checkpoint_files, "_exchange", lambda a, b: False)


def test_a_save_takes_an_older_ones_place_at_once(replacing, monkeypatch):
    directory, replace = replacing
    fails_once(monkeypatch, at=1, error=Killed())  # a rename, which comes after
    with pytest.raises(Killed):
        replace()
    assert_whole(directory)
    assert is_new(directory)


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize("lasts", [True, False])
def test_a_save_killed_between_its_renames_is_finished_by_the_next_start(replacing, monkeypatch, lasts):
    """Or undone, where the new one is damaged by then."""
    directory, replace = replacing
    fails_once(monkeypatch, at=2, error=Killed())
    with pytest.raises(Killed):
        replace()
    assert not directory.exists()
    if not lasts:
        truncate(directory.with_name("step-6.tmp") / "__1_0.distcp")
    finish_replacing(directory)
    assert_whole(directory)
    assert is_new(directory) == lasts


def test_a_save_is_done_when_what_it_replaced_cannot_be_moved(replacing, monkeypatch):
    directory, replace = replacing
    fails_once(monkeypatch, at=1, error=OSError("no"))
    replace()
    assert_whole(directory)
    assert is_new(directory)


@pytest.mark.usefixtures("without_exchange")
def test_a_rename_that_fails_leaves_the_older_save_in_its_place(replacing, monkeypatch):
    directory, replace = replacing
    fails_once(monkeypatch, at=2, error=OSError("no"))
    with pytest.raises(OSError, match="no"):
        replace()
    assert_whole(directory)
    assert not is_new(directory)


@pytest.mark.parametrize("exchange", [True, False])
def test_saves_do_not_take_away_what_they_replace_while_that_is_read(replacing, monkeypatch, exchange):
    directory, replace = replacing
    if not exchange:
        monkeypatch.setattr(checkpoint_files, "_exchange", lambda a, b: False)
    again = shutil.copytree(directory.with_name("step-6.tmp"), directory.with_name("again"))
    with reading(directory):
        replace()
        os.replace(again, directory.with_name("step-6.tmp"))
        replace()
        assert is_new(directory)
        assert_whole(directory.with_name("step-6.old-0.tmp"))
    finish_replacing(directory)
    assert is_new(directory)
    assert sorted(path.name for path in directory.parent.iterdir()) == ["step-6", "step-6.old-0.tmp"]


def test_going_back_past_a_damaged_checkpoint_keeps_what_is_whole(pool, no_dropout, whole, tmp_path):
    """The damaged one is newer than what is saved next, and is none of the newest ``keep``."""
    run, later = tmp_path / "run", tmp_path / "later"
    shutil.copytree(whole / "checkpoints" / "step-2", run / "checkpoints" / "step-2")
    shutil.copytree(whole / "checkpoints" / "step-4", later / "step-4")
    shutil.copytree(whole / "checkpoints" / "step-6", later / "step-6")
    flip(later / "step-6" / "__1_0.distcp")
    raw = recipe(no_dropout, run, DP2, checkpoint__every=1, checkpoint__keep=1)
    assert pool.run(2, jobs.roll_back_and_save, raw, str(later)) == [(2, 4)] * 2
    assert checkpoints(run) == ["step-5", "step-6.superseded"]
    assert_whole(run / "checkpoints" / "step-5")


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_before_it_is_written_is_one_that_fails(pool, no_dropout, tmp_path, background):
    changes = {"checkpoint__every": 1, "checkpoint__async": background, "checkpoint__on_error": "continue"}
    raw = recipe(no_dropout, tmp_path, PP2, **changes, train__steps=4)
    (warnings, error), _ = pool.run(2, jobs.train_with_fault, raw, "no snapshot", 3)
    assert error is None
    assert warnings[0].startswith("step 3 could not be saved; training goes on; the newest whole checkpoint is")
    assert checkpoints(tmp_path) == ["step-2", "step-4"]


def test_rows_of_a_run_that_goes_back_are_dropped_once_the_disk_lets_it(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        file.write({"step": step})
    fails_once(monkeypatch, at=1, error=OSError("full"))
    monkeypatch.setattr("meshpar.train.metrics.os.replace", checkpoint_files.os.replace)
    with pytest.raises(OSError, match="full"):
        file.go_back(1)
    file.write({"step": 2, "again": True})
    file.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2, "again": True}]


@pytest.mark.parametrize("back", [None, 150])
def test_rows_that_met_a_full_disk_are_all_there_when_it_has_room_again(tmp_path, back):
    file, full = MetricsFile(tmp_path / "metrics.jsonl", 0), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, full[1]))
    try:
        for step in range(2, 200):
            with pytest.raises(OSError, match="File too large"):
                file.write({"step": step, "reason": 100 * "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, full)
    if back is not None:
        file.go_back(back)
    file.close()
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 1 + (back or 199)))
