"""--help and a mistyped option answer at once: they import no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "module, option", [("generate", "--max-new-tokens"), ("app", "--any-model"), ("eval.__main__", "--tasks")]
)
def test_help_and_mistyped_options_need_no_torch(module, option):
    # None stands for a module that cannot be imported.
    begin = f"import sys; sys.modules['torch'] = None; from {module} import main; "
    for argument, status in (("--help", 0), ("--no-such-option", 2)):
        code = f"{begin}sys.exit(main(['{argument}']))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        said = done.stderr if status else done.stdout
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert (argument if status else option) in said
