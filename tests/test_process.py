"""What the command does to its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stylize.process import WAITING

PROGRAM = """
import resource, sys
from stylize.process import prepare

if sys.argv[1] == "prepared":
    prepare()
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(20):  # until the heap has found its size
    torch.ones(1 << 24)  # 64 MB, more than glibc ever keeps by itself
before = faults()
for _ in range(4):
    torch.ones(1 << 24)
print(faults() - before)
"""


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_wait_as_the_user_says_or_briefly(said: dict[str, str], read: dict[str, str]) -> None:
    program = "import os, json; from stylize.process import prepare; prepare(); print(json.dumps(dict(os.environ)))"
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment | said
    )
    found = json.loads(run.stdout)
    assert {name: value for name, value in found.items() if name in WAITING} == read


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is meant")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    """A page of 4 kB is cleared by the system at its first touch; four times 64 MB are 65,536 of them."""

    def faults(how: str) -> int:
        run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert faults("prepared") < faults("as it comes") / 10


SCARCE = """
import re, sys
from pathlib import Path
from stylize.process import prepare, scarce_memory

if sys.argv[1] == "prepared":
    prepare()
import torch

def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3

def freed():
    before = resident()
    torch.ones(20 << 20)  # 84 MB
    return resident() - before

with scarce_memory():
    print(freed())
print(freed())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is meant")
@pytest.mark.parametrize(("how", "kept_after"), [("prepared", True), ("as it comes", False)])
def test_where_memory_is_scarce_freed_blocks_go_back(how: str, kept_after: bool) -> None:
    """In megabytes; and a process that was not prepared is left as it is."""
    run = subprocess.run([sys.executable, "-c", SCARCE, how], capture_output=True, text=True, check=True)
    inside, after = map(float, run.stdout.split())
    assert inside < 20
    assert (after > 60) == kept_after
