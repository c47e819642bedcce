"""Ctrl-C: one word, exit code 130, no process left, nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kvsieve.workers import Workers


def test_an_interrupt_ends_a_command_and_its_workers():
    command = [sys.executable, "-m", "kvsieve", "verify", "--fuzz", "100000", "--jobs", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # What a shell runs in the background ignores interrupts, and so do all its children.
    with subprocess.Popen(command, start_new_session=True, preexec_fn=heed_interrupts, **pipes) as process:
        deadline = time.monotonic() + 60
        while len(group(process.pid)) < 3 and time.monotonic() < deadline:  # itself and two workers
            time.sleep(0.1)
        time.sleep(2)  # workers are starting, or at work
        os.killpg(process.pid, signal.SIGINT)
        try:
            out, error = process.communicate(timeout=120)
            deadline = time.monotonic() + 60  # multiprocessing's own process goes when it sees that all others went
            while group(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            left = group(process.pid)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, error, left) == (130, "", "interrupted\n", [])


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def group(leader: int) -> list[int]:
    """Processes of a process group that still run."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(name))
    return found


def test_what_is_done_comes_once():
    with Workers(2) as pool:
        assert pool.next_done(timeout=0) is None
        submitted = [pool.submit(divmod, 7, number) for number in range(5)]
        done = list(pool.completed())
        assert sorted(map(id, done)) == sorted(map(id, submitted)) and pool.next_done(timeout=0) is None
    assert isinstance(submitted[0].exception(), ZeroDivisionError) and submitted[2].result() == (3, 1)


def test_a_failure_among_workers_ends_the_others_at_once():
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), Workers(2) as pool:
        slow = pool.submit(time.sleep, 60)
        pool.submit(divmod, 1, 0).result()
    assert time.monotonic() - start < 30
    assert not (slow.done() and slow.exception() is None)
