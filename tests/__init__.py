"""Tests, also run as programs: `python -m tests.faults.soak`, `python -m tests.gpu.sanitize`."""
