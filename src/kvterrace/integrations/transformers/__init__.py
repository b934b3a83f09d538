"""Hugging Face Transformers: KV of full-attention causal language models, kept and restored exactly.

Importing this module needs torch and Transformers (`pip install 'kvterrace[transformers]'`) in a supported version and
raises `MissingDependencyError` otherwise. The one object to hold is `PrefixCache`.
"""

from __future__ import annotations

from kvterrace.integrations.transformers.versions import SUPPORTED_TRANSFORMERS, check_versions

check_versions()

from kvterrace.integrations.transformers.model import (  # noqa: E402 - only after the versions were checked
    cache_argument,
    layout_from_config,
    layout_from_model,
)
from kvterrace.integrations.transformers.namespace import (  # noqa: E402
    namespace_for_model,
    weights_fingerprint,
)
from kvterrace.integrations.transformers.prefix import PrefixCache  # noqa: E402
from kvterrace.integrations.transformers.report import BlockFault, RestoreReport, StoreReport  # noqa: E402

__all__ = [
    "SUPPORTED_TRANSFORMERS",
    "BlockFault",
    "PrefixCache",
    "RestoreReport",
    "StoreReport",
    "cache_argument",
    "check_versions",
    "layout_from_config",
    "layout_from_model",
    "namespace_for_model",
    "weights_fingerprint",
]
