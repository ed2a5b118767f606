"""Runs as processes: dealt over cards, ended with their study, held up by a full disk and by another process."""

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from studies.short_runs import make_grid, start, wait_for

from crop_trl.files import read_rows
from crop_trl.studies.running import Task, last_lines, run_tasks, samplers


def test_commands_are_dealt_over_cards_and_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["sh", "-c", f"sleep 0.2; echo $CUDA_VISIBLE_DEVICES,$OMP_NUM_THREADS >> {tmp_path}/said; exit $0"]
    tasks = [Task(str(i), [*words, str(i % 2)], tmp_path / f"{i}.txt") for i in range(8)]
    found = []
    run_tasks(tasks, 4, ["2", "5"], lambda *end: found.append(end))
    said = [line.split(",") for line in (tmp_path / "said").read_text().split()]
    assert sorted(card for card, _ in said) == ["2"] * 4 + ["5"] * 4
    assert {threads for _, threads in said} == {str(max(1, len(os.sched_getaffinity(0)) // 4))}
    assert {task.name: status for task, status in found} == {str(i): i % 2 for i in range(8)}
    # As where a process cannot say which cores are its own.
    monkeypatch.delattr(os, "sched_getaffinity")
    run_tasks(tasks[:2], 2, [], print)
    assert (tmp_path / "said").read_text().split()[-1] == f",{max(1, os.cpu_count() // 2)}"
    for text in ("first", r"10\r20\rsecond\n\nthird"):
        run_tasks(
            [Task("a", ["sh", "-c", f"printf '{text}'", "two\nlines", "--hub_token", "hf_1"], tmp_path / "a.txt")],
            1,
            [],
            print,
        )
    assert last_lines(tmp_path / "a.txt") == ["second", "third"]
    assert "hf_1" not in (tmp_path / "a.txt").read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_what_ends_a_study_ends_its_runs(tmp_path, number):
    process = start(tmp_path / "out", make_grid(tmp_path, seed=[0, 1]), options=("--jobs", "2"))
    family = psutil.Process(process.pid)
    # Two launchers, each with its trainer.
    wait_for(lambda: len(family.children(recursive=True)) >= 4, process)
    children = family.children(recursive=True)
    process.send_signal(number)
    said = process.communicate()[0]
    assert process.returncode != 0 and not psutil.wait_procs(children, timeout=0)[1]
    assert "Traceback" not in said, said
    assert ("the runs that this study had started are stopped." in said) == (number == signal.SIGINT), said


@pytest.mark.multiprocess
def test_runs_sample_together(tmp_path):
    grid = make_grid(tmp_path, seed=[0, 1], use_cuda_graphs=[True])
    process = start(tmp_path / "out", grid, options=("--jobs", "2", "--sample_together"))
    said = process.communicate()[0]
    assert process.returncode == 0, said
    rows = read_rows(tmp_path / "out" / "runs.parquet")
    assert len(rows) == 2 and all(row["accuracy_after"] is not None for row in rows)
    assert all("shared_sampler" not in row["settings"] for row in rows)
    logs = [path.read_text() for path in (tmp_path / "out").glob("short/*/log.txt")]
    assert len(logs) == 2 and all("--shared_sampler" in log for log in logs)
    assert "Traceback" not in (tmp_path / "out" / "sampler.0.txt").read_text()


def test_a_sampler_that_has_ended_is_told(tmp_path):
    with samplers(tmp_path, [], 1) as (_, check):
        (process,) = [
            each for each in psutil.Process().children() if "crop_trl.models.shared_sampling" in each.cmdline()
        ]
        check()
        process.kill()
        psutil.wait_procs([process])
        with pytest.raises(OSError, match="has ended; .*sampler.0.txt' says why"):
            check()


TWO_PROCESSES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: "no"
use_cpu: false
num_machines: 1
num_processes: 2
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot ask to end with its parent")
@pytest.mark.parametrize("killed", [["launcher"], ["group", "study", "worker"]], ids=" ".join)
def test_kill_9_leaves_no_process_of_a_run_behind(tmp_path, killed):
    """Those that torchrun starts have sessions of their own."""
    launch, output = tmp_path / "two.yaml", tmp_path / "out"
    launch.write_text(TWO_PROCESSES)
    shorter = {"per_device_train_batch_size": [4], "use_cpu": [True], "reward": ["none"], "max_steps": [1]}
    grid = make_grid(tmp_path, launch=str(launch), **shorter)
    for number, whom in enumerate(killed):
        process = start(output, grid)

        def is_training(number=number):
            starts = "".join(log.read_text() for log in output.glob("*/*/log.txt")).split("== started: ")[1:]
            return len(starts) > number and "Training data" in starts[number]

        wait_for(is_training, process)
        (launcher,) = psutil.Process(process.pid).children()
        workers = launcher.children()
        assert len(workers) == 2
        if whom == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            {"study": process, "launcher": launcher, "worker": workers[1]}[whom].send_signal(signal.SIGKILL)
        # Half an hour ends what hangs; all end at once.
        assert not psutil.wait_procs([launcher, *workers], timeout=1800)[1], whom
        process.communicate()
    process = start(output, grid)
    said = process.communicate()[0]
    assert process.returncode == 0 and "All runs are finished" in said, said
    assert [row["steps"] for row in read_rows(output / "runs.parquet")] == [1]


IN_A_SMALL_DISK = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_study_on_a_full_disk_goes_on_where_there_is_room(tmp_path):
    """The disk is a file system in memory that holds a model and no checkpoint, then both."""
    (tmp_path / "out").mkdir()
    mount = f"mount -t tmpfs -o size=8m none {tmp_path / 'out'}"
    if not shutil.which("unshare") or subprocess.run([*IN_A_SMALL_DISK, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    grid = make_grid(tmp_path, max_steps=[1], reward=["none"])
    command = f"{sys.executable} -m crop_trl.commands study {grid} --output {tmp_path / 'out'}"
    script = f"{mount}; {command} || echo status $?; {mount.replace('size=8m', 'remount,size=99m')}; {command}"
    done = subprocess.run([*IN_A_SMALL_DISK, script], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.stdout.count("error: Process 0 could not save checkpoint-1 with 0.0 GiB free") == 1, done.stdout
    assert "1 failed: " in done.stdout and "status 1\n" in done.stdout and "All runs are finished" in done.stdout


def test_what_another_process_is_at_has_its_turn_after_that(tmp_path, capsys):
    lock, go = tmp_path / "a" / ".lock", tmp_path / "go"
    hold = tmp_path / "hold.py"
    hold.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom crop_trl.files import alone_in\n"
        f"with alone_in({str(lock)!r}, 'x'):\n    Path(sys.argv[1]).touch()\n"
        f"    while not Path({str(go)!r}).exists():\n        time.sleep(0.05)"
    )
    held = f"{sys.executable} {hold} $1 & while [ ! -e $1 ]; do sleep 0.05; done"
    other = Task("other", ["touch", str(go)], tmp_path / "other.txt")
    found = []
    # Held before, by a process that goes on until the other command has run.
    subprocess.run(["sh", "-c", held, "sh", str(tmp_path / "held")], check=True)
    task = Task("task", ["true"], tmp_path / "task.txt", lock)
    run_tasks([task, other], 1, [], lambda *end: found.append(end))
    assert found == [(other, 0), (task, 0)]
    assert capsys.readouterr().out.count("task is being trained by another process") == 1
    # Taken by such a process just after it was free, so that the command that was started has to give way.
    go.unlink()
    script = f'[ -e "$1" ] && exit 0; {held}; exit 1'
    task = Task("task", ["sh", "-c", script, "sh", str(tmp_path / "again")], tmp_path / "task.txt", lock)
    run_tasks([task, other], 1, [], lambda *end: found.append(end))
    assert found[2:] == [(other, 0), (task, 0)]
