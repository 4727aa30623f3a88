#!/usr/bin/env python3
"""Times what else computes the same: PyTorch, torch.compile, small Triton kernels, cuBLAS, cuDNN and flash attention, NCCL.

    python3 peers.py [FILTER..] [OPTIONS]
        FILTER           only cases whose name contains one of these
        --quick          the sizes of the report only
        --compile        torch.compile as well, for a few cases
        --burst          in bursts, as the bench binary's option; the cases are those of `bench --bench --burst --list`
        --json FILE      append a record for each case and peer
        --budget SECONDS start nothing new after so long (160 with --quick); what says most comes first: of each operation the
                         smallest size, then the largest, then those between
        --model NAME=E,K,H,I, --tokens N,N..   as the bench binary's options: fused MoE for another model
        --limit SECONDS  give a case up after so long (10)
        --warm JOBS      processes that compile before anything is timed (as many as half the CPUs, at most 8)
        --list           print cases and their peers
        --cases          print the names of the cases only: filters for warploom's bench binary

Cases have the names, shapes and inputs of `benches/`, and are timed as `benches/harness.rs` does it: a CUDA graph launches the
operation on up to twenty sets of inputs in turn (fewer where they are large), for at least a millisecond; the graph is replayed between two events, and the
median over the replays counts. Outputs take turns as well. What is missing is said, and left out. What a peer computes is
compared with PyTorch's own result first, where the result is defined.

Ours and theirs are only comparable on one GPU: run both with the same CUDA_VISIBLE_DEVICES, one after the other, as
`bundle/run.sh report` does. NCCL needs several: `peers.py ep/`.

The JSON file begins with a line that describes the machine; `cargo xtask report` reads it with that of the bench binary.
"""

import argparse
import collections
import gc
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    torch, NO_TORCH = None, str(error)
try:
    import kernels
except ImportError as error:
    kernels, NO_TRITON = None, str(error)

SETS = 20
GRAPH_SECONDS = 1e-3
MAX_LAUNCHES = 2000
# Four times an H200's second-level cache.
CACHED = 200 << 20
# For each peer of a case, as the benches do: clocks fall under products that go on and on, and what is replayed for a shorter
# time than another is measured at higher ones.
SECONDS = 0.2
# As the benches' `--burst`: what a burst takes at most unless one launch takes longer, rest before each, how many.
BURST_SECONDS, REST, BURSTS = 5e-3, 0.1, 10
BURST = False

Case = collections.namedtuple("Case", "name inputs peers close quick compiled")


# What the command line says of the fused block's models: name, experts, experts a token, widths; and numbers of tokens.
MODELS, TOKENS = [], []

# Whether this process only compiles Triton's kernels.
WARMING = False


class Missing(Exception):
    """A peer that this machine has not."""


def case(name, inputs, close=True, quick=True, compiled=(), **peers):
    """`inputs(set)` makes the arguments of every peer; `close`: peers give what the first one gives, all of it or on average."""
    return Case(name, inputs, peers, close, quick, compiled)


# Inputs


def noise(*shape, dtype=None, scale=1):
    """Uniform in [-scale, scale)."""
    dtype = dtype or torch.bfloat16
    if WARMING:
        # Only types and shapes matter where nothing is launched.
        return torch.empty(1, device="cuda", dtype=dtype).expand(shape)
    return torch.empty(shape, device="cuda", dtype=dtype).uniform_(-scale, scale)


def scattered(count):
    """The numbers below `count`, in an order that jumps about."""
    return torch.arange(count, device="cuda", dtype=torch.int64) * 7919 % count


def routing(tokens, experts, top_k):
    """Distinct experts for each token, all equally likely."""
    return torch.rand(tokens, experts, device="cuda").topk(top_k).indices.to(torch.int32)


# Families: each yields its cases


def activation():
    def gated(function):
        def run(x):
            d = x.shape[1] // 2
            return function(x[:, :d]) * x[:, d:]

        return run

    for d in (4096, 14336):
        for tokens in (1, 16, 256, 4096):
            silu = gated(F.silu) if torch else None
            yield case(
                f"activation/silu_and_mul/bf16/{tokens}x{d}",
                lambda _, d=d, t=tokens: (noise(t, 2 * d),),
                compiled=(1, 256, 4096) if d == 14336 else (),
                torch=silu,
                triton=lambda x: kernels.gated(x),
            )
    for tokens in (1, 16, 256, 4096):
        yield case(
            f"activation/gelu_tanh_and_mul/bf16/{tokens}x11008",
            lambda _, t=tokens: (noise(t, 2 * 11008),),
            torch=gated(lambda x: F.gelu(x, approximate="tanh")),
            triton=lambda x: kernels.gated(x, gelu=True),
        )
        yield case(
            f"activation/gelu_new/bf16/{tokens}x11008",
            lambda _, t=tokens: (noise(t, 11008),),
            quick=False,
            torch=lambda x: F.gelu(x, approximate="tanh"),
        )
        yield case(
            f"activation/relu2/bf16/{tokens}x11008",
            lambda _, t=tokens: (noise(t, 11008),),
            quick=False,
            torch=lambda x: F.relu(x).square(),
        )


def norm():
    def fused_add(x, residual, weight):
        residual.add_(x)
        return F.rms_norm(residual, residual.shape[-1:], weight, 1e-5), residual

    def to_e4m3(x, weight):
        y = F.rms_norm(x, x.shape[-1:], weight, 1e-5).float()
        scale = y.abs().amax(-1, keepdim=True) / 448
        return (y / scale).to(torch.float8_e4m3fn), scale

    for n in (4096, 8192):
        for tokens in (1, 16, 256, 4096):
            yield case(
                f"norm/rms_norm/bf16/{tokens}x{n}",
                lambda _, t=tokens, n=n: (noise(t, n), noise(n)),
                compiled=(1, 256, 4096) if n == 8192 else (),
                torch=lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
                triton=lambda x, w: kernels.rms_norm(x, w, 1e-5),
            )
            yield case(
                f"norm/fused_add_rms_norm/bf16/{tokens}x{n}",
                lambda _, t=tokens, n=n: (noise(t, n), noise(t, n), noise(n)),
                compiled=(1, 256, 4096) if n == 8192 else (),
                torch=fused_add,
                triton=lambda x, r, w: kernels.rms_norm(x, w, 1e-5, residual=r),
            )
            yield case(
                f"norm/layer_norm/bf16/{tokens}x{n}",
                lambda _, t=tokens, n=n: (noise(t, n), noise(n), noise(n)),
                quick=n == 8192,
                torch=lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
            )
            yield case(
                f"norm/rms_norm_e4m3_per_token/bf16/{tokens}x{n}",
                lambda _, t=tokens, n=n: (noise(t, n), noise(n)),
                # A number in the middle between two codes may go either way.
                close="mean",
                quick=n == 8192,
                compiled=(1, 4096) if n == 8192 else (),
                torch=to_e4m3,
            )


HEADS, KV_HEADS, DIM, POSITIONS, PAGE = 32, 8, 128, 8192, 16


def rope():
    def rotary(q, k, positions, angles):
        cos, sin = angles[positions].unsqueeze(1).chunk(2, -1)
        out = []
        for x in (q, k):
            a, b = x.chunk(2, -1)
            out.append(x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1)))
        return tuple(out)

    for tokens in (1, 16, 256, 4096):
        yield case(
            f"rope/rotary/neox_bf16_angles_bf16/{tokens}x{HEADS}+{KV_HEADS}x{DIM}",
            lambda _, t=tokens: (
                noise(t, HEADS, DIM),
                noise(t, KV_HEADS, DIM),
                torch.arange(t, device="cuda") % POSITIONS,
                noise(POSITIONS, DIM),
            ),
            compiled=(1, 4096),
            torch=rotary,
            triton=lambda q, k, p, a: kernels.rotary(q, k, p, a),
        )


def kv_cache():
    def write(key, value, key_cache, value_cache, slots):
        key_cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots, key)
        value_cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots, value)
        return key_cache, value_cache

    def gather(key_cache, value_cache, table):
        return key_cache.index_select(0, table), value_cache.index_select(0, table)

    def copy(cache, source, target):
        return cache.index_copy_(1, target, cache.index_select(1, source))

    def cache(blocks):
        return torch.zeros(blocks, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    for tokens in (1, 16, 256, 4096):
        def inputs(_, t=tokens):
            blocks = -(-t // PAGE)
            slots = scattered(blocks).repeat_interleave(PAGE)[:t] * PAGE + torch.arange(t, device="cuda") % PAGE
            return noise(t, KV_HEADS, DIM), noise(t, KV_HEADS, DIM), cache(blocks), cache(blocks), slots

        yield case(
            f"kv_cache/reshape_and_cache/nhd_bf16_bf16/{tokens}x{KV_HEADS}x{DIM}",
            inputs,
            torch=write,
            triton=lambda k, v, kc, vc, s: kernels.reshape_and_cache(k, v, kc, vc, s),
        )
    for tokens in (256, 4096, 32768):
        yield case(
            f"kv_cache/gather_cache/nhd_bf16_bf16/{tokens}x{KV_HEADS}x{DIM}",
            lambda _, b=tokens // PAGE: (cache(b), cache(b), scattered(b)),
            torch=gather,
        )
    for pairs in (16, 256, 2048):
        yield case(
            f"kv_cache/copy_blocks/bf16/1_layers_{pairs}_pairs",
            lambda _, p=pairs: (
                torch.zeros(2, 2 * p, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16),
                scattered(p) * 2,
                torch.arange(p, device="cuda") * 2 + 1,
            ),
            torch=copy,
        )


def sampling():
    def pick(probs):
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    def nucleus(logits):
        """Of logits in descending order: probabilities of those that top-p keeps."""
        probs = logits.float().softmax(-1)
        return probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0)

    def top_k(k):
        def run(logits):
            values, ids = logits.topk(k)
            return ids.gather(-1, pick(nucleus(values)).unsqueeze(-1))

        return run

    def by_sorting(k):
        def run(logits):
            values, ids = logits.sort(-1, descending=True)
            probs = nucleus(values)
            if k:
                probs[:, k:] = 0
            return ids.gather(-1, pick(probs).unsqueeze(-1))

        return run

    def logits(rows, vocab):
        return lambda _: (torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) * 3,)

    for rows in (1, 8, 32, 64, 128, 256):
        for vocab in (128256, 256000):
            yield case(
                f"sampling/top_k_top_p/bf16/k20/p0.9/{rows}x{vocab}",
                logits(rows, vocab),
                close=False,
                quick=vocab == 128256 or rows in (1, 64, 256),
                torch_topk=top_k(20),
                torch_sort=by_sorting(20),
            )
    for rows in (1, 8, 64, 256):
        name = "sampling/top_k_top_p/bf16/{}/{}x128256"
        yield case(name.format("all/p0.9", rows), logits(rows, 128256), close=False, torch_sort=by_sorting(0))
        yield case(
            name.format("greedy", rows), logits(rows, 128256), close=False, torch=lambda x: x.argmax(-1, keepdim=True)
        )


def gate():
    def grouped(groups, kept, top_k):
        def run(logits, bias):
            scores = logits.float().sigmoid()
            choice = scores + bias
            if groups > 1:
                by_group = choice.view(choice.shape[0], groups, -1)
                best = by_group.topk(2).values.sum(-1).topk(kept).indices
                mask = torch.zeros(by_group.shape[:2], device=logits.device, dtype=torch.bool).scatter_(1, best, True)
                choice = by_group.masked_fill(~mask.unsqueeze(-1), float("-inf")).flatten(1)
            ids = choice.topk(top_k).indices
            weights = scores.gather(1, ids)
            return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)

        return run

    def softmax(top_k):
        def run(logits):
            weights, ids = logits.float().softmax(-1).topk(top_k)
            return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)

        return run

    for tokens in (1, 64, 1024, 16384):
        for experts, groups, kept, top_k in ((256, 8, 4, 8), (384, 1, 1, 8)):
            yield case(
                f"moe/gate/sigmoid/bf16/{experts}-{groups}-{kept}-{top_k}/{tokens}",
                lambda _, t=tokens, e=experts: (noise(t, e), noise(e, dtype=torch.float32)),
                # Near ties may go either way.
                close="mean",
                compiled=(1, 1024, 16384) if groups > 1 else (),
                torch=grouped(groups, kept, top_k),
                triton=lambda x, b, g=groups, kept=kept, k=top_k: kernels.gate(x, b, g, kept, k),
            )
        yield case(
            f"moe/gate/softmax/bf16/128-1-1-8/{tokens}",
            lambda _, t=tokens: (noise(t, 128),),
            close="mean",
            torch=softmax(8),
            triton=lambda x: kernels.gate(x, None, 1, 1, 8),
        )


def linear():
    def inputs(m, k, n):
        return lambda _: (noise(m, k), noise(n, k))

    shapes = [(m, 4096, n) for n in (14336, 4096, 128256) for m in (1, 8, 64, 128, 512, 4096)]
    middle = (96, 130, 192, 256, 320)
    shapes += [(m, 4096, n) for n in (4096, 14336) for m in middle]
    shapes += [(m, 4096, 14336) for m in (2, 4, 16, 32, 1024, 2048)] + [(8192, 8192, 8192)]
    shapes += [(160, 3584, 18944), (200, 3072, 24576), (448, 8192, 8192)]
    narrow = [(128, 8192, 1280), (512, 2880, 1408), (512, 4096, 1024), (512, 7168, 576), (512, 7168, 1536)]
    shapes += narrow + [(512, 7168, 2112), (640, 8192, 1024), (1024, 7168, 576)]
    for m, k, n in shapes:
        yield case(
            f"gemm/linear/auto/bf16/{m}x{k}x{n}",
            inputs(m, k, n),
            quick=m in (1, 8, 64, 128, 160, 200, 448, 512, 640, 4096, 8192, *middle),
            cublas=lambda x, w: torch.mm(x, w.t()),
        )
    yield case(
        "gemm/linear/bias_silu/bf16/4096x4096x14336",
        lambda _: (noise(4096, 4096), noise(14336, 4096), noise(14336)),
        cublas=lambda x, w, b: F.silu(F.linear(x, w, b)),
    )


def sdpa(backend, causal):
    def run(q, k, v, *_):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return run


def chunked_flash(q, k, v):
    """Queries that are the last tokens of the keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def decode():
    # SDPA has the keys of each sequence in one piece: it reads no page table.
    def triton(q, k, v, pages, values, table, lens):
        return kernels.decode(q.squeeze(2), pages, values, table, lens, k.shape[2]).unsqueeze(2)

    shapes = [(b, c, 32, 8) for b, c in ((1, 512), (8, 512), (128, 512), (1, 4096), (32, 4096), (1, 32768))]
    shapes += [(32, 4096, 32, 32), (32, 4096, 64, 8), (128, 32768, 32, 8)]
    for batch, context, heads, kv_heads in shapes:
        def inputs(_, b=batch, c=context, h=heads, kv=kv_heads):
            each, count = c // PAGE, b * c // PAGE
            table = scattered(count).view(b, each)
            # The same keys twice: by pages, and in one piece.
            pages, values = noise(count, PAGE, kv, DIM), noise(count, PAGE, kv, DIM)
            if WARMING:
                whole = [noise(b, kv, c, DIM)] * 2
            else:
                whole = [t[table.view(-1)].view(b, c, kv, DIM).transpose(1, 2).contiguous() for t in (pages, values)]
            lens = torch.full((b,), c, device="cuda", dtype=torch.int32)
            return (noise(b, h, 1, DIM), *whole, pages, values, table.to(torch.int32), lens)

        yield case(
            f"attention/decode/bf16/{heads}-{kv_heads}/{batch}x{context}",
            inputs,
            quick=(batch, heads, kv_heads) != (32, 64, 8),
            flash=sdpa("FLASH_ATTENTION", False),
            cudnn=sdpa("CUDNN_ATTENTION", False),
            triton=triton,
        )


def prefill():
    for batch, length, dim in ((1, 4096, 128), (8, 4096, 128), (32, 1024, 128), (8, 4096, 64), (1, 32768, 128)):
        def inputs(_, b=batch, n=length, d=dim):
            return noise(b, HEADS, n, d), noise(b, KV_HEADS, n, d), noise(b, KV_HEADS, n, d)

        yield case(
            f"attention/prefill/bf16/{HEADS}-{KV_HEADS}-{dim}/{batch}x{length}",
            inputs,
            quick=(batch, length, dim) != (8, 4096, 64),
            flash=sdpa("FLASH_ATTENTION", True),
            cudnn=sdpa("CUDNN_ATTENTION", True),
        )

    # Short chunks of long sequences. cuDNN takes twice as long with such a mask, so it goes without.
    shapes = [(1, 64, 8192), (4, 64, 8192), (1, 256, 8192), (1, 64, 1024), (1, 16, 32768)]
    for batch, chunk, length, heads, kv_heads in [(*s, HEADS, KV_HEADS) for s in shapes] + [(1, 512, 8192, 8, 1)]:
        def inputs(_, b=batch, c=chunk, n=length, h=heads, kv=kv_heads):
            return noise(b, h, c, DIM), noise(b, kv, n, DIM), noise(b, kv, n, DIM)

        yield case(
            f"attention/prefill/split-bf16/{heads}-{kv_heads}-{DIM}/{batch}x{chunk}of{length}",
            inputs,
            close=False,
            quick=(chunk, length, heads) == (64, 8192, HEADS),
            flash=chunked_flash,
            cudnn=sdpa("CUDNN_ATTENTION", False),
        )


class Tuned:
    """Triton's fused experts with the best of a few tilings, found where the inputs are first seen."""

    def __init__(self):
        self.best = None

    def __call__(self, x, w13, w2, ids, factors):
        if WARMING:
            for config in kernels.FEW if ids.numel() / w13.shape[0] <= 16 else kernels.MANY:
                try:
                    kernels.fused_moe(x, w13, w2, ids, factors, config)
                except Exception:  # the process that measures says why
                    pass
            return None
        if self.best is None:
            each = ids.numel() / w13.shape[0]
            choices = kernels.FEW if each <= 16 else kernels.MANY
            times = []
            for config in choices:
                try:
                    kernels.fused_moe(x, w13, w2, ids, factors, config)
                    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
                    start.record()
                    for _ in range(3):
                        kernels.fused_moe(x, w13, w2, ids, factors, config)
                    end.record()
                    end.synchronize()
                    times.append((start.elapsed_time(end), config))
                except Exception as error:  # a tiling that this GPU has not the shared memory for
                    print(f"  {config}: {str(error).splitlines()[0]}", file=sys.stderr)
            self.best = min(times)[1]
        return kernels.fused_moe(x, w13, w2, ids, factors, self.best)


def grouped_mm(x, w13, w2, ids, factors):
    product = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        raise Missing("this PyTorch has no grouped_mm")
    experts, inter, top_k = w13.shape[0], w13.shape[1] // 2, ids.shape[1]
    by_expert, order = ids.view(-1).sort()
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=x.device, dtype=by_expert.dtype), right=True)
    ends = ends.to(torch.int32)
    both = product(x[order // top_k], w13.transpose(1, 2), offs=ends)
    down = product(F.silu(both[:, :inter]) * both[:, inter:], w2.transpose(1, 2), offs=ends)
    down = down * factors.view(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add_(0, order // top_k, down.to(x.dtype))


def model(text):
    name, sizes = text.split("=")
    experts, top_k, hidden, inter = map(int, sizes.split(","))
    return name, experts, top_k, hidden, inter


def fused():
    recorded = [("mixtral", 8, 2, 4096, 14336), ("qwen3-30b", 128, 8, 2048, 768), ("deepseek-v3", 256, 8, 7168, 2048)]
    models = MODELS or recorded
    for model, experts, top_k, hidden, inter in models:
        weights = {}

        def inputs(_, tokens, experts=experts, top_k=top_k, hidden=hidden, inter=inter, weights=weights):
            # One set of weights for all, as in the bench: they are larger than the cache, or sets name other experts.
            if not weights:
                weights["w13"] = noise(experts, 2 * inter, hidden)
                weights["w2"] = noise(experts, hidden, inter)
            ids = routing(tokens, experts, top_k)
            factors = noise(tokens, top_k, dtype=torch.float32)
            return noise(tokens, hidden), weights["w13"], weights["w2"], ids, factors

        for tokens in TOKENS or (1, 8, 64, 512, 4096):
            yield case(
                f"moe/fused/auto/{model}/{tokens}",
                lambda s, t=tokens, inputs=inputs: inputs(s, t),
                torch_grouped_mm=grouped_mm,
                triton=Tuned(),
            )
        weights.clear()


def sort():
    block = 64

    def torch_sort(experts):
        def run(ids):
            flat = ids.view(-1)
            pairs, device = flat.numel(), ids.device
            by_expert, order = flat.sort(stable=True)
            by_expert = by_expert.long()
            counts = torch.zeros(experts, device=device, dtype=torch.int64).scatter_add_(
                0, by_expert, torch.ones_like(by_expert)
            )
            padded = (counts + block - 1) // block * block
            ends = padded.cumsum(0)
            shift = ends - padded - (counts.cumsum(0) - counts)
            length = (pairs + experts * (block - 1)) // block * block if pairs > experts else pairs * block
            sorted_ids = torch.full((length,), pairs, device=device, dtype=torch.int32)
            place = torch.arange(pairs, device=device) + shift[by_expert]
            sorted_ids.scatter_(0, place, order.to(torch.int32))
            blocks = torch.arange(0, length, block, device=device)
            return sorted_ids, torch.searchsorted(ends, blocks, right=True).to(torch.int32)

        return run

    for experts, top_k in ((8, 2), (128, 8), (256, 8)):
        for tokens in (1, 64, 512, 4096, 16384):
            yield case(
                f"moe/sort/flat/{tokens}x{top_k}-{experts}",
                lambda _, t=tokens, e=experts, k=top_k: (routing(t, e, k),),
                # Triton's places within an expert are first come, first served.
                close=False,
                quick=experts != 8 and tokens in (1, 512, 16384),
                torch=torch_sort(experts),
                triton=lambda ids, e=experts: kernels.sort(ids, e, block),
            )


def permute():
    def there(top_k, experts):
        def run(x, ids):
            # By expert, tokens in order within one; where each pair went; where each expert starts.
            by_expert, order = ids.view(-1).sort(stable=True)
            positions = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
            bounds = torch.arange(experts + 1, device=order.device, dtype=by_expert.dtype)
            return x.index_select(0, order // top_k), positions, torch.searchsorted(by_expert, bounds)

        return run

    def back(y, positions, weights):
        return (y[positions].float() * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    def by_product(y, positions, weights):
        return torch.bmm(weights.to(y.dtype).unsqueeze(1), y[positions]).squeeze(1)

    def by_adding(y, positions, weights):
        # Pairs in the order of their experts, as an implementation has them that keeps the order and not the way back.
        tokens, top_k = positions.shape
        order = torch.empty_like(positions.view(-1))
        order.scatter_(0, positions.view(-1), torch.arange(order.numel(), device=y.device))
        out = torch.zeros(tokens, y.shape[1], device=y.device, dtype=torch.float32)
        out.index_add_(0, order // top_k, y.float() * weights.view(-1)[order].unsqueeze(-1))
        return out.to(y.dtype)

    def places(tokens, experts, top_k):
        """Where pairs are once they are in the order of their experts."""
        order = routing(tokens, experts, top_k).view(-1).sort(stable=True).indices
        there = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
        return there.view(tokens, top_k)

    for experts, top_k, n in ((8, 2, 4096), (128, 8, 2048), (256, 8, 7168)):
        for tokens in (1, 64, 512, 4096):
            name = f"{tokens}x{top_k}-{experts}x{n}"
            quick = experts != 8 and tokens in (1, 512, 4096)
            yield case(
                f"moe/permute/bf16/{name}",
                lambda _, t=tokens, e=experts, k=top_k, n=n: (noise(t, n), routing(t, e, k)),
                quick=quick,
                compiled=(1, 512, 4096) if experts == 128 else (),
                torch=there(top_k, experts),
            )
            yield case(
                f"moe/unpermute/bf16/{name}",
                lambda _, t=tokens, e=experts, k=top_k, n=n: (
                    noise(t * k, n),
                    places(t, e, k),
                    noise(t, k, dtype=torch.float32),
                ),
                quick=quick,
                compiled=(1, 512, 4096),
                torch=back,
                torch_bmm=by_product,
                torch_index_add=by_adding,
            )


def quantised():
    def e4m3(*shape):
        return noise(*shape).to(torch.float8_e4m3fn)

    def positive(*shape):
        return noise(*shape, dtype=torch.float32).abs() + 0.01

    def scaled(x, w, xs, ws):
        return torch._scaled_mm(x, w.t(), scale_a=xs, scale_b=ws.t(), out_dtype=torch.bfloat16, use_fast_accum=False)

    shapes = [(m, k, n) for k, n in ((4096, 14336), (4096, 4096), (7168, 4096)) for m in (1, 8, 64, 128, 512, 4096)]
    for m, k, n in shapes + [(8192, 8192, 8192)]:
        quick = (k, n) != (4096, 4096) and m not in (8, 512)
        yield case(
            f"gemm/linear_quant/auto/e4m3/rows/{m}x{k}x{n}",
            lambda _, m=m, k=k, n=n: (e4m3(m, k), e4m3(n, k), positive(m, 1), positive(n, 1)),
            quick=quick,
            cublas=scaled,
        )
        # Scales of tokens column by column, as cuBLAS wants them.
        yield case(
            f"gemm/linear_quant/auto/e4m3/blocks/{m}x{k}x{n}",
            lambda _, m=m, k=k, n=n: (
                e4m3(m, k), e4m3(n, k), positive(k // 128, m).t(), positive(n // 128, k // 128)
            ),  # fmt: skip
            quick=quick,
            cublas=scaled,
        )

    def to_rows(x):
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale

    def to_groups(x):
        y, scale = to_rows(x.view(x.shape[0], -1, 128))
        return y.view(x.shape), scale

    for tokens in (1, 128, 4096):
        for name, function in (("rows", to_rows), ("groups", to_groups)):
            yield case(
                f"gemm/quantise_{name}/e4m3/bf16/{tokens}x7168",
                lambda _, t=tokens: (noise(t, 7168),),
                close="mean",
                compiled=(1, 4096),
                torch=function,
            )


FAMILIES = [fused, decode, prefill, linear, sampling, gate, norm, rope, activation, kv_cache, quantised, sort, permute]


def by_value(cases):
    """Of each operation the smallest size, then the largest, then from both ends inwards."""
    groups = {}
    for c in cases:
        # Numbers of models and widths are part of the operation, the first number of the last part is the size.
        family, last = c.name.rsplit("/", 1)
        groups.setdefault((family, re.sub(r"^\d+", "", last)), []).append(c)
    ranked = []
    for place, group in enumerate(groups.values()):
        group = sorted(group, key=lambda c: size_of(c.name))
        for rank in range(len(group)):
            ranked.append((rank, place, group.pop(0 if rank % 2 == 0 else -1)))
    return [c for _, _, c in sorted(ranked, key=lambda r: r[:2])]



# Measuring


def seconds(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def capture(launches, passes):
    graph = torch.cuda.CUDAGraph()
    # Results are kept until their turn comes again, so that outputs take turns as inputs do.
    kept = collections.deque(maxlen=len(launches))
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for launch in launches:
                kept.append(launch())
    return graph


def timed(launches):
    """Microseconds of one launch, for each replay, and launches of a replay."""
    for launch in launches[:3]:
        launch()
    torch.cuda.synchronize()
    begin = time.monotonic()
    launches[0]()
    torch.cuda.synchronize()
    once = time.monotonic() - begin
    # What takes long needs no more turns than a measurement has time for.
    launches = launches[: max(int(BURST_SECONDS / once), 1) if BURST else max(math.ceil(SECONDS / 4 / once), 4)]
    graph = capture(launches, 1)
    seconds(graph)
    once = max(seconds(graph), 1e-6)
    passes = max(1, min(math.ceil(GRAPH_SECONDS / once), MAX_LAUNCHES // len(launches)))
    if passes > 1:
        graph = capture(launches, passes)
    count = passes * len(launches)
    first = seconds(graph)
    until = time.monotonic() + SECONDS / 10
    while time.monotonic() < until:
        seconds(graph)
    replays = BURSTS if BURST else int(min(max(SECONDS / max(first, 1e-9), 3), 100))
    times = []
    for _ in range(replays):
        if BURST:
            time.sleep(REST)
        times.append(seconds(graph) * 1e6 / count)
    return times, count


def tensors(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(t)]


def copies(inputs):
    """Copies of what an operation may change: not of weights, which are large."""
    return [t.clone() if torch.is_tensor(t) and t.numel() < 1 << 27 else t for t in inputs]


def differs(result, expected, close):
    """The largest difference by the largest value, or for "mean" the mean difference of the first result by its mean."""
    worst = 0.0
    if close == "mean":
        got, want = tensors(result)[0].float(), tensors(expected)[0].float()
        return ((got - want).abs().mean() / want.abs().mean()).item()
    for got, want in zip(tensors(result), tensors(expected)):
        got, want = got.float(), want.float()
        if not torch.isfinite(got).all():
            return math.inf
        worst = max(worst, ((got - want).abs().max() / want.abs().max().clamp(min=1e-6)).item())
    return worst


def sets_of(make):
    """As many sets as it takes to read every input from memory, not from the cache: those of large inputs are few."""
    sets = [make(0), make(1)]
    torch.cuda.synchronize()

    def sizes(inputs):
        return {t.data_ptr(): t.numel() * t.element_size() for t in inputs if torch.is_tensor(t)}

    first = sizes(sets[0])
    # Weights that all sets share count once.
    each = max(sum(n for at, n in sizes(sets[1]).items() if at not in first), 1)
    wanted = min(max(math.ceil(CACHED / each), 4), SETS, 2 + torch.cuda.mem_get_info()[0] // 2 // each)
    while len(sets) < wanted:
        try:
            sets.append(make(len(sets)))
        except torch.OutOfMemoryError:
            break
    return sets


def versions():
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if kernels:
        found["triton"] = kernels.triton.__version__
    for name, version in (("cudnn", torch.backends.cudnn.version), ("nccl", torch.cuda.nccl.version)):
        try:
            version = version()
            found[name] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        except Exception:  # built without
            pass
    return found


def driver():
    try:
        with open("/proc/driver/nvidia/version") as file:
            return next(iter(re.findall(r"\b\d+\.\d+(?:\.\d+)?\b", file.read())), "unknown")
    except OSError:
        return "unknown"


def cpu():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Output:
    def __init__(self, file):
        self.file = open(file, "a") if file else None
        self.device = f"cuda:0 ({torch.cuda.get_device_name()})"
        self.driver = driver()
        self.write({
            "machine": {
                "device": self.device,
                "driver": self.driver,
                "date": now(),
                "cpu": cpu(),
                "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
                "versions": versions(),
            }
        })  # fmt: skip

    def write(self, record):
        if self.file:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self.file.flush()

    def missing(self, peer, why):
        print(f"missing: {peer}: {why}", flush=True)
        self.write({"missing": peer, "why": why})

    def record(self, case, peer, times, count, sets):
        times.sort()
        at = lambda share: times[round((len(times) - 1) * share)]
        print(f"{case:<52} {peer:<18} {at(0.5):>10.3f}", flush=True)
        self.write({
            "device": self.device, "driver": self.driver, "date": now(), "case": case, "peer": peer,
            "median_us": at(0.5), "min_us": at(0), "p90_us": at(0.9), "sets": sets, "launches": count, "burst": BURST,
        })  # fmt: skip


def measure(case, args, output, given_up):
    peers = dict(case.peers)
    first = next(iter(peers))
    if args.compile and size_of(case.name) in case.compiled:
        peers["torch.compile"] = torch.compile(peers[first], dynamic=False)
    peers = {name: run for name, run in peers.items() if name not in given_up}

    def attempt(name, what):
        """What `what` gives, or None if it fails: one that does says so, and the others go on."""
        try:
            return what()
        except TimeoutError:
            raise
        except Missing as error:
            given_up.add(name)
            output.missing(name, str(error))
        except Exception as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            output.missing(f"{name} for {case.name}", why[0][:200])
            torch.cuda.synchronize()
        return None

    sets = sets_of(case.inputs)
    # Peers work in place, so all of them are compared on copies of the same inputs before any of them is timed.
    expected, good = None, []
    for name, run in peers.items():

        def check(name=name, run=run):
            nonlocal expected
            if case.close:
                result = run(*copies(sets[0]))
                expected = result if expected is None else expected
                worst = differs(result, expected, case.close)
                if worst > 0.04:
                    raise ArithmeticError(f"its result is off by {worst:.3g} of the largest value")
            return True

        if attempt(name, check):
            good.append((name, run))
    expected = None
    for name, run in good:
        found = attempt(name, lambda run=run: timed([lambda s=s: run(*s) for s in sets]))
        if found:
            output.record(case.name, name, *found, len(sets))


def give_up(signum, frame):
    raise TimeoutError("took too long")


def measure_in_time(case, args, output, given_up):
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, args.limit)
    try:
        measure(case, args, output, given_up)
    except TimeoutError:
        output.missing(case.name, f"not done within {args.limit:.0f} s")
    except torch.OutOfMemoryError:
        output.missing(case.name, "not enough memory")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# Compiling beforehand


def warm(cases, args):
    """Compiles what some of the cases need, in a process of its own; the caches on the disk keep it."""
    global WARMING
    part, parts = map(int, args.warm_part.split("/"))
    cases = list(cases)
    if args.compile:
        for case in [c for c in cases if size_of(c.name) in c.compiled][part::parts]:
            try:
                torch.compile(next(iter(case.peers.values())), dynamic=False)(*case.inputs(0))
            except Exception as error:  # the process that measures will say so
                print(f"warm: {case.name}: {str(error).splitlines()[:1]}", file=sys.stderr)
    if kernels is None:
        return
    WARMING = True
    function = kernels.triton.runtime.jit.JITFunction
    run = function.run
    function.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
    # Neighbours share kernels, so they go to different processes only where there are many.
    for case in [c for c in cases if "triton" in c.peers][part::parts]:
        try:
            case.peers["triton"](*case.inputs(0))
        except Exception as error:
            print(f"warm: {case.name}: {str(error).splitlines()[:1]}", file=sys.stderr)


def start_warming(args):
    if kernels is None and not args.compile or args.warm == 0:
        return []
    flags = [*(["--quick"] if args.quick else []), *(["--compile"] if args.compile else [])]
    for name, *sizes in MODELS:
        flags += ["--model", f"{name}={','.join(map(str, sizes))}"]
    if TOKENS:
        flags += ["--tokens", ",".join(map(str, TOKENS))]
    command = [sys.executable, os.path.abspath(__file__), *args.filters, *flags]
    return [
        subprocess.Popen([*command, "--warm-part", f"{n}/{args.warm}"], stdout=subprocess.DEVNULL)
        for n in range(args.warm)
    ]


def wait_for(children, limit):
    """Waits for the processes that compile, but not for ever: whoever is late is ended, and its kernels compile later."""
    until = time.monotonic() + limit
    for child in children:
        try:
            child.wait(max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def size_of(name):
    """The number of tokens, with which the last part of a name begins."""
    return int(re.match(r"\d+", name.rsplit("/", 1)[1])[0])


# Several GPUs


def nccl_rank(rank, ranks, tokens, file, out):
    """What PyTorch and NCCL need to bring rows to other ranks: one all-to-all, rows already in order."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=ranks)
    # Four of eight groups, eight experts: a rank of R has an expert of nearly every token.
    rows = tokens * (ranks - 1)
    send = torch.randn(tokens * ranks, 7168, device="cuda", dtype=torch.bfloat16)
    receive = torch.empty_like(send)
    split = [0 if r == rank else rows // (ranks - 1) for r in range(ranks)]
    run = lambda: dist.all_to_all_single(receive[:rows], send[:rows], split, split)
    for _ in range(5):
        run()
    times = []
    for _ in range(25):
        dist.barrier()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        slowest = torch.tensor([start.elapsed_time(end) * 100], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    if rank == 0:
        with open(out, "w") as results:
            json.dump(times, results)
    dist.destroy_process_group()


def nccl(output, selected):
    import tempfile

    if torch.cuda.device_count() < 2 and selected("norm/"):
        # A run on one GPU for everything else: `run.sh report` asks for this by itself where there are several.
        return
    for ranks in (2, 4, 8):
        cases = [(f"ep/dispatch/bf16/compact/{ranks}x4096x7168", 4096), (f"ep/dispatch/bf16/slots/{ranks}x128x7168", 128)]
        cases = [c for c in cases if selected(c[0])]
        found = torch.cuda.device_count()
        if cases and found < ranks:
            output.missing(f"nccl with {ranks} GPUs", f"this machine has {found}")
            continue
        for name, tokens in cases:
            with tempfile.TemporaryDirectory() as folder:
                out = os.path.join(folder, "times")
                try:
                    torch.multiprocessing.spawn(nccl_rank, (ranks, tokens, os.path.join(folder, "store"), out), ranks)
                    with open(out) as results:
                        output.record(name, "nccl", json.load(results), 10, 1)
                except Exception as error:
                    output.missing("nccl", str(error).strip().splitlines()[-1][:200])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--budget", type=float, metavar="SECONDS")
    parser.add_argument("--model", type=model, action="append", metavar="NAME=E,K,H,I")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], metavar="N,N..")
    parser.add_argument("--limit", type=float, metavar="SECONDS", default=10)
    parser.add_argument("--warm", type=int, metavar="JOBS", default=min((os.cpu_count() or 2) // 2, 8))
    parser.add_argument("--warm-part", metavar="PART/PARTS", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cases", action="store_true")
    args = parser.parse_args()
    global BURST, MODELS, TOKENS
    BURST, MODELS, TOKENS = args.burst, args.model or [], args.tokens or []
    budget = args.budget or (160 if args.quick else math.inf)
    begin = time.monotonic()

    def selected(name):
        return not args.filters or any(f in name for f in args.filters)

    def cases():
        found = (c for family in FAMILIES for c in family())
        return by_value(c for c in found if selected(c.name) and (c.quick or not args.quick))

    if args.list or args.cases:
        for c in cases():
            print(c.name if args.cases else f"{c.name:<52} {' '.join(c.peers)}")
        return 0
    if torch is None:
        print(f"missing: PyTorch: {NO_TORCH}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("missing: a GPU that PyTorch can use", file=sys.stderr)
        return 2

    if args.warm_part:
        warm(cases(), args)
        return 0
    children = start_warming(args)
    output = Output(args.json)
    given_up = set()
    if kernels is None:
        given_up.add("triton")
        output.missing("triton", NO_TRITON)
    nccl(output, selected)
    wait_for(children, min(60 if args.compile else 30, budget / 2))
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    late = []
    for c in cases():
        if time.monotonic() - begin > budget:
            late.append(c.name)
            continue
        measure_in_time(c, args, output, given_up)
        if torch.cuda.memory_reserved() > 30 << 30:
            gc.collect()
            torch.cuda.empty_cache()
    if late:
        names = ", ".join(late[:8]) + (", .." if len(late) > 8 else "")
        output.missing(f"{len(late)} cases ({names})", f"not begun within {budget:.0f} s")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
