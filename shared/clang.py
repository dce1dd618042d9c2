"""A compiler for tinygrad, whose CPU backend runs `$CC`, `clang` unless set, for every kernel.

Where the machine has no clang, the `ziglang` wheel has one: `zig clang`. That is two words and CC takes one,
so a script of one line stands between.
"""

import atexit
import os
import shutil
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

REMEDY = "tinygrad needs clang, and there is none here: pip install ziglang, or set CC to a clang"


def find_clang() -> bool:
    """Point CC at a clang, before tinygrad compiles for the first time; False where none can be had."""
    if "CC" in os.environ or shutil.which("clang"):
        return True
    wheel = find_spec("ziglang")
    if wheel is None:
        return False
    folder = Path(tempfile.mkdtemp(prefix="clang-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script, zig = folder / "clang", Path(wheel.origin).with_name("zig" + sysconfig.get_config_var("EXE"))
    script.write_text(f'#!/bin/sh\nexec "{zig}" clang "$@"\n')
    script.chmod(0o700)
    os.environ["CC"] = str(script)
    return True
