"""The phases of a decode step in Triton, each a kernel.

    begin           embeddings of the tokens, cos and sin of their positions
    project         norm, queries, keys and values                            \\
    attend          rotation, cache write, attention split over the keys       |
    add_product     output product, residual                                   | of each layer
    gate_up         norm, gate, up, SwiGLU                                     |
    add_product     down product, residual                                    /
    project         norm, logits

In place of the first two, layers of short convolutions have project, for both gates and what they let
through, and convolve; those of the gated delta rule have project, for what it is computed from, and delta.
Gemma 4 norms what a product gives before it adds it (settle), adds a third part to each layer (gate_up and
add_product), which a token's own numbers let through, and makes those first (look_up, project, join).

A phase is a function of program_id(0) and num_programs(0): each program goes through its share of the blocks,
for any number of programs. A phase begins when the one before it has ended. Buffers that other programs write
are read past the first-level cache (".cg"), which knows nothing of their stores.

A single row is multiplied as what it is, a vector that stays in registers while the rows of the matrix pass;
the first of them are asked for before the vector is known, because the two waits would add up. More rows, up
to 64, are a tile of the tensor cores, for which each weight is read once, too.

Where the GPU can, a phase is started before the one before has ended (programmatic dependent launch). Every
program waits for that (`wait`) before it reads what phases write, or writes; only weights are read earlier.

Where the eager step rounds to the weights' type, so does this; sums are float32 in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Sizes:
    """The constants of the kernels: the model's sizes, types and layers, and the number of rows."""

    D: int  # width of the hidden states
    H: int  # query heads
    KV: int  # key and value heads
    HD: int  # width of a head: a power of two
    V: int  # vocabulary
    DT: tl.dtype  # of activations; float32 sums are rounded to it
    DOT: tl.dtype  # of the operands of tl.dot
    ROWS: int  # of a tile: 1, or 8, 16, 32 or 64, which up to so many fill
    EARLY: bool  # phases are started before the one before has ended
    BITS: int  # of a weight: those of DT, or 8 or 4, with a float32 scale for each row of a matrix
    MLP_BIAS: bool
    QK_NORM: bool  # queries and keys are normed, head by head
    TAPS: int  # positions that a short convolution reads
    CONV_BIAS: bool
    ROTARY: int  # numbers of a head that are rotated
    GATED: bool  # queries stand beside what gates their results, head by head
    CENTRED: bool  # weights of norms are what differs from 1
    DELTA_KEYS: int  # heads of a gated delta rule's queries and keys, and of its values
    DELTA_VALUES: int
    DK: int  # how wide those are
    DV: int
    WINDOW: int  # slots after which its matrix is kept
    PAIRS: int = 0  # angles of a position, of every kind of attention
    NEAR: int = 0  # slots that attention sees at most; 0: all
    SHARED: bool = False  # keys and values are those of an earlier layer
    VALUE_NORM: bool = False  # values are normed, without weights
    GELU: bool = False  # gates go through a tanh's GELU in place of SiLU
    SOFT: tuple[int, ...] = ()  # ids that have the embedding of PLACEHOLDER
    PLACEHOLDER: int = 0
    P: int = 0  # width of a token's own numbers for each layer
    LAYERS: int = 0

    @property
    def ONE(self) -> bool:
        """A single row."""
        return self.ROWS == 1

    @property
    def launch(self) -> dict[str, bool]:
        """Options of every launch but the first, which comes after what others have launched."""
        return {"launch_pdl": True} if self.EARLY else {}

    @property
    def Q(self) -> int:
        """Heads of queries and gates."""
        return self.H * (2 if self.GATED else 1)

    @property
    def E(self) -> int:
        """The width of all results of a gated delta rule."""
        return self.DELTA_VALUES * self.DV

    def tile(self, width: int, pair: bool = False) -> tuple[int, int]:
        """Rows and columns of a tile of a matrix with rows of this width; of a `pair` two are read at a time.
        For one row a tile has so many weights, for more so many columns: twice as many of four bits."""
        twice = 2 if self.BITS == 4 else 1
        most, columns = 8192 * twice, 2048 // self.DT.primitive_bitwidth * twice
        whole = max(64 if twice == 2 else 16, triton.next_power_of_2(width))
        if self.ONE:
            return max(1, min(8, most // whole) // (2 if pair else 1)), whole
        halves = (2 if pair and self.BITS <= 8 else 1) * max(1, self.ROWS // 32)
        return 16 if self.ROWS <= 16 else 32, min(columns // halves, whole)


CHUNK = tl.constexpr(64)  # keys that are multiplied at once, at most
SHARE = tl.constexpr(128)  # the fewest keys that are a share of their own


# --------------------------------------------------------------------------------------------- products


# What is compiled for one number of rows serves all that fill the same tile, and any capacity.
phase = triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["count"])


@triton.jit
def wait(S: tl.constexpr):
    """Until the phase before has ended and what it wrote can be read; then the next one may be started. Every
    program of every phase does this once: when one has ended, so have all before it."""
    if S.EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rounded(x, S: tl.constexpr):
    return x.to(S.DT).to(tl.float32)


@triton.jit
def gain(norm, columns, there, S: tl.constexpr):
    """(n,) float32: what a norm multiplies with."""
    weight = tl.load(norm + columns, mask=there, other=0.0).to(tl.float32)
    if S.CENTRED:
        weight += 1.0
    return weight


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, S: tl.constexpr):
    """What x lets through as a gate."""
    if S.GELU:
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x / (1.0 + tl.exp(-x))
    return rounded(y, S)


@triton.jit
def normed(x, width, eps):
    """x (n, k), of `width` numbers and zeros, with a mean square of 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]


@triton.jit
def tile(matrix, rows, there, step, K: tl.constexpr, BK: tl.constexpr, S: tl.constexpr):
    """The `step`-th BK columns of some rows of a matrix with K columns, as they are stored, and zeros where
    rows are not `there` and columns not in it: (n, BK) weights, or of four bits (n, BK / 8) units of codes
    and (n, BK / 64) words of two groups (`quantized.py`)."""
    words = tl.zeros((1, 1), tl.int32)
    if S.BITS == 4:
        UNITS: tl.constexpr = (K + 63) // 64 * 8
        line = matrix + rows.to(tl.int64)[:, None] * ((UNITS // 8 * 9 + 3) // 4 * 4)
        column, block = step * (BK // 8) + tl.arange(0, BK // 8), step * (BK // 64) + tl.arange(0, BK // 64)
        inside = there[:, None] & (column < UNITS)[None, :]
        words = tl.load(
            line + UNITS + block[None, :], mask=there[:, None] & (block < UNITS // 8)[None, :], other=0
        )
    else:
        line, column = matrix + rows.to(tl.int64)[:, None] * K, step * BK + tl.arange(0, BK)
        inside = there[:, None] & (column < K)[None, :]
    weights = tl.load(line + column[None, :], mask=inside, other=0, eviction_policy="evict_first")
    return weights, words


@triton.jit
def codes_of(units):
    """(n, k) units -> (n, 8 k) float32: 16 more than each code, which takes two operations."""
    halves = tl.join(units, units >> 4)
    ordered = tl.join(tl.join(halves << 19, halves << 3), tl.join(halves << 11, halves >> 5))
    # A number that the compiler does not know is in a register, and `&` and `|` are one instruction then.
    sixteen = 0x41800000 + tl.program_id(2)
    bits = tl.reshape(ordered, (units.shape[0], 8 * units.shape[1])) & 0x00780000 | sixteen
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def groups_of(words):
    """(n, k) words -> scales and 16 more than each zero, (n, 2 k) float32."""
    bits = tl.reshape(tl.join(words, words >> 16), (words.shape[0], 2 * words.shape[1]))
    scales = (((bits & 0x1FF) << 18) + (112 << 23)).to(tl.float32, bitcast=True)
    return scales, ((bits & 0xFE00) << 7 | 0x41800000).to(tl.float32, bitcast=True)


@triton.jit
def by_group(x):
    """(n, k) -> (n, k / 32, 32)."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32))


@triton.jit
def widened(weights, words, S: tl.constexpr):
    """(n, BK) float32 of a tile, without the scales of rows."""
    if S.BITS == 4:
        scales, zeros = groups_of(words)
        numbers = (by_group(codes_of(weights)) - zeros[:, :, None]) * scales[:, :, None]
        numbers = tl.reshape(numbers, (weights.shape[0], 8 * weights.shape[1]))
    else:
        numbers = weights.to(tl.float32)
    return numbers


@triton.jit
def ahead(
    matrix, scale, bias, rows, there, K: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr
):
    """The part of a matrix's rows that is read before there is anything to multiply them with: a tile where
    they are multiplied with one vector, and scale and bias (n, 1)."""
    weights = tl.zeros((1, 1), tl.float32)
    words = tl.zeros((1, 1), tl.int32)
    factor = tl.full((1, 1), 1.0, tl.float32)
    shift = tl.zeros((1, 1), tl.float32)
    if S.ONE:
        weights, words = tile(matrix, rows, there, 0, K, BK, S)
    if S.BITS <= 8:
        factor = tl.load(scale + rows, mask=there, other=0.0)[:, None]
    if BIAS:
        shift = tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[:, None]
    return weights, words, factor, shift


@triton.jit
def held(x, norm, count, eps, K: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, NORMED: tl.constexpr):
    """The part of x (count, K) that is known before the products, after waiting for it: one row itself,
    normed, (1, BK) float32; of several the factors (ROWS, 1) that norm them."""
    ROWS: tl.constexpr = S.ROWS
    columns = tl.arange(0, BK)
    wait(S)
    if S.ONE:
        weight = tl.full((BK,), 1.0, tl.float32)
        if NORMED:
            weight = gain(norm, columns, columns < K, S)
        known = tl.load(x + columns, mask=columns < K, other=0.0, cache_modifier=".cg").to(tl.float32)
        if NORMED:
            known = rounded(weight * known * tl.rsqrt(tl.sum(known * known, 0) / K + eps), S)
        known = known[None, :]
    else:
        squares = tl.zeros((ROWS, BK), tl.float32)
        if NORMED:
            for start in range(0, K, BK):
                part = several(x, start + columns, count, K, S)
                squares += part * part
        known = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return known


@triton.jit
def several(x, columns, count, K: tl.constexpr, S: tl.constexpr):
    """(ROWS, k) float32 of x (count, K), 0 outside."""
    row = tl.arange(0, S.ROWS)
    inside = (row < count)[:, None] & (columns < K)[None, :]
    at = row[:, None] * K + columns[None, :]
    return tl.load(x + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def product(
    read, matrix, rows, there, known, x, norm, count,
    K: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """(n, ROWS) float32: some rows of a matrix times x, with their biases. `read`: see `ahead`."""
    ROWS: tl.constexpr = S.ROWS
    weights, words, factor, shift = read
    if S.ONE and S.BITS == 4:
        scales, zeros = groups_of(words)
        dots = tl.sum(by_group(codes_of(weights) * known), 2)
        total = tl.sum(scales * (dots - zeros * tl.sum(by_group(known), 2)), 1)[:, None]
    elif S.ONE:
        total = tl.sum(weights.to(tl.float32) * known, 1)[:, None]
    else:
        total = tl.zeros((rows.shape[0], ROWS), tl.float32)
        for step in range(0, tl.cdiv(K, BK)):
            columns = step * BK + tl.arange(0, BK)
            part = several(x, columns, count, K, S)
            if NORMED:
                weight = gain(norm, columns, columns < K, S)
                part = rounded(weight[None, :] * part * known, S)
            stored, groups = tile(matrix, rows, there, step, K, BK, S)
            left, right = widened(stored, groups, S).to(S.DT).to(S.DOT), tl.trans(part.to(S.DT).to(S.DOT))
            total = tl.dot(left, right, total, input_precision="ieee")
    return total * factor + shift


@triton.jit
def row_numbers(S: tl.constexpr):
    """(1, ROWS): the rows of x that the columns of a product belong to."""
    return tl.arange(0, S.ROWS)[None, :]


# ----------------------------------------------------------------------------------------------- phases


@phase
def look_up(token, table, scale, y, count, factor, K: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """y (count, K): embeddings of `token`, (count,) int64, times `factor`."""
    wait(S)
    for block in range(tl.program_id(0), count * tl.cdiv(K, BK), tl.num_programs(0)):
        row, step = block % count, block // count
        columns = step * BK + tl.arange(0, BK)
        chosen = tl.load(token + row) + tl.arange(0, 1)
        for at in tl.static_range(len(S.SOFT)):
            chosen = tl.where(chosen == S.SOFT[at], S.PLACEHOLDER, chosen)
        weights, words = tile(table, chosen, chosen >= 0, step, K, BK, S)
        read = widened(weights, words, S)
        if S.BITS <= 8:
            read *= tl.load(scale + chosen)[:, None]
        read = (rounded(read, S) * factor).to(S.DT)
        tl.store(y + row * K + columns[None, :], read, mask=(columns < K)[None, :])


@phase
def begin(
    token, position, offset, table, scale, frequencies, x, cos, sin, count, factor,
    S: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """x (count, D): embeddings of `token`, times `factor`; cos and sin (count, PAIRS) of `position`, plus
    `offset` where it is not None: (count,) int64."""
    look_up(token, table, scale, x, count, factor, S.D, S, BK)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        pair = tl.arange(0, HALF)
        turned = pair < S.PAIRS
        place = tl.load(position + row)
        if offset is not None:
            place += tl.load(offset + row)
        angle = place.to(tl.float32) * tl.load(frequencies + pair, mask=turned, other=0.0)
        at = row * S.PAIRS + pair
        tl.store(cos + at, tl.cos(angle).to(S.DT), mask=turned)
        tl.store(sin + at, tl.sin(angle).to(S.DT), mask=turned)


@triton.jit
def part_of(
    block, w0, w1, w2, w3, s0, s1, s2, s3, b0, b1, b2, b3,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The one of four matrices, as high as N0 ... N3, that a block of their rows lies in, its scale and bias,
    the rows there, and where the first of that matrix stands among all."""
    END_0: tl.constexpr = (N0 + BN - 1) // BN
    END_1: tl.constexpr = END_0 + (N1 + BN - 1) // BN
    END_2: tl.constexpr = END_1 + (N2 + BN - 1) // BN
    in_0, in_1, in_2 = block < END_0, block < END_1, block < END_2
    matrix = tl.where(in_0, w0, tl.where(in_1, w1, tl.where(in_2, w2, w3)))
    scale = tl.where(in_0, s0, tl.where(in_1, s1, tl.where(in_2, s2, s3)))
    bias = tl.where(in_0, b0, tl.where(in_1, b1, tl.where(in_2, b2, b3)))
    begin = tl.where(in_0, 0, tl.where(in_1, END_0, tl.where(in_2, END_1, END_2)))
    height = tl.where(in_0, N0, tl.where(in_1, N1, tl.where(in_2, N2, N3)))
    first = tl.where(in_0, 0, tl.where(in_1, N0, tl.where(in_2, N0 + N1, N0 + N1 + N2)))
    rows = (block - begin) * BN + tl.arange(0, BN)
    return matrix, scale, bias, rows, rows < height, first


@phase
def project(
    x, norm, w0, w1, w2, w3, s0, s1, s2, s3, b0, b1, b2, b3, y, count, eps,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    S: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr, CAP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (count, N0 + N1 + N2 + N3): x, normed if NORMED, times four matrices, of which the last may have no
    rows; a tanh keeps it within ± CAP where that is a number."""
    N: tl.constexpr = N0 + N1 + N2 + N3
    BLOCKS: tl.constexpr = (
        (N0 + BN - 1) // BN + (N1 + BN - 1) // BN + (N2 + BN - 1) // BN + (N3 + BN - 1) // BN
    )
    first, programs, row = tl.program_id(0), tl.num_programs(0), row_numbers(S)
    matrix, scale, bias, rows, there, begin = part_of(
        first, w0, w1, w2, w3, s0, s1, s2, s3, b0, b1, b2, b3, N0, N1, N2, N3, BN
    )
    read = ahead(matrix, scale, bias, rows, there, S.D, BK, S, BIAS)
    known = held(x, norm, count, eps, S.D, BK, S, NORMED)
    for block in range(first, BLOCKS, programs):
        next_matrix, scale, bias, next_rows, next_there, next_begin = part_of(
            block + programs, w0, w1, w2, w3, s0, s1, s2, s3, b0, b1, b2, b3, N0, N1, N2, N3, BN
        )
        next_read = ahead(next_matrix, scale, bias, next_rows, next_there, S.D, BK, S, BIAS)
        total = product(read, matrix, rows, there, known, x, norm, count, S.D, BK, S, NORMED)
        if CAP is not None:
            total = rounded(2.0 * sigmoid(2.0 * rounded(rounded(total, S) / CAP, S)) - 1.0, S) * CAP
        at = row * N + (begin + rows)[:, None]
        tl.store(y + at, total.to(S.DT), mask=(row < count) & there[:, None])
        matrix, rows, there, begin = next_matrix, next_rows, next_there, next_begin
        read = next_read


@triton.jit
def shares_of(keys, SPLITS: tl.constexpr):
    """The number of keys in a share, where `keys` are split into at most SPLITS."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), CHUNK) * CHUNK, SHARE)


@triton.jit
def rotated(qkv, heads, there, norm, cos, sin, eps, S: tl.constexpr):
    """(n, HD): some heads of a row as they enter attention: normed if the model does that, and rotated."""
    HALF: tl.constexpr = S.ROTARY // 2
    column = tl.arange(0, S.HD)
    turned = column < S.ROTARY
    other = tl.where(turned, (column + HALF) % S.ROTARY, column)
    line = qkv + heads[:, None] * S.HD
    one = tl.load(line + column[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    two = tl.load(line + other[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    if S.QK_NORM:
        factor = tl.rsqrt(tl.sum(one * one, 1) / S.HD + eps)[:, None]
        one = rounded(gain(norm, column, column >= 0, S)[None, :] * one * factor, S)
        two = rounded(gain(norm, other, column >= 0, S)[None, :] * two * factor, S)
    c = tl.load(cos + column % HALF, mask=turned, other=1.0, cache_modifier=".cg").to(tl.float32)
    s = tl.load(sin + column % HALF, mask=turned, other=0.0, cache_modifier=".cg").to(tl.float32)
    s = tl.where(column < HALF, -s, s)
    return (rounded(one * c[None, :], S) + rounded(two * s[None, :], S)).to(S.DT)


@triton.jit
def weighed(out, line, heads, there, S: tl.constexpr):
    """(n, HD) in the activations' type: what some heads of a row attend to, as their gates let it through."""
    out = rounded(out, S)
    if S.GATED:
        at = (2 * heads + 1)[:, None] * S.HD + tl.arange(0, S.HD)[None, :]
        gate = tl.load(line + at, mask=there[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        out *= rounded(sigmoid(gate), S)
    return out.to(S.DT)


@phase
def attend(
    qkv, q_norm, k_norm, keys, values, cos, sin, position, shares, maxima, sums, arrived, attended,
    count, capacity, row_stride, head_stride, eps, scale,
    S: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """attended (count, H, HD): what each row attends to in its own positions 0 ... position.

    A block is a share of the keys of one row and one of its key heads, with all queries that share them. The
    block that the row's new token belongs to writes its key and value to the cache; it takes them from
    registers, so that nobody reads what is being written. The last block of a head to finish puts the shares
    together. GROUP is a power of two, at least 16 and not less than H / KV; LINES: see `put_together`.

    A position past the capacity is not written: clamping it would overwrite the last real key. Such a row
    sees its whole cache and itself; whoever lets it run on throws its tokens away.
    """
    G: tl.constexpr = S.H // S.KV
    HEADS: tl.constexpr = S.Q if S.SHARED else S.Q + 2 * S.KV
    WIDTH: tl.constexpr = S.HD * S.DT.primitive_bitwidth // 8
    # Two chunks of keys and two of values, or one of each, have to fit into the shared memory of a small GPU.
    MOST: tl.constexpr = 16_384 if S.DT.primitive_bitwidth == 16 else 8192  # float32 fills registers, too
    KEYS: tl.constexpr = max(16, min(CHUNK, MOST // WIDTH))
    STAGES: tl.constexpr = 3 if KEYS * WIDTH <= 16_384 else 2
    g, column = tl.arange(0, GROUP), tl.arange(0, S.HD)
    wait(S)
    for block in range(tl.program_id(0), count * S.KV * SPLITS, tl.num_programs(0)):
        # Shares of all heads side by side: those that a short row does not need are the last.
        split, pair = block // (count * S.KV), block % (count * S.KV)
        row, kv = pair // S.KV, pair % S.KV
        place = tl.load(position + row)
        if S.SHARED:
            cached = tl.minimum(place + 1, capacity).to(tl.int32)
            keys_seen = cached
        else:
            cached = tl.minimum(place, capacity).to(tl.int32)
            keys_seen = cached + 1
        oldest = 0
        if S.NEAR:
            oldest = tl.maximum(keys_seen - S.NEAR, 0)
            keys_seen = tl.minimum(keys_seen, S.NEAR)
        share = shares_of(keys_seen, SPLITS)
        used = (keys_seen - 1) // share + 1
        if split < used:
            line = qkv + row * (HEADS * S.HD)
            row_cos, row_sin = cos + row * S.PAIRS, sin + row * S.PAIRS
            cache_at = row.to(tl.int64) * row_stride + kv.to(tl.int64) * head_stride
            key_cache, value_cache = keys + cache_at, values + cache_at
            q = rotated(line, (kv * G + g) * (S.Q // S.H), g < G, q_norm, row_cos, row_sin, eps, S)
            if S.SHARED:
                top = tl.full((GROUP,), -float("inf"), tl.float32)
                total = tl.zeros((GROUP,), tl.float32)
                mixed = tl.zeros(q.shape, tl.float32)
            else:
                own_head = S.Q + kv + tl.arange(0, 1)
                own_key = rotated(line, own_head, own_head >= 0, k_norm, row_cos, row_sin, eps, S)
                own_key = own_key.to(keys.dtype.element_ty)
                own_value = tl.load(
                    line + (own_head + S.KV)[:, None] * S.HD + column[None, :], cache_modifier=".cg"
                )
                if S.VALUE_NORM:
                    own_value = normed(own_value.to(tl.float32), S.HD, eps).to(S.DT)
                own_value = own_value.to(values.dtype.element_ty)
                owner = split == used - 1
                written = (own_head >= 0)[:, None] & (column >= 0)[None, :] & owner & (place < capacity)
                tl.store(key_cache + place * S.HD + column[None, :], own_key, mask=written)
                tl.store(value_cache + place * S.HD + column[None, :], own_value, mask=written)

                # The token's own key and value are the first of its block, of no weight in the others.
                own = tl.sum(q.to(tl.float32) * own_key.to(S.DT).to(tl.float32), 1) * scale
                top = tl.where(owner, own, -float("inf"))
                total = tl.where(owner, 1.0, 0.0) + tl.zeros((GROUP,), tl.float32)
                mixed = total[:, None] * own_value.to(tl.float32)
            begin, end = oldest + split * share, tl.minimum(oldest + split * share + share, cached)
            for start in tl.range(begin, end, KEYS, num_stages=STAGES):
                slot = start + tl.arange(0, KEYS)
                there = slot < cached
                at = slot[:, None] * S.HD + column[None, :]
                key = tl.load(key_cache + at, mask=there[:, None], other=0.0)
                score = tl.dot(q.to(S.DOT), tl.trans(key.to(S.DT).to(S.DOT)), input_precision="ieee") * scale
                score = tl.where(there[None, :], score, -float("inf"))
                highest = tl.maximum(top, tl.max(score, 1))
                weight = tl.exp(score - highest[:, None])
                kept = tl.exp(top - highest)
                value = tl.load(value_cache + at, mask=there[:, None], other=0.0)
                mixed = tl.dot(
                    weight.to(S.DT).to(S.DOT), value.to(S.DT).to(S.DOT), mixed * kept[:, None],
                    input_precision="ieee",
                )  # fmt: skip
                total = total * kept + tl.sum(weight, 1)
                top = highest

            real = (g < G)[:, None] & (column >= 0)[None, :]
            head = row * S.H + kv * G
            if used == 1:
                out = weighed(mixed / total[:, None], line, kv * G + g, g < G, S)
                tl.store(attended + (head + g)[:, None] * S.HD + column[None, :], out, mask=real)
            else:
                at = (head + g) * SPLITS + split
                tl.store(shares + at[:, None] * S.HD + column[None, :], mixed, mask=real)
                tl.store(maxima + at, top, mask=g < G)
                tl.store(sums + at, total, mask=g < G)
                tl.debug_barrier()
                before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                if before == used - 1:
                    put_together(line, kv * G, head, used, shares, maxima, sums, attended, S, SPLITS, LINES)
                    tl.store(arrived + pair, 0)


@triton.jit
def put_together(
    line, first, head, used, shares, maxima, sums, attended,
    S: tl.constexpr, SPLITS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """attended (H / KV, HD) of a group whose first head is `first` of its row and `head` of all, from its
    `used` shares; LINES heads at a time."""
    split, column = tl.arange(0, SPLITS), tl.arange(0, S.HD)
    for begin in range(0, S.H // S.KV, LINES):
        g = begin + tl.arange(0, LINES)
        real = g < S.H // S.KV
        here = real[:, None] & (split < used)[None, :]
        at = (head + g)[:, None] * SPLITS + split[None, :]
        top = tl.load(maxima + at, mask=here, other=-float("inf"), cache_modifier=".cg")
        total = tl.load(sums + at, mask=here, other=0.0, cache_modifier=".cg")
        mixed = tl.load(
            shares + at[:, :, None] * S.HD + column[None, None, :],
            mask=here[:, :, None] & (column >= 0)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Lines that no head belongs to are all -inf, and -inf less -inf is no number.
        highest = tl.where(real, tl.max(top, 1), 0.0)
        weight = tl.exp(top - highest[:, None])
        out = tl.sum(mixed * weight[:, :, None], 1) / tl.sum(total * weight, 1)[:, None]
        to = attended + (head + g)[:, None] * S.HD + column[None, :]
        tl.store(to, weighed(out, line, first + g, real, S), mask=real[:, None] & (column >= 0)[None, :])


@phase
def add_product(
    y, matrix, scale, bias, x, count,
    K: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr, ADDED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x (count, D) += y (count, K) times a matrix (D, K), or = where it is not ADDED."""
    first, programs, row = tl.program_id(0), tl.num_programs(0), row_numbers(S)
    rows = first * BN + tl.arange(0, BN)
    read = ahead(matrix, scale, bias, rows, rows < S.D, K, BK, S, BIAS)
    known = held(y, y, count, 0.0, K, BK, S, False)
    for _ in range(first, tl.cdiv(S.D, BN), programs):
        next_rows = rows + programs * BN
        next_read = ahead(matrix, scale, bias, next_rows, next_rows < S.D, K, BK, S, BIAS)
        at, inside = row * S.D + rows[:, None], (row < count) & (rows < S.D)[:, None]
        old = tl.zeros((1, 1), tl.float32)
        if ADDED:
            old = tl.load(x + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = product(read, matrix, rows, rows < S.D, known, y, y, count, K, BK, S, False)
        tl.store(x + at, (old + rounded(total, S)).to(S.DT), mask=inside)
        rows, read = next_rows, next_read


@phase
def gate_up(
    x, norm, gate, up, gate_scale, up_scale, gate_bias, up_bias, h, count, eps,
    F: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """h (count, F) = act(gate(normed x)) * up(normed x)."""
    first, programs, row = tl.program_id(0), tl.num_programs(0), row_numbers(S)
    rows = first * BN + tl.arange(0, BN)
    gates = ahead(gate, gate_scale, gate_bias, rows, rows < F, S.D, BK, S, S.MLP_BIAS)
    ups = ahead(up, up_scale, up_bias, rows, rows < F, S.D, BK, S, S.MLP_BIAS)
    known = held(x, norm, count, eps, S.D, BK, S, True)
    for _ in range(first, tl.cdiv(F, BN), programs):
        there, next_rows = rows < F, rows + programs * BN
        next_gates = ahead(gate, gate_scale, gate_bias, next_rows, next_rows < F, S.D, BK, S, S.MLP_BIAS)
        next_ups = ahead(up, up_scale, up_bias, next_rows, next_rows < F, S.D, BK, S, S.MLP_BIAS)
        left = rounded(product(gates, gate, rows, there, known, x, norm, count, S.D, BK, S, True), S)
        right = rounded(product(ups, up, rows, there, known, x, norm, count, S.D, BK, S, True), S)
        y = activated(left, S) * right
        tl.store(h + row * F + rows[:, None], y.to(S.DT), mask=(row < count) & there[:, None])
        rows, gates, ups = next_rows, next_gates, next_ups


@phase
def let_through(x, gate, scale, own, h, count, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """h (count, P) = act(gate(x)) * own, which is (count, P) of (count, LAYERS, P)."""
    first, programs, row = tl.program_id(0), tl.num_programs(0), row_numbers(S)
    rows = first * BN + tl.arange(0, BN)
    read = ahead(gate, scale, scale, rows, rows < S.P, S.D, BK, S, False)
    known = held(x, x, count, 0.0, S.D, BK, S, False)
    for _ in range(first, tl.cdiv(S.P, BN), programs):
        next_rows, inside = rows + programs * BN, (row < count) & (rows < S.P)[:, None]
        next_read = ahead(gate, scale, scale, next_rows, next_rows < S.P, S.D, BK, S, False)
        left = rounded(product(read, gate, rows, rows < S.P, known, x, x, count, S.D, BK, S, False), S)
        at = row * (S.LAYERS * S.P) + rows[:, None]
        right = tl.load(own + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(h + row * S.P + rows[:, None], (activated(left, S) * right).to(S.DT), mask=inside)
        rows, read = next_rows, next_read


@phase
def settle(y, norm, scalar, x, count, eps, S: tl.constexpr, SCALED: tl.constexpr, BK: tl.constexpr):
    """x (count, D) += the normed y, then times `scalar` if it is SCALED."""
    wait(S)
    columns = tl.arange(0, BK)[None, :]
    there = columns < S.D
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        at = row * S.D + columns
        made = tl.load(y + at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        old = tl.load(x + at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = rounded(old + rounded(gain(norm, columns, there, S) * normed(made, S.D, eps), S), S)
        if SCALED:
            total *= tl.load(scalar).to(tl.float32)
        tl.store(x + at, total.to(S.DT), mask=there)


@phase
def join(context, norm, each, count, factor, eps, S: tl.constexpr, BK: tl.constexpr):
    """each (count, LAYERS, P): what a token has of its own for each layer, of its embeddings there and of
    `context`, which has the same shape, times `factor` and normed."""
    wait(S)
    columns = tl.arange(0, BK)[None, :]
    there = columns < S.P
    for block in range(tl.program_id(0), count * S.LAYERS, tl.num_programs(0)):
        at = block * S.P + columns
        left = tl.load(context + at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        left = rounded(gain(norm, columns, there, S) * normed(rounded(left * factor, S), S.P, eps), S)
        right = tl.load(each + at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(each + at, (rounded(left + right, S) * 0.7071067811865476).to(S.DT), mask=there)


@triton.jit
def convolution(own, inputs, weight, place, ring, WIDTH: tl.constexpr, there, S: tl.constexpr):
    """(n,) float32: a number of each of some channels, and those before it in a cache of `ring` slots, WIDTH
    wide, weighed. `inputs` and `weight` point to the channels in slot 0 and in (WIDTH, TAPS)."""
    TAPS: tl.constexpr = S.TAPS
    total = rounded(own * tl.load(weight + TAPS - 1, mask=there, other=0.0).to(tl.float32), S)
    for back in tl.static_range(1, TAPS):
        before = place - back
        at = inputs + before % ring * WIDTH
        earlier = rounded(tl.load(at, mask=there & (before >= 0), other=0.0).to(tl.float32), S)
        tap = tl.load(weight + TAPS - 1 - back, mask=there, other=0.0).to(tl.float32)
        total = rounded(total + rounded(earlier * tap, S), S)
    return total


@phase
def convolve(
    gated, weight, bias, inputs, position, y, count, capacity, row_stride, S: tl.constexpr, BN: tl.constexpr
):
    """y (count, D): a short convolution between its gates, of gated (count, 3, D). Its input goes into the
    cache, `inputs` (B, 1, S, D), unless its position is past the capacity."""
    wait(S)
    for block in range(tl.program_id(0), count * tl.cdiv(S.D, BN), tl.num_programs(0)):
        row, column = block % count, block // count * BN + tl.arange(0, BN)
        here, place = column < S.D, tl.load(position + row)
        line = gated + row * (3 * S.D) + column
        gate = tl.load(line, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
        last_gate = tl.load(line + S.D, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
        value = tl.load(line + 2 * S.D, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
        own, slots = rounded(gate * value, S), inputs + row.to(tl.int64) * row_stride + column
        tl.store(slots + place * S.D, own.to(inputs.dtype.element_ty), mask=here & (place < capacity))
        total = convolution(own, slots, weight + column * S.TAPS, place, capacity, S.D, here, S)
        if S.CONV_BIAS:
            total = rounded(total + tl.load(bias + column, mask=here, other=0.0).to(tl.float32), S)
        tl.store(y + row * S.D + column, (last_gate * total).to(S.DT), mask=here)


@triton.jit
def channels_of(line, inputs, weight, first, n, WIDTH: tl.constexpr, slot, written, S: tl.constexpr, there):
    """(n,) float32: silu of the convolution over the channels first + n of a gated delta rule; its input goes
    into the cache where that is `written`."""
    ring: tl.constexpr = 2 * S.WINDOW
    column = first + n
    own = tl.load(line + column, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    total = convolution(own, inputs + column, weight + column * S.TAPS, slot, ring, WIDTH, there, S)
    tl.store(inputs + slot % ring * WIDTH + column, own, mask=there & written)
    return rounded(total * sigmoid(total), S)


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@phase
def delta(
    mixed, weight, dt_bias, A_log, norm, state, recent, inputs, position, outs, arrived, y,
    count, capacity, state_stride, recent_stride, inputs_stride, eps,
    S: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """y (count, E): a gated delta rule's next position in each row and head, normed and gated, from mixed
    (count, C + E + 2 heads): inputs of the convolution, gates, rates and decays.

    The matrix that a cache has of the window's first position is read once, and what was added since is put
    beside its products with key and query; it is folded into the next one at the window's last position
    (`models/gated_delta.py`). A block is BV columns of the matrix of one head in one row. The last one of a
    head to finish norms its result. A position past the capacity is not written.
    """
    KEYS: tl.constexpr = S.DELTA_KEYS * S.DK
    C: tl.constexpr = 2 * KEYS + S.E
    SPLITS: tl.constexpr = (S.DV + BV - 1) // BV
    ADDED: tl.constexpr = S.DK + S.DV + 1
    k, since = tl.arange(0, BK), tl.arange(0, S.WINDOW)
    wait(S)
    for block in range(tl.program_id(0), count * S.DELTA_VALUES * SPLITS, tl.num_programs(0)):
        split, pair = block // (count * S.DELTA_VALUES), block % (count * S.DELTA_VALUES)
        row, head = pair // S.DELTA_VALUES, pair % S.DELTA_VALUES
        slot = tl.load(position + row)
        window, place = slot // S.WINDOW, slot % S.WINDOW
        fits = slot < capacity
        v = split * BV + tl.arange(0, BV)
        in_k, in_v = k < S.DK, v < S.DV

        line = mixed + row * (C + S.E + 2 * S.DELTA_VALUES)
        kept = inputs + row.to(tl.int64) * inputs_stride
        EACH: tl.constexpr = S.DELTA_VALUES // S.DELTA_KEYS
        group = head // EACH * S.DK
        first = fits & (split == 0)
        shared = first & (head % EACH == 0)  # heads that share a key would write the same
        query = unit(channels_of(line, kept, weight, group, k, C, slot, shared, S, in_k))
        query *= 1.0 / tl.sqrt(S.DK * 1.0)
        key = unit(channels_of(line, kept, weight, KEYS + group, k, C, slot, shared, S, in_k))
        value = channels_of(line, kept, weight, 2 * KEYS + head * S.DV, v, C, slot, fits, S, in_v)
        numbers = line + C + S.E + head
        rate = rounded(sigmoid(tl.load(numbers, cache_modifier=".cg").to(tl.float32)), S)
        step = tl.load(numbers + S.DELTA_VALUES, cache_modifier=".cg").to(tl.float32)
        step += tl.load(dt_bias + head).to(tl.float32)
        # log(1 + e^step), exact for small powers, too
        power = tl.exp(step)
        over = 1.0 + power
        soft = tl.where(over == 1.0, power, tl.log(over) * (power / (over - 1.0)))
        decay = -tl.exp(tl.load(A_log + head).to(tl.float32)) * tl.where(step > 20.0, step, soft)

        # What the window's earlier positions added: (W, DK), (W, DV), (W,).
        ring = recent + row.to(tl.int64) * recent_stride + head * (2 * S.WINDOW * ADDED)
        entry = (ring + (window % 2 * S.WINDOW + since) * ADDED)[:, None]
        before = since < place
        keys = tl.load(entry + k[None, :], mask=before[:, None] & in_k[None, :], other=0.0)
        added = tl.load(entry + S.DK + v[None, :], mask=before[:, None] & in_v[None, :], other=0.0)
        decays = tl.load(ring + (window % 2 * S.WINDOW + since) * ADDED + S.DK + S.DV, mask=before, other=0.0)
        total = tl.sum(decays, 0)
        left, carried = tl.exp(total - tl.cumsum(decays, 0)), tl.exp(total)

        matrices = state + row.to(tl.int64) * state_stride + head * (2 * S.DK * S.DV)
        at = k[:, None] * S.DV + v[None, :]
        inside = in_k[:, None] & in_v[None, :]
        matrix = tl.load(matrices + window % 2 * (S.DK * S.DV) + at, mask=inside & (window > 0), other=0.0)
        of_key = left * tl.sum(keys * key[None, :], 1)
        of_query = left * tl.sum(keys * query[None, :], 1)
        of_key = carried * tl.sum(matrix * key[:, None], 0) + tl.sum(added * of_key[:, None], 0)
        of_query = carried * tl.sum(matrix * query[:, None], 0) + tl.sum(added * of_query[:, None], 0)
        fade = tl.exp(decay)
        new = rate * (value - fade * of_key)
        out = fade * of_query + tl.sum(query * key, 0) * new

        own = ring + slot % (2 * S.WINDOW) * ADDED
        tl.store(own + k, key, mask=in_k & first)
        tl.store(own + S.DK + v, new, mask=in_v & fits)
        tl.store(own + S.DK + S.DV, decay, mask=first)
        if (place == S.WINDOW - 1) & fits:
            sums = tl.dot(tl.trans(keys * left[:, None]), added, input_precision="ieee")
            folded = fade * (matrix * carried + sums) + key[:, None] * new[None, :]
            tl.store(matrices + (window + 1) % 2 * (S.DK * S.DV) + at, folded, mask=inside)

        tl.store(outs + pair * S.DV + v, out, mask=in_v)
        tl.debug_barrier()
        finished = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if finished == SPLITS - 1:
            tl.store(arrived + pair, 0)
            column = tl.arange(0, BK)
            there = column < S.DV
            out_ = tl.load(outs + pair * S.DV + column, mask=there, other=0.0, cache_modifier=".cg")
            normed = rounded(out_ * tl.rsqrt(tl.sum(out_ * out_, 0) / S.DV + eps), S)
            normed = rounded(tl.load(norm + column, mask=there, other=0.0).to(tl.float32) * normed, S)
            gate = tl.load(line + C + head * S.DV + column, mask=there, other=0.0, cache_modifier=".cg")
            gate = gate.to(tl.float32)
            tl.store(y + pair * S.DV + column, (normed * gate * sigmoid(gate)).to(S.DT), mask=there)
