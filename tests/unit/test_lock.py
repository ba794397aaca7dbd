"""Laws of the lock file: complete, CPU only, and without what is slow to build or breaks transformers."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"(?:# (?=torch==))?([A-Za-z0-9._-]+)==([^\s;]+)")
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "llm")


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [PIN.fullmatch(line) for line in lines]
    assert all(pin or line.startswith("#") for pin, line in zip(pins, lines, strict=True))
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def every_dependency_of_the_project_is_locked_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = locked()
    for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]:
        requirement = Requirement(text)
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), text


def the_lock_holds_a_cpu_torch_and_nothing_that_is_unwanted() -> None:
    versions = locked()
    assert versions["torch"].endswith("+cpu")
    assert not set(UNWANTED) & set(versions)
    assert not [name for name in versions if name.startswith("nvidia-")]


def the_only_package_index_in_the_tree_is_the_one_of_cpu_torch() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    index = re.compile(r"https?://[\w./-]*(?:whl|simple|pypi)[\w./-]*")
    found = {
        match
        for name in files.stdout.split("\n")
        if name and (ROOT / name).is_file()
        for match in index.findall((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    }
    assert found == {"https://download.pytorch.org/whl/cpu"}
