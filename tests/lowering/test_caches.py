"""Inductor's caches on disk never serve a graph that was made under other settings."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from lowering.rewriting import run_python

# One process a run: Dynamo's own cache is in memory, Inductor's under TORCHINDUCTOR_CACHE_DIR.
CODE = """
import json, torch, greyhound_lowering
from torch._dynamo.utils import counters
from lowering.forms import FORMS, Dims, loss_of
module, inputs = FORMS["{form}"].make(Dims())
compiled = torch.compile(module, {arguments})
loss = loss_of(compiled(*inputs))
(loss * 1.7).backward()
with torch.profiler.profile() as profile:
    compiled(*inputs)
report = greyhound_lowering.explain()
print("RESULT", json.dumps(dict(
    loss=loss.item(),
    grads=[parameter.grad.flatten().tolist() for parameter in module.parameters()],
    ran_op=any("greyhound" in event.name for event in profile.events()),
    ops=[each.op for each in report.decisions],
    rewritten=report.rewritten_count,
    left=report.left_count,
    avoided=report.logits_bytes_avoided,
    hits=counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    misses=counters["inductor"]["fxgraph_cache_miss"],
)))
"""

EAGER = 'backend="eager"'
PLAIN = 'backend="inductor"'
REWRITTEN = (
    'backend="greyhound", options={"greyhound.min_logits_bytes": 0, "greyhound.chunk_size": 5}'
)
SWITCHED_OFF = (
    'backend="greyhound", options={"greyhound.min_logits_bytes": 0, "greyhound.kinds": ()}'
)


def run_with_cache(
    arguments: str, cache: pathlib.Path, form: str = "A02", **env: str
) -> dict[str, Any]:
    surroundings = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **env}
    done = run_python(CODE.format(arguments=arguments, form=form), env=surroundings)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def assert_same_numbers(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for left, right in zip(one["grads"], other["grads"], strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-6)


def test_one_cache_shared_by_plain_and_rewritten_runs(tmp_path: pathlib.Path) -> None:
    plain = run_with_cache(PLAIN, tmp_path)
    assert not plain["ran_op"]
    assert plain["rewritten"] == plain["hits"] == 0

    rewritten = run_with_cache(REWRITTEN, tmp_path)
    assert rewritten["ran_op"], "the plain graph was served from the cache"
    assert rewritten["rewritten"] == 1
    assert_same_numbers(rewritten, plain)

    warm = run_with_cache(REWRITTEN, tmp_path)
    assert warm["hits"] > 0, "the cache was not warm: this shows nothing"
    assert warm["misses"] == 0
    assert warm["ran_op"]
    assert warm["loss"] == rewritten["loss"]
    assert warm["grads"] == rewritten["grads"]
    # The account is complete although nothing was compiled.
    assert (warm["rewritten"], warm["avoided"]) == (1, rewritten["avoided"])

    again = run_with_cache(PLAIN, tmp_path)
    assert again["hits"] > 0
    assert not again["ran_op"], "the rewritten graph was served from the cache"
    assert again["loss"] == plain["loss"]

    # And so do switches of the rewrite.
    off = run_with_cache(SWITCHED_OFF, tmp_path)
    assert not off["ran_op"]
    assert off["left"] == 1
    forbidden = run_with_cache(REWRITTEN, tmp_path, GREYHOUND_REWRITE="0")
    assert not forbidden["ran_op"]


@pytest.mark.parametrize("body", ["eager", "compiled"])
def test_region_from_a_warm_cache(tmp_path: pathlib.Path, body: str) -> None:
    """Its body is text in the graph: another process needs nothing that the first one knew."""
    env = {"GREYHOUND_REGION_BODY": body}
    cold = run_with_cache(REWRITTEN, tmp_path, "E06", **env)
    assert cold["ops"] == ["greyhound::row_region"]
    assert cold["hits"] == 0
    warm = run_with_cache(REWRITTEN, tmp_path, "E06", **env)
    assert warm["hits"] > 0, "the cache was not warm: this shows nothing"
    assert warm["misses"] == 0
    assert warm["ran_op"]
    for name in ("loss", "grads", "ops", "rewritten", "avoided"):
        assert warm[name] == cold[name], name
    assert_same_numbers(cold, run_with_cache(EAGER, tmp_path, "E06"))
