"""Reference curves for tests/parity: plain torch, one process, the whole global batch in one forward.

  python tests/parity/reference.py            rewrites tests/parity/reference.json (needs torch and numpy)

A job of W ranks with micro-batch B and gradient accumulation G reads, in step s, the W*B*G sequences that start at
(s*W*B*G + i)*T: the reference depends on the product alone. Every case is 50 steps of AdamW (torch.optim.AdamW, not fused)
on the tiny GPT with the initial weights of gpt.py; `loss` is the mean over the global batch before the step and `grad_norm`
the norm before clipping to 1.0.

torch_curve.cc is the same loop in C++, and is compared with these curves; jobs of gpt are compared with torch_curve.cc on
their own machine, because kernels of another CPU round otherwise.
"""
import json
import os

import torch
from gpt import batch, build, cfg_of, tokens, weights_sha256

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, LR, BETAS, EPS, DECAY, CLIP = 50, 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0
GLOBAL_BATCHES = [1, 2, 3, 4, 6, 8, 16]


def curve(global_batch, half=None, loss_scale=1.0, tied=False, frozen=False):
    config = cfg_of("tiny", tied)
    model, text = build(config), tokens()
    if frozen:  # both embeddings, and with them a tied head
        model.wte.requires_grad_(False)
        model.wpe.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    master = list(model.parameters())
    if half:  # model and activations in 16 bits; float32 master weights, moments and gradient
        master = [torch.nn.Parameter(p.detach().clone()) for p in master]
        model = model.to(half)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(master, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(*batch(text, step, 0, 1, global_batch, config.T))
        (loss * loss_scale).backward()
        if half:
            for q, p in zip(master, parameters):
                q.grad = p.grad.float() / loss_scale
                p.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(master, CLIP).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if half:
            with torch.no_grad():
                for q, p in zip(master, parameters):
                    p.copy_(q)
    final = {name: p.detach().double().norm().item() for name, p in zip(names, master)}
    return {"loss": losses, "grad_norm": norms, "final_parameter_norm": final}


def main():
    torch.manual_seed(0)
    out = {
        "torch": torch.__version__.split("+")[0],
        "setup": {"steps": STEPS, "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "clip": CLIP, "size": "tiny"},
        "init_sha256": {"tiny": weights_sha256(cfg_of("tiny")), "tiny_tied": weights_sha256(cfg_of("tiny", True)),
                        "small": weights_sha256(cfg_of("small"))},
        "curves": {},
    }
    for size in GLOBAL_BATCHES:
        out["curves"][f"fp32_batch{size}"] = curve(size)
        print(size, out["curves"][f"fp32_batch{size}"]["loss"][-1], flush=True)
    for size in (2, 4, 16):
        out["curves"][f"bf16_batch{size}"] = curve(size, half=torch.bfloat16)
    out["curves"]["fp16_batch2"] = curve(2, half=torch.float16, loss_scale=256.0)
    out["curves"]["fp32_tied_batch2"] = curve(2, tied=True)
    out["curves"]["fp32_tied_batch4"] = curve(4, tied=True)
    out["curves"]["fp32_frozen_batch4"] = curve(4, frozen=True)
    out["curves"]["fp32_tied_frozen_batch4"] = curve(4, tied=True, frozen=True)
    with open(os.path.join(HERE, "reference.json"), "w") as f:
        json.dump(out, f, indent=0, allow_nan=False)
        f.write("\n")


if __name__ == "__main__":
    main()
