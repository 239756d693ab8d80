from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from greyhound_ops import config


@pytest.fixture(autouse=True)
def _same_settings_afterwards():
    before = config.settings()
    yield
    config.configure(**dataclasses.asdict(before))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", True), ("true", True), ("YES", True), (" on ", True),
        ("0", False), ("False", False), ("no", False), ("off", False),
        ("", None), ("  ", None), (None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("default", [True, False])
def test_switch_from_the_environment(
    text: str | None, expected: bool | None, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GREYHOUND_CHECKS", raising=False)
    if text is not None:
        monkeypatch.setenv("GREYHOUND_CHECKS", text)
    assert config.env_bool("GREYHOUND_CHECKS", default) == (
        default if expected is None else expected
    )


@pytest.mark.parametrize("text", ["2", "maybe", "-1", "truth"])
def test_bad_switch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREYHOUND_CHECKS", text)
    with pytest.raises(ValueError, match=rf"GREYHOUND_CHECKS.*{text}"):
        config.env_bool("GREYHOUND_CHECKS", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024), (" 7 ", 7), ("2KiB", 2048), ("1.5 MiB", 3 * 2**19), ("1GiB", 2**30),
        ("1e6", 10**6), ("", None), (None, None),
    ],
)  # fmt: skip
def test_bytes_from_the_environment(
    text: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GREYHOUND_CHUNK_BYTES", raising=False)
    if text is not None:
        monkeypatch.setenv("GREYHOUND_CHUNK_BYTES", text)
    assert config.env_bytes("GREYHOUND_CHUNK_BYTES") == expected


@pytest.mark.parametrize("text", ["many", "1MB", "MiB", "0x10", "1,5MiB", "nan", "inf"])
def test_bad_bytes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREYHOUND_CHUNK_BYTES", text)
    with pytest.raises(ValueError, match=rf"GREYHOUND_CHUNK_BYTES.*{text}"):
        config.env_bytes("GREYHOUND_CHUNK_BYTES")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {},
            {
                "checks": False,
                "kernels": "auto",
                "chunk_budget_bytes": None,
                "region_body": "auto",
                "kernel_failure": "fallback",
            },
        ),
        (
            {
                "GREYHOUND_CHECKS": "1",
                "GREYHOUND_KERNELS": "torch",
                "GREYHOUND_CHUNK_BYTES": "64MiB",
                "GREYHOUND_REGION_BODY": "eager",
                "GREYHOUND_KERNEL_FAILURE": "raise",
            },
            {
                "checks": True,
                "kernels": "torch",
                "chunk_budget_bytes": 67108864,
                "region_body": "eager",
                "kernel_failure": "raise",
            },
        ),
    ],
    ids=["defaults", "all"],
)
def test_environment_is_read_at_import(
    variables: dict[str, str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHECKS", "KERNELS", "CHUNK_BYTES", "REGION_BODY", "KERNEL_FAILURE"):
        monkeypatch.delenv(f"GREYHOUND_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert expected.items() <= dataclasses.asdict(config._from_environment()).items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KERNELS", "cuda"),
        ("CHECKS", "perhaps"),
        ("CHUNK_BYTES", "-1"),
        ("REGION_BODY", "on"),
        ("KERNEL_FAILURE", "ignore"),
    ],
)
def test_bad_environment_fails_at_import(name: str, value: str) -> None:
    code = f"import os; os.environ['GREYHOUND_{name}'] = {value!r}; import greyhound_ops.config"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert name.lower()[:6] in done.stderr.splitlines()[-1].lower()


def _environment() -> dict[str, str]:
    import os
    from pathlib import Path

    return {**os.environ, "PYTHONPATH": str(Path(config.__file__).parents[1])}


def test_override_ends_with_its_block() -> None:
    before = config.settings()
    with config.override(checks=True, chunk_budget_bytes=5) as inside:
        assert inside == config.settings()
        assert config.settings().checks
        with config.override(checks=False):
            assert not config.settings().checks
            assert config.settings().chunk_budget_bytes == 5
        assert config.settings().checks
    assert config.settings() == before


def test_override_ends_with_an_error() -> None:
    before = config.settings()
    with pytest.raises(RuntimeError, match="inside"), config.override(checks=True):
        raise RuntimeError("inside")
    assert config.settings() == before


def test_configure_returns_what_was() -> None:
    before = config.settings()
    assert config.configure(kernels="torch") == before
    assert config.settings().kernels == "torch"


def test_settings_hold_for_every_thread() -> None:
    # The backward runs on autograd's own threads.
    with config.override(chunk_budget_bytes=123), ThreadPoolExecutor(1) as pool:
        assert pool.submit(config.settings).result().chunk_budget_bytes == 123


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kernels": "cuda"}, "kernels"),
        ({"chunk_budget_bytes": 0}, "chunk_budget_bytes"),
        ({"chunk_budget_bytes": -1}, "chunk_budget_bytes"),
        ({"region_body": "on"}, "region_body"),
        ({"kernel_failure": "ignore"}, "kernel_failure"),
    ],
    ids=str,
)
def test_bad_settings(changes: dict[str, object], name: str) -> None:
    before = config.settings()
    with pytest.raises(ValueError, match=name):
        config.configure(**changes)
    assert config.settings() == before


def test_unknown_setting() -> None:
    with pytest.raises(TypeError, match="chunk_bytes"):
        config.configure(chunk_bytes=1)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.settings().checks = True
