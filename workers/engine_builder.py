"""Puts an engine together: model, KV pool, runner, loop. Needs neither Ray nor Redis."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import dispatch
from kvstore.kv_layout import KvDtype, KvLayout
from kvstore.kv_pool import KvPool
from kvstore.prefix_hash import fingerprint
from workers.cpu_weights import WeightForm, weight_form
from workers.decode_graphs import CudaGraphs
from workers.engine import Engine, IndexSink
from workers.model_runner import ModelRunner
from workers.model_store import model_digest, resolve_model
from workers.models.spec import ModelSpec
from workers.options import EngineOptions, ModelOptions, SchedulerOptions
from workers.progress import Progress
from workers.protocol import ReplicaInfo
from workers.weights import load_model

_GIB = 2**30
_CPU_KV_GIB = 1.0


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that was not started yet, and where its model's files are."""

    engine: Engine
    model_dir: Path


def new_epoch() -> str:
    """A name for one incarnation of a replica: later ones sort later, and no two are ever equal."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


def build_engine(
    model: ModelOptions,
    options: EngineOptions,
    *,
    cache_dir: Path,
    replica_id: str = "local",
    make_index: Callable[[ReplicaInfo], IndexSink] | None = None,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Fetch and load the model, take the KV pool's memory, and wire an engine over both.

    Args:
        cache_dir: for downloaded and converted models.
        make_index: gets the replica's facts once they are known and returns where its changes go.

    Raises:
        ModelUnavailable: the model cannot be had.
        UnsupportedModel: its architecture is not built here.
        CheckpointError: its files are broken.
        ValueError: not even one block fits the memory given.
    """
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    device = _device(model.device)
    form = weight_form(
        options.cpu_weights, model.dtype, device, is_batch_invariant=options.batch_invariant
    )
    if options.batch_invariant:
        dispatch.install_batch_invariant(device.type)
    model_dir = resolve_model(
        model.name, revision=model.revision, cache_dir=cache_dir, progress=progress
    )
    network = load_model(
        model_dir,
        dtype=form.compute_dtype,
        device=device,
        progress=progress,
        make_projection=form.make_projection,
    )
    spec = network.spec
    layout = _layout(model, spec, form)
    num_blocks = _num_blocks(options, layout, device)
    info = _info(model, model_dir, layout, spec, form, num_blocks, device, replica_id)
    index = make_index(info) if make_index is not None else None
    scheduling = _scheduling(options, info.max_model_len)
    is_cuda = device.type == "cuda"
    runner = ModelRunner(
        network,
        KvPool(layout, num_blocks, device),
        device,
        scheduling,
        capture=CudaGraphs() if is_cuda and options.cuda_graphs else None,
    )
    engine = Engine(
        runner,
        info,
        scheduling,
        frozenset(spec.eos_token_ids),
        index,
        plans_ahead=is_cuda,
    )
    return BuiltEngine(engine, model_dir)


def _layout(model: ModelOptions, spec: ModelSpec, form: WeightForm) -> KvLayout:
    return KvLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=model.block_size,
        kv_dtype=KvDtype(model.kv_dtype),
        compute_dtype=form.compute_dtype,
    )


def _scheduling(options: EngineOptions, max_model_len: int) -> SchedulerOptions:
    return SchedulerOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_waiting=options.max_num_waiting,
        max_model_len=max_model_len,
        enable_prefix_caching=options.enable_prefix_caching,
        watermark=options.watermark,
        eviction=options.eviction,
        min_partial_tokens=options.min_partial_tokens,
    )


def _info(
    model: ModelOptions,
    model_dir: Path,
    layout: KvLayout,
    spec: ModelSpec,
    form: WeightForm,
    num_blocks: int,
    device: torch.device,
    replica_id: str,
) -> ReplicaInfo:
    compute_dtype = str(layout.compute_dtype).removeprefix("torch.")
    max_model_len = min(
        model.max_model_len or spec.max_model_len,
        spec.max_model_len,
        num_blocks * layout.block_size,
    )
    return ReplicaInfo(
        replica_id=replica_id,
        epoch=new_epoch(),
        model=model.name,
        fingerprint=fingerprint(
            {
                "model": model_digest(model_dir),
                "weights": form.name,
                "compute_dtype": compute_dtype,
                "kv_dtype": model.kv_dtype,
                "block_size": layout.block_size,
            }
        ),
        block_size=layout.block_size,
        num_blocks=num_blocks,
        kv_dtype=model.kv_dtype,
        kv_bytes_per_token=layout.bytes_per_token,
        compute_dtype=compute_dtype,
        device=str(device),
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _num_blocks(options: EngineOptions, layout: KvLayout, device: torch.device) -> int:
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    if options.kv_memory_gib is not None:
        memory_bytes = int(options.kv_memory_gib * _GIB)
    elif device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        share = total_bytes * options.gpu_memory_fraction - torch.cuda.memory_reserved(device)
        memory_bytes = min(int(share), free_bytes)
    else:
        memory_bytes = int(_CPU_KV_GIB * _GIB)
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"{memory_bytes} bytes are left for the KV pool, and one block takes {layout.block_bytes}; "
            "raise kv_memory_gib or gpu_memory_fraction"
        )
    return num_blocks
