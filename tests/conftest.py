"""Tests run on the CPU, whatever tinygrad finds: it looks when it is first imported."""

import os

os.environ.setdefault("DEV", "CPU")
