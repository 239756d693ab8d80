"""Rewritten models under DistributedDataParallel and fully_shard: two processes, gloo, the CPU."""

from __future__ import annotations

import concurrent.futures
import pathlib

import pytest
import torch

from lowering.rewriting import run_python

_PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn

import greyhound_lowering
from lowering.rewriting import TINY_OPTIONS, UPSTREAM
from lowering.test_compile_modes import CrossEntropy, NotLinear

RANK = {rank}
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{store}", rank=RANK, world_size=2)


def model(kind, classes, hidden):
    module = kind()
    torch.manual_seed(0)
    module.body, module.head = nn.Linear(hidden, hidden), nn.Linear(hidden, classes)
    return module


def batch(classes, hidden, rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 5 + rank, hidden, generator=generator)
    return x, torch.randint(0, classes, (2, 5 + rank), generator=generator)


def mean_gradients(kind, *sizes):
    total = {{}}
    for rank in range(2):
        module = model(kind, *sizes)
        (module(*batch(*sizes, rank)) * UPSTREAM).backward()
        for name, parameter in module.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad / 2
    return total


def fresh():
    torch._dynamo.reset()
    greyhound_lowering.clear_report()


def assert_rewritten(kind):
    ops = [each.op for each in greyhound_lowering.explain().decisions]
    assert ops == [kind.op], greyhound_lowering.explain()
"""

_DATA_PARALLEL = """
from torch.nn.parallel import DistributedDataParallel


def buckets(kind, sizes, chunk_size):
    fresh()
    module = model(kind, *sizes)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1)
    reduced = []

    def hook(state, bucket):
        reduced.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    options = {{**TINY_OPTIONS, "greyhound.chunk_size": chunk_size}}
    compiled = torch.compile(ddp, backend="greyhound", options=options)
    truth = mean_gradients(kind, *sizes)
    for _ in range(2):  # buckets are laid out anew after the first step
        module.zero_grad()
        (compiled(*batch(*sizes, RANK)) * UPSTREAM).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, truth[name])
    assert_rewritten(kind)
    return reduced


for kind, sizes in ((CrossEntropy, (37, 8)), (NotLinear, (640, 600))):
    # As many reductions whatever the number of chunks.
    one, many = buckets(kind, sizes, 100), buckets(kind, sizes, 3)
    assert one == many, (one, many)
    # The larger model is cut between trunk and head, where torch reduces one beside the other.
    assert len(one) == 2 if sizes == (37, 8) else len(one) > 2, one
dist.destroy_process_group()
"""

_SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

fresh()
module, mesh = model(NotLinear, 37, 8), init_device_mesh("cpu", (2,))
fully_shard(module.body, mesh=mesh)
fully_shard(module, mesh=mesh)
compiled = torch.compile(module, backend="greyhound", options=TINY_OPTIONS)
truth = mean_gradients(NotLinear, 37, 8)
for _ in range(2):
    module.zero_grad()
    (compiled(*batch(37, 8, RANK)) * UPSTREAM).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), truth[name])
assert_rewritten(NotLinear)
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs a torch with gloo",
)
@pytest.mark.parametrize("program", [_DATA_PARALLEL, _SHARDED], ids=["ddp", "fully_shard"])
def test_gradients_over_two_processes(program: str, tmp_path: pathlib.Path) -> None:
    programs = [
        (_PROGRAM + program).format(rank=rank, store=tmp_path / "store") for rank in range(2)
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run_python, programs))  # which raises if one fails
