from __future__ import annotations

import configparser
import importlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import greyhound_ops

ROOT = Path(greyhound_ops.__file__).parents[1]
PACKAGES = {"greyhound_ops": ROOT, "greyhound_lowering": ROOT / "lowering"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built with what is installed and without a network."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs a source tree")
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("needs hatchling and pip: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(folder)]
    done = subprocess.run(
        [*command, "--no-deps", "--no-build-isolation", "--no-index", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [each for each in wheel.namelist() if each.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_contents_equal_the_tree(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(base).as_posix()
        for package, base in PACKAGES.items()
        for path in (base / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert packed == expected


def test_installs_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_shipped(package: str, wheel: zipfile.ZipFile) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_types_are_in_the_tree() -> None:
    for package, base in PACKAGES.items():
        assert (base / package / "py.typed").is_file()


def test_entry_point(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(parser["torch_dynamo_backends"]) == {
        "greyhound": "greyhound_lowering.backend:greyhound"
    }


def test_entry_point_loads() -> None:
    module = importlib.import_module("greyhound_lowering.backend")
    assert callable(module.greyhound)


def test_metadata(wheel: zipfile.ZipFile) -> None:
    text = metadata(wheel, "METADATA")
    assert "Name: greyhound-ops" in text
    assert f"Version: {greyhound_ops.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Dist: torch>=2.11" in text


def test_no_installed_package_hides_a_folder_of_tests() -> None:
    # A folder without __init__.py yields to any regular package of its name, wherever that stands
    # on the path: with transformers 5.25 came one named kernels.
    tests = Path(__file__).parent
    folders = {each.name for each in tests.iterdir() if each.is_dir()}
    imported = {
        match.group(1)
        for path in tests.rglob("*.py")
        for match in re.finditer(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    }
    open_to_it = [n for n in sorted(imported & folders) if not (tests / n / "__init__.py").exists()]
    # At the root of a checkout stands another folder of that name, and nothing here may make it
    # look like a package (test_no_package_called_lowering).
    assert open_to_it == ["lowering"]
