"""vLLM's scheduler and both halves of the connector over a pool of pages, with arithmetic in place of a model.

KV of a token is a number made of all tokens up to it, of what else decides KV (salt, adapter, images) and of the
weights; the next token is made of the same. A step writes its tokens' KV into the pool; before that, every token that
the scheduler counts as computed must have its KV there, to the bit, in every layer and head. So whatever the connector
loads, saves or fails to load is checked against the prompt itself, and never against what it did before.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvterrace.integrations.vllm.connector import KVTerraceConnector

BLOCK = 16
LAYERS, HEADS, DIM = 3, 2, 4
VOCABULARY = 512
BLOCK_NBYTES = LAYERS * HEADS * BLOCK * 2 * DIM * 4


def model_folder(folder: Path, weights: bytes = b"one", **facts: Any) -> Path:
    """A folder with the config of a small Llama, changed by `facts`, and weights that nobody reads but to tell them
    from others."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
        **facts,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def config_for(model: Path, extra: Mapping[str, Any], **changes: Any) -> VllmConfig:
    """A configuration of vLLM with the connector; `changes`: `policy`, `role`, `batched_tokens`, `seqs`,
    `ranks`, `backend`, `longest`, `implementation`, `events`."""
    longest = changes.get("longest", 512)
    return VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=changes.get("ranks", 1), distributed_executor_backend=changes.get("backend")
        ),
        model_config=ModelConfig(
            model=str(model),
            tokenizer=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=longest,
            seed=0,
            model_impl=changes.get("implementation", "auto"),
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=changes.get("prefix_caching", True)),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=changes.get("batched_tokens", 128),
            max_num_seqs=changes.get("seqs", 8),
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=changes.get("events", False), publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTerraceConnector",
            kv_connector_module_path="kvterrace.integrations.vllm",
            kv_role=changes.get("role", "kv_both"),
            kv_load_failure_policy=changes.get("policy", "recompute"),
            kv_connector_extra_config=dict(extra),
        ),
    )


def cache_config(blocks: int, spec: Any = None, ranks: int = 1) -> KVCacheConfig:
    """One group of full attention over all layers, as one of `ranks` has it."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    if spec is None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS // ranks, head_size=DIM, dtype=torch.float32)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=page * blocks * LAYERS, layers=names, layer_stride=page * blocks, block_stride=page, offset=0
    )
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBHNC", hash_block_size=BLOCK,
    )  # fmt: skip


class Loras(WorkerLoRAManager):
    """Loads adapters as vLLM's workers do, with vLLM's own code, and keeps them until told otherwise.

    Attributes:
        held: by number, the bytes that the weights had when they were loaded.
    """

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.max_position_embeddings, self.vocab_size = None, VOCABULARY
        self.lora_config: Any = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
        self._lora_model_cls = LoRAModel
        self._adapter_manager: Any = SimpleNamespace(
            supported_lora_modules=["q_proj"], packed_modules_mapping={}, model=None, moe_ep_load_spec=None,
            _validate_moe_lora_format=lambda _: None, _validate_modules_to_save=lambda _: None,
            _validate_token_classification_lora=lambda _: None,
        )  # fmt: skip

    def use(self, request: LoRARequest | None) -> None:
        """Load the adapter, unless it is loaded."""
        if request is not None and (request.lora_int_id not in self.held or request.load_inplace):
            self._load_adapter(request)
            self.held[request.lora_int_id] = (Path(request.lora_path) / "adapter_model.safetensors").read_bytes()


def adapter(folder: Path, weights: float, *, name: str = "name", number: int = 1) -> LoRARequest:
    """An adapter of one layer, in files, with such weights."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.full((2, 32), weights), f"{layer}.lora_B.weight": torch.ones(16, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest(name, number, str(folder))


class WrongKVError(AssertionError):
    """The pool does not hold the KV of a token that counts as computed."""


class Machine:
    """An engine of one rank, or of `ranks`, each with its share of the heads; all in this process."""

    def __init__(
        self,
        model: Path,
        extra: Mapping[str, Any],
        *,
        blocks: int = 24,
        weights: int = 0,
        ranks: int = 1,
        **changes: Any,
    ) -> None:
        self.config = config_for(model, extra, ranks=ranks, **changes)
        self.config.cache_config.num_gpu_blocks = blocks
        caches = cache_config(blocks, ranks=ranks)
        self.weights = weights
        self.loras = Loras()
        self.pools = [torch.zeros(LAYERS, blocks, HEADS // ranks, BLOCK, 2 * DIM) for _ in range(ranks)]
        self.workers = [self._worker(rank, caches) for rank in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            self.config, caches, StructuredOutputManager(self.config), block_size=BLOCK, hash_block_size=BLOCK,
            log_stats=True,
        )  # fmt: skip
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self.answers: dict[str, list[int]] = {}
        self.computed_tokens = 0
        self.steps = 0
        self.counts: dict[str, Any] = {}

    def _worker(self, rank: int, caches: KVCacheConfig) -> KVTerraceConnector:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        worker = KVTerraceConnector(config, KVConnectorRole.WORKER, caches)
        names = caches.kv_cache_groups[0].layer_names
        worker.register_kv_caches({name: self.pools[rank][at] for at, name in enumerate(names)})
        return worker

    @property
    def worker(self) -> KVTerraceConnector:
        """The first rank's."""
        return self.workers[0]

    # -- arithmetic in place of a model --------------------------------------------------------------------------------

    def _numbers(self, request: Any) -> list[int]:
        """One number below 2**23 for each token of a request, of everything up to it."""
        lora = request.lora_request
        adapter = b"" if lora is None else self.loras.held[lora.lora_int_id]
        seed = plain_seed(self.weights, request.cache_salt, adapter)
        return prefix_numbers(list(request.all_token_ids), seed, _images(request))

    # -- driving -------------------------------------------------------------------------------------------------------

    def add(self, name: str, tokens: Sequence[int], *, answer: int = 4, **facts: Any) -> Request:
        """A new request for `answer` tokens."""
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            **facts,
        )
        self.scheduler.add_request(request)
        self.answers[name] = []
        return request

    def step(self) -> None:
        """One step, with the hooks in the order of vLLM's model runner."""
        self.steps += 1
        planned = self.scheduler.schedule()
        meta = planned.kv_connector_metadata
        for name in planned.num_scheduled_tokens:
            self.loras.use(self.scheduler.requests[name].lora_request)
        for worker in self.workers:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(copy.deepcopy(meta))  # as if by way of another process
        sampled = self._forward(planned)
        outputs = self.scheduler.update_from_output(
            planned, self._aggregator.aggregate([self._end(worker, planned, sampled) for worker in self.workers])
        )
        for each in outputs.values():
            for one in each.outputs:
                self.answers[one.request_id] += one.new_token_ids
            if each.scheduler_stats is not None and each.scheduler_stats.kv_connector_stats:
                for key, value in each.scheduler_stats.kv_connector_stats.items():
                    self.counts[key] = self.counts[key] + value if key in self.counts else value

    def _end(self, worker: KVTerraceConnector, planned: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        """What the model runner of one rank does after the forward pass."""
        worker.start_load_kv(None)
        worker.wait_for_save()
        found = worker.get_transfer_results(planned.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=found.finished_sending,
            finished_recving=found.finished_recving,
            failed_recving=found.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(planned.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=output,
        )

    def run(self, most_steps: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still {len(self.scheduler.requests)} requests after {most_steps} steps")

    def ask(self, tokens: Sequence[int], *, name: str = "", **facts: Any) -> tuple[list[int], int]:
        """Run one request to its end: the answer, and the tokens that were computed for it."""
        before = self.computed_tokens
        name = name or f"request {len(self.answers)}"
        self.add(name, tokens, **facts)
        self.run()
        return self.answers[name], self.computed_tokens - before

    def _forward(self, planned: Any) -> dict[str, list[int]]:
        sampled = {}
        for name, count in planned.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            numbers = self._numbers(request)
            (rows,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            stop = request.num_computed_tokens
            start = stop - count
            self._check(name, rows, numbers[:start])
            for at in range(start, stop):
                for pool, kv in zip(self.pools, kv_of(numbers[at]).chunk(len(self.pools), dim=1), strict=True):
                    pool[:, rows[at // BLOCK], :, at % BLOCK, :] = kv
            self.computed_tokens += count
            sampled[name] = [numbers[stop - 1] % VOCABULARY] if stop == request.num_tokens else []
        return sampled

    def _check(self, name: str, rows: list[int], numbers: list[int]) -> None:
        for at, number in enumerate(numbers):
            held = torch.cat([pool[:, rows[at // BLOCK], :, at % BLOCK, :] for pool in self.pools], dim=1)
            if not torch.equal(held, kv_of(number)):
                raise WrongKVError(f"step {self.steps}: token {at} of {name} in row {rows[at // BLOCK]}")

    def close(self) -> None:
        self.scheduler.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()


@contextmanager
def machine(model: Path, extra: Mapping[str, Any], **options: Any) -> Iterator[Machine]:
    made = Machine(model, extra, **options)
    try:
        yield made
    finally:
        made.close()


def _images(request: Any) -> dict[int, str]:
    """What image begins at which token."""
    return {feature.mm_position.offset: feature.identifier for feature in request.mm_features}


def prefix_numbers(tokens: Sequence[int], seed: bytes, images: Mapping[int, str]) -> list[int]:
    hashed, numbers = hashlib.sha256(seed), []
    for at, token in enumerate(tokens):
        hashed.update(repr((token, images.get(at))).encode())
        numbers.append(int.from_bytes(hashed.digest()[:3], "little") >> 1)
    return numbers


def kv_of(number: int) -> torch.Tensor:
    """KV of one token, `[layers, heads, content]`: whole numbers that float32 holds exactly, other ones everywhere."""
    return (torch.arange(LAYERS * HEADS * 2 * DIM, dtype=torch.float32) + number).reshape(LAYERS, HEADS, 2 * DIM)


def reference(tokens: Sequence[int], count: int, seed: bytes, images: Mapping[int, str] | None = None) -> list[int]:
    """The answer of `count` tokens, without any engine."""
    grown, answer = list(tokens), []
    for _ in range(count):
        answer.append(prefix_numbers(grown, seed, images or {})[-1] % VOCABULARY)
        grown.append(answer[-1])
    return answer


def plain_seed(weights: int = 0, salt: str | None = None, adapter: bytes = b"") -> bytes:
    return repr((weights, salt, adapter)).encode()


def prompt(seed: int, tokens: int) -> list[int]:
    found: list[int] = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found
