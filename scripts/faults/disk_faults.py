"""Inject faults into other processes: file operations of the C library fail, hang or return flipped bits.

    with DiskFaults(folder) as disk:
        process = subprocess.Popen(command, env={**os.environ, **disk.environment})
        disk.fail("write", "/data/run/*", errno.ENOSPC)  # from now on
        disk.heal()

Linux only, with a C compiler.
"""

import errno
import mmap
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = (shutil.which("cc") or shutil.which("gcc")) if sys.platform == "linux" else None
RULES = 16
RULE = struct.Struct("16s224siiiii")
OPERATIONS = ("open", "create", "read", "flip", "write", "fsync", "stat", "rename", "remove", "mkdir", "list", "clock")


class DiskFaults:
    """Rules for all processes that were started with ``environment``; they hold at once."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None, "needs a C compiler"
        library, control = folder / "disk_faults.so", folder / "disk_faults"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        control.write_bytes(bytes(RULES * RULE.size))
        with control.open("r+b") as file:
            self.rules = mmap.mmap(file.fileno(), RULES * RULE.size)
        self.count = 0
        self.environment = {"LD_PRELOAD": str(library), "DISK_FAULTS": str(control)}

    def fail(
        self,
        operation: str,
        pattern: str | Path,
        error: int = 0,
        *,
        rank: int = -1,
        times: int = -1,
        seconds: int = 0,
        skip: int = 0,
    ) -> int:
        """From now on let ``operation`` fail with the errno ``error`` where the path matches the shell's ``pattern``.

        Returns the number of this rule.

        Args:
            operation: one of ``OPERATIONS``: to open for reading, to open for writing, ..., to list a folder. With
                "flip" a read succeeds, and a bit in the middle of what it has read is another one. "clock": see
                ``move_clock``.
            error: 0 lets it hang only.
            rank: only in the process with this ``RANK``.
            times: how often; -1 until ``heal``.
            seconds: how long it hangs before.
            skip: how many operations pass before.
        """
        assert operation in OPERATIONS
        if operation == "flip":
            error = errno.EIO  # any but 0
        rule = RULE.pack(operation.encode(), str(pattern).encode(), error, rank, times, seconds, skip)
        start, self.count = self.count * RULE.size, self.count + 1
        self.rules[start + 1 : start + RULE.size] = rule[1:]
        self.rules[start : start + 1] = rule[:1]  # last: the rule holds when it is whole
        return self.count - 1

    def move_clock(self, seconds: int) -> int:
        """From now on the wall clock of the processes is ``seconds`` ahead; returns the number of this rule."""
        return self.fail("clock", "", seconds=seconds)

    def has_struck(self, rule: int) -> bool:
        """Whether the rule of this number, made with ``times``, has struck so often, or is hanging the last time."""
        times, _, _ = struct.unpack_from("iii", self.rules, (rule + 1) * RULE.size - 12)
        return bool(times <= 0)

    def heal(self, rule: int | None = None) -> None:
        """Remove the rule with this number, or all rules. Hanging operations continue within a second."""
        if rule is not None:
            start = rule * RULE.size + 16
            self.rules[start : start + RULE.size - 16] = bytes(RULE.size - 16)  # of an empty pattern: matches nothing
            return
        self.rules[:] = bytes(len(self.rules))
        self.count = 0

    def __enter__(self) -> "DiskFaults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()
        self.rules.close()
