"""Train the same model without and with the rewrite and compare the two runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys

import torch
from tqdm import tqdm

import greyhound_lowering
from greyhound_ops.demo import text
from greyhound_ops.demo.model import GPTConfig
from greyhound_ops.demo.train import (
    MIN_STEPS,
    Result,
    Run,
    Setup,
    draw_batches,
    draw_validation,
    run_in_turn,
    warm_up_compiler,
)

# Largest relative difference between the losses of one step that still counts as agreement. The
# rewrite only changes the order of sums and where bf16 is rounded to. Rounding at 6e-8 (fp32) moved
# the losses of these models by 2e-7, rounding at 4e-3 (bf16 instead of fp32) by 4e-5: the
# tolerances leave room for longer runs and larger models. A step changes the loss by 1e-2 or more.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}


@dataclasses.dataclass(frozen=True)
class _Preset:
    steps: int
    batch: int
    seq: int
    dtype: torch.dtype
    layers: int
    heads: int
    hidden: int
    max_vocab: int
    learning_rate: float


# Logits, [batch * seq, V], are the largest tensor by far in both: that is the case at hand.
_PRESETS = {
    "cpu": _Preset(
        steps=40,
        batch=8,
        seq=256,
        dtype=torch.float32,
        layers=2,
        heads=4,
        hidden=128,
        max_vocab=16384,
        learning_rate=1e-3,
    ),
    "cuda": _Preset(
        steps=100,
        batch=32,
        seq=512,
        dtype=torch.bfloat16,
        layers=6,
        heads=12,
        hidden=768,
        max_vocab=65536,
        learning_rate=6e-4,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Command-line arguments, those of the process by default.

    Returns:
        0 if something was rewritten and both runs learned the same, else 1.
    """
    args = _parse(argv)
    device: torch.device = args.device
    preset = _PRESETS[device.type]
    steps = preset.steps if args.steps is None else args.steps
    batch = preset.batch if args.batch is None else args.batch
    seq = preset.seq if args.seq is None else args.seq
    dtype = preset.dtype if args.dtype is None else getattr(torch, args.dtype)

    corpus = text.load(preset.max_vocab)
    config = GPTConfig(
        vocab_size=corpus.vocab_size,
        block_size=seq,
        n_layer=preset.layers,
        n_head=preset.heads,
        n_embd=preset.hidden,
    )
    setup = Setup(
        model=config,
        device=device,
        dtype=dtype,
        learning_rate=preset.learning_rate,
        seed=args.seed,
        train=draw_batches(corpus.train, count=steps, batch=batch, seq=seq, seed=args.seed),
        validation=draw_validation(corpus.validation, batch=batch, seq=seq),
    )
    logits_mib = batch * seq * corpus.vocab_size * dtype.itemsize / 2**20
    print(
        f"text: {corpus.origin}, {len(corpus.train):,} + {len(corpus.validation):,} tokens\n"
        f"model: GPT, {config.n_layer} layers, D={config.n_embd}, V={config.vocab_size}, "
        f"{_dtype_name(dtype)} on {device}, torch {torch.__version__}\n"
        f"training: {steps} steps of {batch} x {seq} tokens; the logits of one step take "
        f"{logits_mib:,.1f} MiB",
        flush=True,
    )

    # Measuring memory on the CPU starts torch's profiler, which would write into the progress bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warm_up_compiler(device)
    greyhound_lowering.disable()  # whatever GREYHOUND_REWRITE says: one of the two is plain
    greyhound_lowering.clear_report()
    runs = [
        Run(setup, lambda model: torch.compile(model)),
        Run(setup, lambda model: torch.compile(model, backend="greyhound")),
    ]
    with tqdm(total=len(setup.train), unit="step", dynamic_ncols=True) as bar:
        bar.set_postfix_str("compiling")

        def on_step(losses: list[float]) -> None:
            bar.set_postfix_str(f"loss {losses[0]:.3f} / {losses[1]:.3f}", refresh=False)
            bar.update()

        plain, rewritten = run_in_turn(runs, on_step)
    report = greyhound_lowering.explain()

    difference, relative = _differences(plain.losses, rewritten.losses)
    # AdamW and clipping both divide by the size of the gradient, so that one which is wrong by a
    # factor would not show in the losses.
    _, grad_relative = _differences(plain.grad_norms[:1], rewritten.grad_norms[:1])
    tolerance = _TOLERANCE[dtype]
    # Written so that a NaN is a disagreement.
    losses_agree, grads_agree = relative <= tolerance, grad_relative <= tolerance
    print(f"\n{_table(plain, rewritten)}\n")
    print(
        f"loss curves {'agree' if losses_agree else 'DISAGREE'}: largest difference "
        f"{difference:.1e}, relative {relative:.1e}\n"
        f"first gradient norms {'agree' if grads_agree else 'DISAGREE'}: relative difference "
        f"{grad_relative:.1e} (tolerance of both {tolerance:.0e}, for {_dtype_name(dtype)})"
    )
    print(f"\nwhat was rewritten: {report}", flush=True)

    failures = []
    if not losses_agree:
        failures.append("the two loss curves disagree")
    if not grads_agree:
        failures.append("the two first gradients disagree")
    if report.rewritten_count == 0:
        failures.append("nothing was rewritten")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m greyhound_ops.demo",
        description="Train a small GPT under torch.compile twice, without and with the rewrite of "
        "projection and cross entropy, and compare losses, memory and time.",
        epilog="What is not given depends on the device: a few megabytes on a CPU, a few "
        "gigabytes on a GPU.",
    )
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--device", type=torch.device, help="cpu or cuda (default: cuda if any)")
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches")
    parser.add_argument(
        "--dtype",
        choices=[_dtype_name(dtype) for dtype in _TOLERANCE],
        help="bfloat16 means autocast (default: float32 on cpu, bfloat16 on cuda)",
    )
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.device.type not in _PRESETS:
        parser.error(f"--device: expected cpu or cuda, got {args.device}")
    if args.steps is not None and args.steps < MIN_STEPS:
        parser.error(f"--steps: expected at least {MIN_STEPS}, got {args.steps}")
    for name in ("batch", "seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected a positive number, got {value}")
    return args


def _differences(a: list[float], b: list[float]) -> tuple[float, float]:
    absolute = [abs(x - y) for x, y in zip(a, b, strict=True)]
    if not all(map(math.isfinite, absolute)):
        return math.nan, math.nan
    relative = [d / abs(x) for d, x in zip(absolute, a, strict=True) if d > 0]
    return max(absolute), max(relative, default=0.0)


def _table(plain: Result, rewritten: Result) -> str:
    mib = 2**20
    pairs: list[tuple[str, str, float, float, bool]] = [
        ("first training loss", ".4f", plain.losses[0], rewritten.losses[0], False),
        ("last training loss", ".4f", plain.losses[-1], rewritten.losses[-1], False),
        ("first gradient norm", ".4f", plain.grad_norms[0], rewritten.grad_norms[0], False),
        ("validation before", ".4f", plain.validation_before, rewritten.validation_before, False),
        ("validation after", ".4f", plain.validation_after, rewritten.validation_after, False),
        ("peak of a step, MiB", ",.1f", plain.peak_bytes / mib, rewritten.peak_bytes / mib, True),
        ("median step, ms", ",.1f", plain.step_ms, rewritten.step_ms, True),
        ("compile, s", ",.1f", plain.compile_s, rewritten.compile_s, True),
    ]
    lines = [f"{'':<22}{'torch.compile':>14}{'greyhound':>14}{'ratio':>8}"]
    for label, form, a, b, has_ratio in pairs:
        ratio = f"{b / a:.2f}" if has_ratio and a > 0 else ""
        lines.append(f"{label:<22}{a:>14{form}}{b:>14{form}}{ratio:>8}".rstrip())
    return "\n".join(lines)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
