"""What the repository promises its readers: small files, short functions, one-way imports, whole help."""

import ast
import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

import adm_unet.sample
import adm_unet.train
import compare
import edm2_mp_unet.sample
import edm2_mp_unet.train
import minimal_uvit.sample
import minimal_uvit.train
import posthoc_ema.reconstruct
import posthoc_ema.sweep
from shared.run import cli

ROOT = Path(__file__).parents[1]
PROJECTS = ("minimal_uvit", "adm_unet", "edm2_mp_unet", "posthoc_ema")
FOLDERS = ("shared", *PROJECTS, "comparison")
SOURCES = [ROOT / "compare.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]
COMMANDS = {
    "compare.py": (compare.main, compare.COMMANDS),
    "adm_unet/train.py": (adm_unet.train.train, adm_unet.train.PRESETS),
    "adm_unet/sample.py": (adm_unet.sample.sample, adm_unet.sample.SampleConfig),
    "minimal_uvit/train.py": (minimal_uvit.train.train, minimal_uvit.train.PRESETS),
    "minimal_uvit/sample.py": (minimal_uvit.sample.sample, minimal_uvit.sample.SampleConfig),
    "posthoc_ema/reconstruct.py": (posthoc_ema.reconstruct.main, posthoc_ema.reconstruct.Options),
    "posthoc_ema/sweep.py": (posthoc_ema.sweep.sweep, posthoc_ema.sweep.Options),
    "edm2_mp_unet/train.py": (edm2_mp_unet.train.train, edm2_mp_unet.train.PRESETS),
    "edm2_mp_unet/sample.py": (edm2_mp_unet.sample.sample, edm2_mp_unet.sample.SampleConfig),
}
for project in PROJECTS[:3]:
    twin = import_module(f"{project}.train_tinygrad")
    COMMANDS[f"{project}/train_tinygrad.py"] = (twin.train, twin.PRESETS)


def test_shared_is_small():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "shared").glob("*.py")) <= 1000


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_reads_well(path):
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py":
        return
    assert ast.get_docstring(tree), "a file opens with a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is long"
        if isinstance(node, ast.ImportFrom):
            package = node.module.split(".")[0]
            own = path.parent.name
            allowed = {own, "posthoc_ema"} if own in PROJECTS else set() if own == "shared" else {*PROJECTS}
            assert package not in PROJECTS or package in allowed, f"imports {node.module}"
            assert package not in ("compare", "comparison") or own not in ("shared", *PROJECTS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_sentence(command, monkeypatch):
    main, options = COMMANDS[command]
    help_text = run_cli(monkeypatch, command, main, options, "--help")[1]
    help_text = re.sub(r"^.*options *$| *-{5,} *$", "", help_text, flags=re.MULTILINE)  # the groups' heads
    parts = re.split(r"^  (?=--|-h|\[)", help_text.split("\nsubcommands")[0], flags=re.MULTILINE)[1:]
    assert len(parts) >= 5
    for part in parts:
        text = " ".join(part.split())
        sentence = re.sub(r"^--?[\w.-]+(, --?[\w.-]+)*|\[[^\]]*\]+|\{[^}]*\}|\(default.*", "", text)
        sentence = re.sub(r"\b[A-Z]{2,}\b", "", sentence)  # the kinds of values
        assert len(sentence.split()) >= 2, f"no sentence in {text!r}"


@pytest.mark.parametrize("command, arguments, sentence", [
    ("compare.py", "--long-skips constant:2", r"'constant:2': long-skip kappa is 2.0: it must be in"),
    ("compare.py", "--long-skips scaled", "long-skip kind 'scaled' is unknown"),
    ("compare.py", "--networks dit", "invalid choice 'dit'"),
    ("compare.py", "--lr nan", "lr has nan"),
    ("compare.py", "--seeds", "seeds is empty"),
    ("compare.py", "theory --depths 0", "depths are"),
    ("compare.py", "theory --long-skips learnable", "theory takes constants only"),
    ("compare.py", "--data.source nowhere --out {tmp}/r", "nowhere"),
    ("compare.py", "--out /dev/null", "out, /dev/null, is a file"),
    ("minimal_uvit/train.py", "--lr x", "--lr: could not convert string to float: 'x'"),
    ("minimal_uvit/train.py", "--lr -1", "lr is -1.0: it must be positive"),
    ("minimal_uvit/train.py", "--net.width 0", "width and num_heads must be at least 1"),
    ("minimal_uvit/train.py", "--net.long-skip.kappa 2", r"kappa is 2.0: it must be in \(0, 1\]"),
    ("minimal_uvit/train.py", "--net.long-skip.kind scaled", "invalid choice 'scaled'"),
    ("minimal_uvit/train.py", "--frobnicate 3", "Unrecognized options: --frobnicate"),
    ("minimal_uvit/train.py", "cifar11", "Unrecognized options: cifar11"),
    ("minimal_uvit/train.py", "--duration 0", "duration is 0: it must be positive"),
    ("minimal_uvit/train.py", "--sigma-rels 0.05 0.3 --out {tmp}/r", r"sigma_rel is \[0.05 0.3 \]"),
    ("minimal_uvit/train.py", "--device tpu --out {tmp}/r", "device 'tpu' cannot be used"),
    ("minimal_uvit/train.py", "--data.source nowhere --out {tmp}/r", "nowhere"),
    ("minimal_uvit/train.py", "--net.img-size 16 --out {tmp}/r", r"\(1, 8, 8\), but net takes \(1, 16, 16\)"),
    ("minimal_uvit/train.py", "--net.num-classes 8 --out {tmp}/r", "net has 7 classes, but digits has 10"),
    ("adm_unet/train.py", "--net.attn-resolutions 3", r"attn_resolutions \[3\] are never reached"),
    ("adm_unet/train.py", "--net.channels 20", "a level's width is 20: it must be a multiple of 32"),
    ("adm_unet/train.py", "--num-steps 10 --out {tmp}/r", "a schedule of 10 steps is not between 0 and 1"),
    ("adm_unet/train.py", "classifier --net.num-classes 7 --out {tmp}/r", "net has 7 classes, but digits"),
    ("adm_unet/sample.py", "--official {tmp}/x.pt --preset adm", "preset 'adm' is unknown"),
    ("adm_unet/sample.py", "--eta 1", "heun takes no eta"),
    ("minimal_uvit/train.py", "--sigma-rels --out {tmp}/r", r"sigma_rels are \[\]: one or more"),
    ("minimal_uvit/train.py", "--sigma-rels 0.05 0.0501", "one or more that differ to three decimals"),
    ("minimal_uvit/train.py", "--P-mean nan", "P_mean is nan"),
    ("minimal_uvit/train.py", "--weight-decay inf", "weight_decay is inf"),
    ("minimal_uvit/train.py", "--seed 99999999999999999999999", "seed is 99999999999999999999999"),
    ("minimal_uvit/train.py", "--net.mlp-ratio nan", "mlp_ratio nan"),
    ("minimal_uvit/train.py", "--net.num-classes -1", "num_classes is -1"),
    ("minimal_uvit/train.py", "--data.image-size -1", "image_size is -1"),
    ("minimal_uvit/train.py", "--data.holdout -1", "holdout is -1"),
    ("minimal_uvit/train.py", "--device meta --out {tmp}/r", "device 'meta' cannot be used"),
    ("minimal_uvit/train.py", "--out /dev/null/run --duration 32", "/dev/null/run"),
    ("minimal_uvit/sample.py", "--guide-sigma-rel 0.1", "a guide needs a guidance other than 1"),
    ("minimal_uvit/sample.py", "--guidance nan", "guidance is nan"),
    ("minimal_uvit/sample.py", "--churn inf", "churn is inf"),
    ("minimal_uvit/sample.py", "--steps 0", "steps is 0"),
    ("minimal_uvit/sample.py", "{tmp}/nothing", "nothing holds no snapshot"),
    ("minimal_uvit/sample.py", "--num 0", "num is 0"),
    ("minimal_uvit/sample.py", "--official {tmp}/x.pth --preset s3", "preset 's3' is unknown"),
    ("minimal_uvit/sample.py", "--official {tmp}/x.pth", "x.pth"),
    ("minimal_uvit/sample.py", "--steps 1.5", "--steps"),
    ("minimal_uvit/sample.py", "--churn 1 --sampler dpmpp", "takes no churn"),
    ("edm2_mp_unet/train.py", "--decay -1", "decay and warmup must not be negative"),
    ("edm2_mp_unet/train.py", "--net.img-size 7", "img_size 7 cannot be halved for 2 levels"),
    ("edm2_mp_unet/train.py", "--net.num-classes 8 --out {tmp}/r", "net has 8 classes, but digits has 10"),
    ("edm2_mp_unet/train.py", "--precision float64", "invalid choice 'float64'"),
    ("edm2_mp_unet/sample.py", "{tmp}/nothing", "nothing"),
    ("edm2_mp_unet/sample.py", "--official {tmp}/x.pkl", "x.pkl does not exist"),
])
def test_bad_input_is_one_line(command, arguments, sentence, monkeypatch, tmp_path):
    main, options = COMMANDS[command]
    code, _, stderr = run_cli(monkeypatch, command, main, options, *arguments.format(tmp=tmp_path).split())
    assert code == 2
    assert re.search(sentence, stderr) and stderr.count("\n") == 1, stderr
    assert not list(tmp_path.iterdir())


def run_cli(monkeypatch, command: str, main, options, *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command, in this process."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as end:
        cli(main, options, "A command.")
    return end.value.code, stdout.getvalue(), stderr.getvalue()


def test_a_wrong_option_of_the_real_command():
    result = subprocess.run(
        [sys.executable, "minimal_uvit/train.py", "--lr", "nan"],
        cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "train.py: lr is nan: it must be positive and finite\n"
