"""Messages of memory that ran out, as PyTorch writes and wrote them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopt_cli.pipeline.out_of_memory.oom_text import read_oom
from memopt_cli.records import OutOfMemoryText

MIB, GIB = 2**20, 2**30

NOW = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    main()
  File "/home/me/model.py", line 7, in forward
    return self.mlp(x)
  File "/home/me/.venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.50 GiB of \
which 10.50 MiB is free. Including non-PyTorch memory, this process has 23.67 GiB memory in use. Of the allocated \
memory 22.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but \
unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."""
BEFORE = """RuntimeError: CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 10.75 GiB total capacity; 8.50 GiB \
already allocated; 512.00 MiB free; 9.50 GiB reserved in total by PyTorch) If reserved memory is >> allocated …"""
ON_CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            NOW,
            OutOfMemoryText(
                asked_bytes=20 * MIB,
                free_bytes=int(10.5 * MIB),
                allocated_bytes=22 * GIB,
                reserved_bytes=int(1.5 * GIB),
                line="/home/me/model.py:7",
                is_of_gpu=True,
            ),
            id="now",
        ),
        pytest.param(
            BEFORE,
            OutOfMemoryText(
                asked_bytes=GIB,
                free_bytes=512 * MIB,
                allocated_bytes=int(8.5 * GIB),
                reserved_bytes=GIB,
                line="",
                is_of_gpu=True,
            ),
            id="before 2.0",
        ),
        pytest.param(ON_CPU, OutOfMemoryText(asked_bytes=8 * GIB), id="on the CPU"),
        pytest.param(f"{BEFORE}\n{ON_CPU}", OutOfMemoryText(asked_bytes=8 * GIB), id="the last one counts"),
    ],
)
def test_messages(text: str, expected: OutOfMemoryText) -> None:
    assert read_oom(text) == expected


def test_what_a_step_surely_has() -> None:
    found = read_oom(NOW)
    assert found.available_bytes == 22 * GIB + int(10.5 * MIB)
    assert OutOfMemoryText(asked_bytes=1).available_bytes == 0


def test_the_message_of_this_pytorch_is_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    found = read_oom(str(raised.value))
    assert found.asked_bytes == 1 << 60


def test_other_texts_hold_none() -> None:
    assert read_oom("") is None
    assert read_oom("loss 0.3\nRuntimeError: shapes do not match") is None


@given(st.text(), st.text(alphabet="0123456789. ", max_size=400))
def test_any_text_is_read(before: str, number: str) -> None:
    found = read_oom(f"{before} Tried to allocate {number} GiB. of which {number} MiB is free")
    assert found is None or 0 <= found.asked_bytes < 2**63
    assert found is None or 0 <= found.free_bytes < 2**63


def test_more_bytes_than_any_device_has_are_none() -> None:
    found = read_oom(f"Tried to allocate {'9' * 300} GiB. of which 8 B is free")
    assert (found.asked_bytes, found.free_bytes) == (0, 8)


LIMITED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 61.20 GiB is "
    "free. Process 2783 has 7.40 GiB memory in use. 8.00 GiB allowed; Of the allocated memory 6.50 GiB is allocated by "
    "PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
LIMITED_BEFORE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 6.50 GiB already allocated; "
    "61.20 GiB free; 8.00 GiB allowed; 7.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize("text", [LIMITED, LIMITED_BEFORE])
def test_a_process_may_be_allowed_less_than_is_free(text: str) -> None:
    found = read_oom(text)
    assert (found.free_bytes, found.available_bytes, found.event) == (GIB, 7.5 * GIB, "")


CARD = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 MiB is "
    "free."
)
OWN = (
    " Of the allocated memory 2.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("processes", "event"),
    [
        (" Process 1 has 3.20 GiB memory in use.", ""),
        (" Process 1 has 1.00 GiB memory in use. Process 2 has 3.20 GiB memory in use.", ""),
        (
            " Process 1 has 20.00 GiB memory in use. Process 2 has 3.20 GiB memory in use.",
            "another process holds 20.0 GiB of the 24.0 GiB card: end it, or choose another GPU",
        ),
        (
            " Process 1 has 10.00 GiB memory in use. Process 2 has 9.00 GiB memory in use. Including non-PyTorch "
            "memory, this process has 3.20 GiB memory in use.",
            "other processes hold 19.0 GiB of the 24.0 GiB card: end them, or choose another GPU",
        ),
    ],
)
def test_others_that_hold_the_card_are_named(processes: str, event: str) -> None:
    assert read_oom(CARD + processes + OWN).event == event


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("Memory cgroup out of memory: Killed process 4 (python3) anon-rss:1048576kB", "killed python3 at 1.0 GiB"),
        ("run.sh: line 3:  4242 Killed                  python train.py", "killed python, as it does when"),
        ("epoch 1\nKilled\n", "killed the process, as"),
        ("zsh: killed     python train.py", "killed python, as"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.", "killed the process, as"),
        ("[1]  + 12345 killed     python train.py", "killed the process, as"),
        ("RuntimeError: std::bad_alloc", 'the error is "std::bad_alloc"'),
        ("    held = f(x)\nMemoryError\n", 'the error is "MemoryError"'),
        ("DataLoader worker (pid 41) is killed by signal: Killed.", "killed a worker process of the DataLoader"),
        ("DataLoader worker (pid 41) is killed by signal: Bus error.", "shared memory (/dev/shm), where"),
        ("ERROR: Unexpected bus error encountered in worker.", "shared memory (/dev/shm), where"),
        ("torch.AcceleratorError: CUDA error: out of memory", 'the error is "CUDA error: out of memory"'),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", 'the error is "CUDA_ERROR_OUT_OF_MEMORY"'),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", 'the error is "CUBLAS_STATUS_ALLOC_FAILED"'),
    ],
)
def test_an_end_without_numbers_is_an_end_all_the_same(text: str, event: str) -> None:
    found = read_oom(text)
    assert event in found.event
    assert found.asked_bytes == 0


def test_an_error_that_a_worker_of_a_loader_handed_over_is_not_of_the_step() -> None:
    caught = (
        "RuntimeError: Caught MemoryError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "/me/data.py", line 18, in __getitem__\n    x = f()\n'
        "MemoryError: Unable to allocate 2. MiB for an array"
    )
    found = read_oom(caught)
    assert (found.asked_bytes, found.line, found.is_of_loading) == (2 * MIB, "/me/data.py:18", True)
    assert not read_oom(f"{caught}\n{NOW}").is_of_loading


@pytest.mark.parametrize("text", ["Killed the lights", "the job was Killed by me", "out of memories"])
def test_other_words_end_nothing(text: str) -> None:
    assert read_oom(text) is None


def test_numpy_asks_for_memory_too() -> None:
    assert read_oom("MemoryError: Unable to allocate 7.50 GiB for an array with shape (9,)").asked_bytes == 7.5 * GIB
