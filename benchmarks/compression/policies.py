"""When the 1-bit optimizers stop what, as shares of a run, so that short and long runs can be compared.

OneBitAdam               the variance is frozen after 15 %, beyond the warm-up of the learning rate; the papers take 15
                         to 25 %
OneBitLamb               after 20 %: at 15 % it ends above Lamb (docs/compression.md)
ZeroOneAdam              the paper's BERT runs of about 120,000 steps freeze after 23,000, double the distance of
                         variance steps after 16 of them, and that of meetings every 32,678 steps, up to 16. Variance
                         steps grow with the logarithm of a run only, so a short run takes fewer at each distance to
                         send the same share of dense gradients; the others are about the same shares of a run
"""

FREEZE = {"OneBitAdam": 0.15, "OneBitLamb": 0.2, "ZeroOneAdam": 0.15}


def policy(optimizer, steps, freeze=None):
    """Keys of optimizer.params; `freeze`: another share of the steps. A dense optimizer has none."""
    if optimizer not in FREEZE:
        return {}
    frozen = round((freeze or FREEZE[optimizer]) * steps)
    if optimizer != "ZeroOneAdam":
        return {"freeze_step": frozen}
    return {"var_freeze_step": frozen, "var_update_scaler": min(max(steps // 250, 1), 16),
            "local_step_scaler": round(0.28 * steps), "local_step_clipper": 16}
