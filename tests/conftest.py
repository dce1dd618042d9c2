"""Tests run on the CPU, whatever tinygrad finds: it looks when it is first imported. Programs that they start
heed SIGINT, which they would not where the tests are a shell's background job, that is told to ignore it."""

import os
import signal

os.environ.setdefault("DEV", "CPU")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
