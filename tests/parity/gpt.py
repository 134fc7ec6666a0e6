"""Decoder-only GPT in plain torch plus everything needed to rebuild the same run elsewhere.

Model      pre-LayerNorm (eps 1e-5), GELU (exact, erf) MLP of 4x, learned positions, causal
           scaled_dot_product_attention (scale 1/sqrt(head_dim)), no dropout, biases on every
           Linear but the head; the head is untied (own weight) or tied to the token embedding.
Init       counter based, so any language can rebuild every bit (see init_tensor).
Data       byte tokens; batch b of micro-step s on rank r of W starts at
           (((s*W+r)*B+b)*T) mod (len-T-1); input tok[o:o+T], target tok[o+1:o+T+1].
           s counts micro-batches: s = step*gas + micro.
Loss       mean cross entropy over all B*T positions (float32 logits).
"""
import dataclasses
import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(HERE, "data", "kjv_1m.bin")  # first MiB of the King James text (public domain)


@dataclasses.dataclass
class Cfg:
    layers: int
    d: int
    heads: int
    T: int
    vocab: int = 256
    tied: bool = False


SIZES = {
    "tiny": Cfg(layers=4, d=128, heads=4, T=128),
    "small": Cfg(layers=6, d=512, heads=8, T=256),
}


def cfg_of(size, tied=False):
    return dataclasses.replace(SIZES[size], tied=tied)


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.hd = c.heads, c.d // c.heads
        self.qkv = nn.Linear(c.d, 3 * c.d)
        self.proj = nn.Linear(c.d, c.d)

    def forward(self, x):
        B, T, d = x.shape
        # rows of qkv.weight: [0,d) query, [d,2d) key, [2d,3d) value; heads contiguous inside each
        q, k, v = (t.view(B, T, self.h, self.hd).transpose(1, 2) for t in self.qkv(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, d))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc = nn.Linear(c.d, 4 * c.d)
        self.proj = nn.Linear(4 * c.d, c.d)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1 = nn.LayerNorm(c.d)
        self.attn = Attn(c)
        self.ln2 = nn.LayerNorm(c.d)
        self.mlp = Mlp(c)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wte = nn.Embedding(c.vocab, c.d)
        self.wpe = nn.Embedding(c.T, c.d)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.d)
        self.head = nn.Linear(c.d, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.wte.weight

    def logits(self, x):
        z = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for b in self.h:
            z = b(z)
        return self.head(self.ln_f(z))

    def forward(self, x, y):
        return loss_of(self.logits(x), y)


def loss_of(logits, y):
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.reshape(-1))


# ---------------------------------------------------------------- deterministic weights
def splitmix64(z):
    """One SplitMix64 output for each 64-bit state in z (uint64, wrapping)."""
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def init_tensor(index, shape, std, seed=1234):
    """Element j (row major) of parameter number `index` (order of param_specs):
         u = splitmix64(seed*2^48 + index*2^32 + j) >> 40             24 bits
         x = float32(2*u - 2^24) * 2^-24                              exact, in [-1, 1)
         w = x * float32(sqrt(3)*std)                                 one float32 rounding
    which is uniform with the asked standard deviation."""
    n = int(np.prod(shape))
    base = (seed << 48) + (index << 32)
    u = splitmix64(np.arange(n, dtype=np.uint64) + np.uint64(base)) >> np.uint64(40)
    x = (2 * u.astype(np.int64) - (1 << 24)).astype(np.float32) * np.float32(2.0 ** -24)
    return (x * np.float32(math.sqrt(3.0) * std)).reshape(shape)


def param_specs(c):
    """Ordered (name, shape, kind); kind is a std, or 'one' / 'zero'. The order is the parameter order."""
    std, res = 0.02, 0.02 / math.sqrt(2 * c.layers)
    out = [("wte.weight", (c.vocab, c.d), std), ("wpe.weight", (c.T, c.d), std)]
    for i in range(c.layers):
        p = f"h.{i}."
        out += [(p + "ln1.weight", (c.d,), "one"), (p + "ln1.bias", (c.d,), "zero"),
                (p + "attn.qkv.weight", (3 * c.d, c.d), std), (p + "attn.qkv.bias", (3 * c.d,), "zero"),
                (p + "attn.proj.weight", (c.d, c.d), res), (p + "attn.proj.bias", (c.d,), "zero"),
                (p + "ln2.weight", (c.d,), "one"), (p + "ln2.bias", (c.d,), "zero"),
                (p + "mlp.fc.weight", (4 * c.d, c.d), std), (p + "mlp.fc.bias", (4 * c.d,), "zero"),
                (p + "mlp.proj.weight", (c.d, 4 * c.d), res), (p + "mlp.proj.bias", (c.d,), "zero")]
    out += [("ln_f.weight", (c.d,), "one"), ("ln_f.bias", (c.d,), "zero")]
    if not c.tied:
        out.append(("head.weight", (c.vocab, c.d), std))
    return out


def weights(c, seed=1234):
    w = {}
    for i, (name, shape, kind) in enumerate(param_specs(c)):
        if kind == "one":
            a = np.ones(shape, np.float32)
        elif kind == "zero":
            a = np.zeros(shape, np.float32)
        else:
            a = init_tensor(i, shape, kind, seed)
        w[name] = a
    return w


def build(c, seed=1234):
    m = GPT(c)
    named = dict(m.named_parameters())
    w = weights(c, seed)
    assert list(named) == list(w), "parameter order differs from param_specs"
    with torch.no_grad():
        for k, a in w.items():
            named[k].copy_(torch.from_numpy(a))
    return m


def weights_sha256(c, seed=1234):
    import hashlib
    h = hashlib.sha256()
    for a in weights(c, seed).values():
        h.update(a.astype("<f4").tobytes())
    return h.hexdigest()


# ---------------------------------------------------------------- data
def tokens(path=TEXT):
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8).astype(np.int64))


def offset(s, r, b, W, B, T, n):
    return (((s * W + r) * B + b) * T) % (n - T - 1)


def batch(tok, s, r, W, B, T):
    n = tok.numel()
    o = [offset(s, r, b, W, B, T, n) for b in range(B)]
    x = torch.stack([tok[i:i + T] for i in o])
    y = torch.stack([tok[i + 1:i + T + 1] for i in o])
    return x, y


def n_params(c):
    return sum(int(np.prod(s)) for _, s, _ in param_specs(c))


if __name__ == "__main__":
    for size in SIZES:
        for tied in (False, True):
            c = cfg_of(size, tied)
            print(size, "tied" if tied else "untied", n_params(c), "params, sha256 of all weights", weights_sha256(c))
