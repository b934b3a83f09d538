"""vLLM: a KV connector that keeps the KV of prompts on a ladder of DRAM and SSD, over eviction, restart and failure.

Turned on by one flag of vLLM's:

    --kv-transfer-config '{"kv_connector": "KVTerraceConnector",
        "kv_connector_module_path": "kvterrace.integrations.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"path": "/nvme/kv"}}'

Importing this module needs vLLM in a supported version and raises `MissingDependencyError` otherwise.
"""

from __future__ import annotations

from kvterrace.integrations.vllm.versions import SUPPORTED_VLLM, check_versions

check_versions()

from kvterrace.integrations.vllm.connector import KVTerraceConnector  # noqa: E402 - only after the version was checked

__all__ = ["SUPPORTED_VLLM", "KVTerraceConnector", "check_versions"]
