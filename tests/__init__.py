"""One thread, set before torch is imported: tests fork, and a fork of OpenMP's threads may hang."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
