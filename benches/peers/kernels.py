"""Small Triton kernels for `peers.py`: what is usual in the field, written for this comparison.

Each wrapper takes and returns contiguous tensors, launches only what it times, and can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _gated(out, x, d, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < d
    gate = tl.load(x + row * 2 * d + cols, mask, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * d + d + cols, mask, other=0).to(tl.float32)
    if GELU:
        gate = gate * tl.sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * d + cols, (gate * up).to(out.dtype.element_ty), mask)


def gated(x, gelu=False):
    rows, d = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, d, device=x.device, dtype=x.dtype)
    block = 1024 if rows < 64 else 2048
    _gated[(rows, triton.cdiv(d, block))](out, x, d, GELU=gelu, BLOCK=block, num_warps=block // 256)
    return out


@triton.jit
def _rms_norm(out, x, residual, weight, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    v = tl.load(x + row * n + cols, mask, other=0).to(tl.float32)
    if ADD:
        v += tl.load(residual + row * n + cols, mask, other=0).to(tl.float32)
        tl.store(residual + row * n + cols, v.to(residual.dtype.element_ty), mask)
    scale = tl.rsqrt(tl.sum(v * v, 0) / n + eps)
    w = tl.load(weight + cols, mask, other=0).to(tl.float32)
    tl.store(out + row * n + cols, (v * scale * w).to(out.dtype.element_ty), mask)


def rms_norm(x, weight, eps, residual=None):
    """With a residual, in place as servers do it: the sum goes to the residual, its norm to x."""
    rows, n = x.shape
    out = x if residual is not None else torch.empty_like(x)
    block = triton.next_power_of_2(n)
    _rms_norm[(rows,)](
        out, x, residual, weight, n, eps, ADD=residual is not None, BLOCK=block, num_warps=16 if block > 4096 else 8
    )
    return out if residual is None else (out, residual)


@triton.jit
def _rotary(q, k, positions, angles, q_heads, k_heads, DIM: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    HALF: tl.constexpr = DIM // 2
    cols = tl.arange(0, HALF)
    at = tl.load(positions + token) * DIM
    cos = tl.load(angles + at + cols).to(tl.float32)[None, :]
    sin = tl.load(angles + at + HALF + cols).to(tl.float32)[None, :]
    if first < q_heads:
        base = q + (token * q_heads + first) * DIM
    else:
        base = k + (token * k_heads + first - q_heads) * DIM
    where = base + tl.arange(0, HEADS)[:, None] * DIM + cols[None, :]
    a, b = tl.load(where).to(tl.float32), tl.load(where + HALF).to(tl.float32)
    tl.store(where, (a * cos - b * sin).to(q.dtype.element_ty))
    tl.store(where + HALF, (b * cos + a * sin).to(q.dtype.element_ty))


def rotary(q, k, positions, angles):
    """Neox pairing, in place; the heads of each are a multiple of four."""
    tokens, q_heads, dim = q.shape
    k_heads, heads = k.shape[1], 4
    _rotary[(tokens, (q_heads + k_heads) // heads)](
        q, k, positions, angles, q_heads, k_heads, DIM=dim, HEADS=heads, num_warps=2
    )
    return q, k


@triton.jit
def _reshape_and_cache(key_cache, value_cache, key, value, slots, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    cols = tl.arange(0, WIDTH)
    if slot >= 0:
        tl.store(key_cache + slot * WIDTH + cols, tl.load(key + token * WIDTH + cols))
        tl.store(value_cache + slot * WIDTH + cols, tl.load(value + token * WIDTH + cols))


def reshape_and_cache(key, value, key_cache, value_cache, slots):
    """Caches `[blocks, block_size, heads, dim]`."""
    width = key.shape[1] * key.shape[2]
    _reshape_and_cache[(key.shape[0],)](key_cache, value_cache, key, value, slots, WIDTH=width, num_warps=4)
    return key_cache, value_cache


@triton.jit
def _gate(
    weights, ids, logits, bias, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    x = tl.load(logits + row * EXPERTS + cols, cols < EXPERTS, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
        choice = tl.where(cols < EXPERTS, scores + tl.load(bias + cols, cols < EXPERTS, other=0), float("-inf"))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores /= tl.sum(scores, 0)
        choice = tl.where(cols < EXPERTS, scores, float("-inf"))
    if GROUPS > 1:
        table = tl.reshape(choice, [GROUPS, WIDTH // GROUPS])
        within, groups = tl.arange(0, WIDTH // GROUPS), tl.arange(0, GROUPS)
        rest = tl.where(within[None, :] == tl.argmax(table, 1)[:, None], float("-inf"), table)
        worth = tl.max(table, 1) + tl.max(rest, 1)
        stays = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(KEPT):
            best = groups == tl.argmax(worth, 0)
            stays = tl.where(best, 1, stays)
            worth = tl.where(best, float("-inf"), worth)
        choice = tl.reshape(tl.where(stays[:, None] > 0, table, float("-inf")), [WIDTH])
    slots = tl.arange(0, TOP_K)
    chosen, factors = tl.zeros([TOP_K], tl.int32), tl.zeros([TOP_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        here = cols == best
        chosen = tl.where(slots == slot, best, chosen)
        factors = tl.where(slots == slot, tl.sum(tl.where(here, scores, 0.0), 0), factors)
        choice = tl.where(here, float("-inf"), choice)
    tl.store(ids + row * TOP_K + slots, chosen)
    tl.store(weights + row * TOP_K + slots, factors / tl.sum(factors, 0))


def gate(logits, bias, groups, kept, top_k):
    """With a bias by sigmoid, else by softmax; `top_k` is a power of two."""
    rows, experts = logits.shape
    weights = torch.empty(rows, top_k, device=logits.device, dtype=torch.float32)
    ids = torch.empty(rows, top_k, device=logits.device, dtype=torch.int32)
    _gate[(rows,)](
        weights, ids, logits, bias, EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), GROUPS=groups, KEPT=kept,
        TOP_K=top_k, SIGMOID=bias is not None, num_warps=1,
    )  # fmt: skip
    return weights, ids


@triton.jit
def _decode_part(
    q, key, value, table, lens, part, lse, scale, table_width, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + sequence)
    each = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    begin = split * each
    end = tl.minimum(begin + each, length)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, DIM)
    used = rows < GROUP
    first = sequence * KV_HEADS * GROUP + head * GROUP
    queries = tl.load(q + (first + rows[:, None]) * DIM + cols[None, :], used[:, None], other=0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(begin, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = tokens < end
        page = tl.load(table + sequence * table_width + tokens // PAGE, there, other=0).to(tl.int64)
        at = ((page * PAGE + tokens % PAGE) * KV_HEADS + head) * DIM
        keys = tl.load(key + at[None, :] + cols[:, None], there[None, :], other=0)
        scores = tl.where(there[None, :], tl.dot(queries, keys) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        old = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        values = tl.load(value + at[:, None] + cols[None, :], there[:, None], other=0)
        sums = sums * old[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * old + tl.sum(weights, 1)
        highest = higher
    to = (first + rows) * splits + split
    tl.store(part + to[:, None] * DIM + cols[None, :], sums, used[:, None])
    tl.store(lse + to * 2, highest, used)
    tl.store(lse + to * 2 + 1, total, used)


@triton.jit
def _decode_merge(out, part, lse, DIM: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    splits, cols = tl.arange(0, SPLITS), tl.arange(0, DIM)
    highest = tl.load(lse + (row * SPLITS + splits) * 2)
    weight = tl.exp2(highest - tl.max(highest, 0))
    total = tl.sum(weight * tl.load(lse + (row * SPLITS + splits) * 2 + 1), 0)
    parts = tl.load(part + (row * SPLITS + splits[:, None]) * DIM + cols[None, :])
    tl.store(out + row * DIM + cols, (tl.sum(parts * weight[:, None], 0) / total).to(out.dtype.element_ty))


def decode(q, key, value, table, lens, longest):
    """Split KV: caches `[pages, page, kv_heads, dim]`, one query token a sequence."""
    batch, q_heads, dim = q.shape
    page, kv_heads = key.shape[1], key.shape[2]
    block = 64
    splits = triton.next_power_of_2(triton.cdiv(4 * 132, batch * kv_heads))
    splits = max(1, min(splits, 128, triton.next_power_of_2(longest // (2 * block))))
    part = torch.empty(batch * q_heads, splits, dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(batch * q_heads, splits, 2, device=q.device, dtype=torch.float32)
    out = torch.empty_like(q)
    group = q_heads // kv_heads
    _decode_part[(batch, kv_heads, splits)](
        q, key, value, table, lens, part, lse, dim**-0.5 * 1.4426950408889634, table.shape[1], splits,
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, group), DIM=dim, PAGE=page, BLOCK=block,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _decode_merge[(batch * q_heads,)](out, part, lse, DIM=dim, SPLITS=splits, num_warps=2)
    return out


@triton.jit
def _count(counts, ids, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(ids + at, at < pairs, other=0), 1, at < pairs)


@triton.jit
def _starts(counts, starts, expert_ids, blocks, M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    experts = tl.arange(0, EXPERTS)
    padded = (tl.load(counts + experts) + M - 1) // M
    ends = tl.cumsum(padded, 0)
    tl.store(starts + experts, (ends - padded) * M)
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1)
        tl.store(expert_ids + block, expert, block < blocks)


@triton.jit
def _place(sorted_ids, starts, ids, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.atomic_add(starts + tl.load(ids + at, at < pairs, other=0), 1, at < pairs)
    tl.store(sorted_ids + place, at, at < pairs)


def sort(ids, experts, m):
    """Pairs by expert, each expert's padded to whole blocks of `m`, and the expert of each block."""
    flat = ids.view(-1)
    pairs = flat.numel()
    blocks = min((pairs + experts * (m - 1)) // m, pairs)
    counts = torch.zeros(triton.next_power_of_2(experts), device=ids.device, dtype=torch.int32)
    starts = torch.empty_like(counts)
    expert_ids = torch.empty(blocks, device=ids.device, dtype=torch.int32)
    sorted_ids = torch.full((blocks * m,), pairs, device=ids.device, dtype=torch.int32)
    grid = (triton.cdiv(pairs, 256),)
    _count[grid](counts, flat, pairs, BLOCK=256)
    _starts[(1,)](counts, starts, expert_ids, blocks, M=m, EXPERTS=triton.next_power_of_2(experts), BLOCK=32, num_warps=8)
    _place[grid](sorted_ids, starts, flat, pairs, BLOCK=256)
    return sorted_ids, expert_ids


@triton.jit
def _experts(
    out, x, w, sorted_ids, expert_ids, factors, n, k, pairs, blocks,
    EXPERTS: tl.constexpr, DIVIDE: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, N)
    group = tl.program_id(0) // (GROUP * tiles)
    high = tl.minimum(blocks - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    block, tile = group * GROUP + within % high, within // high
    expert = tl.load(expert_ids + block).to(tl.int64)
    if expert >= EXPERTS:
        return
    ids = tl.load(sorted_ids + block * M + tl.arange(0, M)).to(tl.int64)
    there = ids < pairs
    cols = tile * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    from_x = x + (ids // DIVIDE)[:, None] * k + inner[None, :]
    # Columns beyond the last are others once more, and not stored.
    from_w = w + expert * n * k + (cols % n)[None, :].to(tl.int64) * k + inner[:, None]
    sums = tl.zeros([M, N], tl.float32)
    for first in range(0, k, K):
        if EVEN:
            sums = tl.dot(tl.load(from_x, there[:, None], other=0), tl.load(from_w), sums)
        else:
            left = inner < k - first
            rows = tl.load(from_x, there[:, None] & left[None, :], other=0)
            sums = tl.dot(rows, tl.load(from_w, left[:, None], other=0), sums)
        from_x += K
        from_w += K
    if SCALE:
        sums *= tl.load(factors + ids, there, other=0)[:, None]
    tl.store(out + ids[:, None] * n + cols[None, :], sums.to(out.dtype.element_ty), there[:, None] & (cols < n)[None, :])


# Rows, columns and depth of a tile, blocks of rows that run beside each other, warps, stages.
FEW = [(16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 4, 4), (16, 128, 64, 1, 4, 5)]
MANY = [(64, 128, 64, 8, 4, 4), (64, 256, 64, 8, 8, 4), (128, 128, 64, 8, 8, 4), (128, 256, 64, 8, 8, 3)]


def fused_moe(x, w13, w2, ids, factors, config):
    """The block of experts as vLLM's Triton path does it: pairs sorted by expert and padded to tiles, two products."""
    m, n, k, group, warps, stages = config
    tokens, hidden = x.shape
    experts, inter, top_k = w13.shape[0], w13.shape[1] // 2, ids.shape[1]
    pairs = tokens * top_k
    flat = ids.view(-1)
    if pairs <= 16:
        # A tile for each pair: nothing to sort.
        blocks = pairs
        sorted_ids = torch.full((pairs, m), pairs, device=x.device, dtype=torch.int32)
        sorted_ids[:, 0] = torch.arange(pairs, device=x.device, dtype=torch.int32)
        expert_ids = flat
    else:
        sorted_ids, expert_ids = sort(ids, experts, m)
        blocks = expert_ids.numel()

    def product(out, a, w, divide, scale):
        grid = (blocks * triton.cdiv(w.shape[1], n),)
        _experts[grid](
            out, a, w, sorted_ids, expert_ids, factors, w.shape[1], w.shape[2], pairs, blocks,
            EXPERTS=experts, DIVIDE=divide, SCALE=scale, EVEN=w.shape[2] % k == 0, M=m, N=n, K=k, GROUP=group,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out

    both = product(torch.empty(pairs, 2 * inter, device=x.device, dtype=x.dtype), x, w13, top_k, False)
    down = product(torch.empty(pairs, hidden, device=x.device, dtype=x.dtype), gated(both), w2, 1, True)
    return down.view(tokens, top_k, hidden).sum(1)
