"""The command line: exit statuses, one message for a failed run, and the workers it starts and ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from meshpar.cli import launch, main
from meshpar.recipe import shipped_recipes
from tests import models

WORKER = """
import os, sys
from meshpar.failure import one_message

mode, output_dir = sys.argv[1:]
rank = int(os.environ["RANK"])
with one_message(rank, f"pp={rank}, dp=0, tp=0", output_dir):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if mode == "everywhere":
        raise KeyError("every rank alike")
    if mode.startswith("shared"):
        import time
        from meshpar.mesh import on_every_rank, on_first_rank
        share, raising = {"shared-first": (on_first_rank, 0), "shared-every": (on_every_rank, 1)}[mode]
        try:
            share(lambda: {}["missing"] if rank == raising else None)
        except KeyError:
            time.sleep(3 if rank == raising else 0)  # the other one is first to report
            raise
    if rank == 1:
        raise KeyError("rank 1 alone")
    dist.all_reduce(torch.ones(4))
"""


def environment(**changes):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MESHPAR_DEBUG")}
    return clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


def meshpar(*arguments, **changes):
    command = [sys.executable, "-m", "meshpar", *arguments]
    return subprocess.run(command, env=environment(**changes), capture_output=True, text=True, timeout=200, check=False)


def torchrun(tmp_path, mode):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), mode, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    return done, [line for line in done.stderr.splitlines() if line.startswith("meshpar: ")]


def test_recipes_are_listed_with_the_first_line_of_their_header(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert "pp=2 x tp=3" in lines[-1]


def test_recipe_is_copied_but_never_over_a_file(tmp_path, capsys):
    target = tmp_path / "mine.yaml"
    assert main(["recipes", "cp", "llama-3.1-8b", str(target)]) == 0
    assert target.read_text() == shipped_recipes()["llama-3.1-8b"].read_text()
    target.write_text("mine")
    assert main(["recipes", "cp", "llama-3.1-8b", str(target)]) == 2
    assert target.read_text() == "mine"
    assert capsys.readouterr().err == f"meshpar: {target} exists already; give a new file name.\n"


def test_recipe_is_printed(capsys):
    assert main(["recipes", "cat", "llama-3.1-8b"]) == 0
    assert capsys.readouterr().out == shipped_recipes()["llama-3.1-8b"].read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["train", "r.yaml", "--fast", "optim.lr=1"],
        ["show"],
        ["show", "m", "--tp", "two"],
        ["show", "m", "--tp", "2", "optim.lr=1"],
        ["recipes", "cp"],
    ],
)
def test_bad_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml is neither a file nor a shipped recipe"),
        (["smollm2-135m-demo", "parallel.tpp=2"], "parallel.tpp=2 is not a key; did you mean parallel.tp?"),
        (["smollm2-135m-demo", "batch.global_size=7", "parallel.dp_shard=2"], "batch.global_size=7 does not divide"),
    ],
)
def test_bad_recipe_exits_with_2_before_any_process_starts(command, arguments, words, capsys):
    assert main([command, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"meshpar: {words}")


def test_every_problem_of_a_recipe_has_its_line(capsys):
    assert main(["train", "smollm2-135m-demo", "lr=1", "train.steps=0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "meshpar: the recipe cannot run:",
        "  train.steps=0 must be at least 1.",
        "  lr=1 is not a key; did you mean optim.lr?",
    ]


def test_show_refuses_a_setting_that_cannot_work(capsys):
    assert main(["show", "anything", "--pp", "2", "--schedule", "ZBVZeroBubble"]) == 2
    assert capsys.readouterr().err.startswith("meshpar: virtual_stages=1 does not work with schedule=ZBVZeroBubble")


def test_show_of_what_is_no_model_is_bad_usage(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"meshpar: {tmp_path} has no config.json\n"


def test_a_copy_into_no_directory_is_bad_usage(tmp_path, capsys):
    target = tmp_path / "no" / "mine.yaml"
    assert main(["recipes", "cp", "llama-3.1-8b", str(target)]) == 2
    assert capsys.readouterr().err == f"meshpar: {target} cannot be written: No such file or directory.\n"


def test_listing_recipes_imports_neither_torch_nor_transformers():
    code = "import sys; from meshpar.cli import main; main(['recipes']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "meshpar.recipe" in modules
    assert not {"torch", "transformers"} & set(modules)


def test_workers_of_the_wrong_world_size_say_so_once(tmp_path):
    """Two workers as torchrun starts them: the first to see the problem reports it."""
    processes = []
    for rank in range(2):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
        changes = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_0" / str(rank) / "error.json")}
        command = [sys.executable, "-m", "meshpar", "train", "smollm2-135m-demo"]
        env = environment(RANK=str(rank), WORLD_SIZE="2", **changes)
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    errors = "".join(process.communicate(timeout=200)[1] for process in processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert len(errors.splitlines()) == 1
    assert errors.startswith("meshpar: parallel.pp=2 x dp_replicate=1 x dp_shard=1 x tp=3 makes 6 processes")


def test_error_on_one_rank_ends_all_with_that_error_alone(tmp_path):
    done, messages = torchrun(tmp_path, "alone")
    ended = time.time()
    assert done.returncode == 1
    assert messages == [
        f"meshpar: error on rank 1 (pp=1, dp=0, tp=0, host {socket.gethostname()}): KeyError: 'rank 1 alone'"
    ]
    assert "onnection" not in done.stderr, "rank 0 must not report that it lost its peer"
    traceback = tmp_path / "run" / "errors" / "rank-1.txt"
    assert "KeyError: 'rank 1 alone'" in traceback.read_text()
    assert ended - traceback.stat().st_mtime < 30
    assert "traceback : meshpar: error on rank 1" in done.stderr, "torchrun's own summary must say the reason too"


def test_export_of_no_checkpoint_is_bad_usage(tmp_path, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"meshpar: {tmp_path} is no complete checkpoint: it has no meshpar.json.\n"


def test_error_on_every_rank_is_reported_once(tmp_path):
    done, messages = torchrun(tmp_path, "everywhere")
    assert done.returncode == 1
    assert len(messages) == 1
    assert messages[0].endswith("KeyError: 'every rank alike'")


@pytest.mark.parametrize(("mode", "raising"), [("shared-first", 0), ("shared-every", 1)])
def test_error_that_one_rank_shares_with_all_names_that_rank(tmp_path, mode, raising):
    done, messages = torchrun(tmp_path, mode)
    assert done.returncode == 1
    place = f"pp={raising}, dp=0, tp=0, host {socket.gethostname()}"
    assert messages == [f"meshpar: error on rank {raising} ({place}): KeyError: 'missing'"]


def test_run_that_fails_in_its_workers_shows_one_message_without_torchruns_noise(tmp_path):
    settings = ["parallel.pp=1", "parallel.tp=2", f"model.path={tmp_path}/no-model", f"output_dir={tmp_path}/run"]
    done = meshpar("train", "smollm2-135m-demo", *settings)
    assert done.returncode in (1, 2)
    assert f"{tmp_path}/no-model" in done.stderr
    assert sum(line.startswith("meshpar: ") for line in done.stderr.splitlines()) == 1
    for noise in ("Traceback", "torch/distributed/elastic", "ChildFailedError", "OMP_NUM_THREADS"):
        assert noise not in done.stderr


def test_worker_that_is_killed_is_reported_by_signal(tmp_path):
    command = [sys.executable, "-m", "meshpar", "train", "smollm2-135m-demo", "parallel.pp=1", "parallel.tp=2"]
    command += [f"model.path={tmp_path}/no-model", f"output_dir={tmp_path}/run"]
    parent = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while len(workers := psutil.Process(parent.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    # Stopped first, so that neither gets to fail in its own way.
    for worker in workers:
        worker.suspend()
    workers[0].send_signal(signal.SIGKILL)
    workers[1].resume()
    _, errors = parent.communicate(timeout=200)
    assert parent.returncode == 1
    assert "the process was ended by SIGKILL; the machine may have run out of memory" in errors


def test_rank_that_ends_after_another_has_said_why_is_not_reported(tmp_path, monkeypatch, capfd):
    """torchrun sees the silent rank's end first, and of that rank there is no error file."""
    package = tmp_path / "meshpar"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import os, pathlib, sys, time\n"
        "error_file = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "reported = error_file.parent.parent / 'reported'\n"
        "if os.environ['RANK'] == '1':\n"
        "    reported.write_text('143')\n"
        "    time.sleep(60)\n"
        "while not reported.exists() or not reported.read_text():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(143)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert launch(2, ["train"]) == 143
    assert "meshpar: " not in capfd.readouterr().err


def test_show_prints_plan_share_and_stages(tmp_path, capsys):
    models.tiny_config(num_hidden_layers=5).save_pretrained(tmp_path)
    assert main(["show", str(tmp_path)]) == 0  # tp=2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["module", "style", "parameters", "layers"]
    assert lines[-1] == "tp divides 1.00 of the decoder layers' multiply-adds (transformers' own plan: 1.00)"
    assert main(["show", str(tmp_path), "--tp", "1", "--pp", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "stage 0 on pp rank 0: layers 0-2",
        "stage 1 on pp rank 1: layers 3-4",
    ]
    assert main(["show", str(tmp_path), "--tp", "8"]) == 2
    assert "tp=8" in capsys.readouterr().err
