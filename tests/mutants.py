"""Faults put into the code on purpose, one after another: the tests named with each must fail.

    python -m tests.mutants --check         # each fault still has its place in the code: a second
    python -m tests.mutants                 # all of them: needs minutes
    python -m tests.mutants 3 17            # some of them

They stand in tests/mutants.md, and are put into a copy of the tracked files as these are here,
uncommitted changes included; nothing is changed in place.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.md"
_ENTRY = re.compile(r"^## (\d+)\. (.+)\n\n```diff\n(.+)\n(.+)\n((?:[-+].*\n)+)```$", re.M)
_TOO_LONG = 600.0  # seconds for tests of code that is as it should be


class Mutant(NamedTuple):
    """A fault: in `file` the text `find`, which stands there once, becomes `put`; `tests` are for pytest."""

    number: int
    name: str
    file: Path
    tests: str
    find: str
    put: str

    def content(self, root: Path) -> str | None:
        """The file with the fault; None where that has no place, or several."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return text.replace(self.find, self.put) if text.count(self.find) == 1 else None


def read(text: str) -> list[Mutant]:
    mutants = []
    for number, name, file, tests, lines in _ENTRY.findall(text):
        texts = ["\n".join(re.findall(rf"^{sign}(.*)$", lines, re.M)) for sign in ("-", r"\+")]
        mutants.append(Mutant(int(number), name, Path(file), tests, *texts))
    assert len(mutants) == len(re.findall("^## ", text, re.M)), (
        f"{LIST}: an entry is not written as the others"
    )
    return mutants


def run(tests: str, root: Path, seconds: float) -> int | None:
    """pytest's exit status; None after so many seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]
    # No bytecode: by its time and size, a file with a fault may look like the one without.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **quiet) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what the tests have started as well


def verdict(mutant: Mutant, root: Path, usual: dict[str, float | None]) -> str:
    """What comes of a fault. `usual` keeps the seconds that tests take without it; None: they do not pass."""
    if (content := mutant.content(root)) is None:
        return "does not apply"
    if mutant.tests not in usual:
        began = time.monotonic()
        passed = run(mutant.tests, root, _TOO_LONG) == 0
        usual[mutant.tests] = time.monotonic() - began if passed else None
    if (seconds := usual[mutant.tests]) is None:
        return "tests do not pass without it"
    before = (root / mutant.file).read_bytes()
    (root / mutant.file).write_text(content, encoding="utf-8")
    status = run(mutant.tests, root, 60 + 5 * seconds)
    (root / mutant.file).write_bytes(before)
    # 1 is a test that fails, below 0 a process that died; all else but 0 says that no test was run.
    caught = status is None or status == 1 or status < 0
    return "caught" if caught else "SURVIVED" if status == 0 else f"pytest ended with status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="which faults; all by default")
    parser.add_argument("--check", action="store_true", help="only whether each has its place in the code")
    options = parser.parse_args()
    mutants = read(LIST.read_text(encoding="utf-8"))
    mutants = [one for one in mutants if not options.numbers or one.number in options.numbers]
    if options.check:
        lost = [one for one in mutants if one.content(ROOT) is None]
        for one in lost:
            print(f"does not apply {one.number:3}. {one.name}")
        print(f"{len(mutants) - len(lost)} of {len(mutants)} apply")
        return int(bool(lost))
    usual: dict[str, float | None] = {}
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
            if (ROOT / name).is_file():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder, name))
        for one in mutants:
            what = verdict(one, Path(folder), usual)
            caught += what == "caught"
            print(f"{what:14} {one.number:3}. {one.name}", flush=True)
    print(f"{caught} of {len(mutants)} caught")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
