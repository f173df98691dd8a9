"""What is collected here: without the stubbed driver no pretended device, without Triton no kernels."""

import ctypes
from importlib.util import find_spec

collect_ignore_glob = [] if hasattr(ctypes.CDLL(None), "pretended_device") else ["test_pretended*.py"]
if find_spec("triton") is None:
    collect_ignore_glob += ["test_kernels.py", "test_triton_step.py"]
