"""Without the stubbed driver nothing that pretends a device is collected here, without Triton no kernels."""

import ctypes
from importlib.util import find_spec

collect_ignore_glob = [
    *([] if hasattr(ctypes.CDLL(None), "pretended_device") else ["test_pretended*.py"]),
    *([] if find_spec("triton") else ["test_kernels.py", "test_triton_step.py"]),
]
