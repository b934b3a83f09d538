"""The package as others see it: light to import, typed, one version (R44)."""

import importlib.metadata
import importlib.resources
import subprocess
import sys

import kvterrace

HEAVY = {"accelerate", "click", "gguf", "rich", "torch", "transformers", "typer"}


def test_importing_the_library_loads_no_engine_and_no_terminal() -> None:
    script = "import sys, kvterrace; print(*{name.partition('.')[0] for name in sys.modules})"
    answer = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(answer.stdout.split())
    assert "kvterrace" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_types_are_shipped() -> None:
    assert importlib.resources.files("kvterrace").joinpath("py.typed").is_file()


def test_the_version_is_the_metadata_version() -> None:
    assert kvterrace.__version__ == importlib.metadata.version("kvterrace")


def test_what_is_exported_is_there() -> None:
    names = kvterrace.__all__
    assert sorted(set(names)) == sorted(names)
    assert all(hasattr(kvterrace, name) for name in names)
    wanted = {"KVLayout", "KVTerraceError", "KeyChain", "Namespace", "Store", "Tier", "chain_keys", "open_store"}
    assert wanted <= set(names)


def test_every_name_is_there_though_it_is_imported_late() -> None:
    for name in kvterrace.__all__:
        assert getattr(kvterrace, name) is not None
    assert set(dir(kvterrace)) == set(kvterrace.__all__)
    assert not hasattr(kvterrace, "no_such_name")
