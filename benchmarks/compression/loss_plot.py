"""Loss curves as SVG: one panel for each dense optimizer, with those that stand in for it. Colours suit light and dark
pages."""

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 440, 300, 50, 34, 40, 10
COLOURS = ("#7f7f7f", "#e0662c", "#2f86d6")
SMOOTHED = 15  # steps of a running mean

STYLE = """<style>
text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold } .axis { stroke: #888; fill: none }
.grid { stroke: #8884 } .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""


def smoothed(curves):
    """The mean over seeds, then over the last SMOOTHED steps."""
    mean = [sum(values) / len(values) for values in zip(*curves)]
    return [sum(mean[max(0, i + 1 - SMOOTHED):i + 1]) / min(i + 1, SMOOTHED) for i in range(len(mean))]


def panel(left, title, runs):
    steps = len(runs[0]["curves"][0])
    curves = [smoothed(run["curves"]) for run in runs]
    low = min(map(min, curves)) // 0.5 * 0.5
    high = low + 2.0  # the start, from 5.5 down, is alike
    right, bottom = left + WIDTH - LEFT, HEIGHT - BOTTOM

    def x(step):
        return left + (right - left) * step / steps

    def y(loss):
        return bottom - (bottom - TOP) * (loss - low) / (high - low)

    lines = [f'<text class="title" x="{left}" y="18">{title}</text>']
    for tick in range(5):
        loss = low + (high - low) * tick / 4
        lines.append(f'<path class="grid" d="M{left} {y(loss):.1f}H{right}"/>')
        lines.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
        step = steps * tick // 4
        lines.append(f'<text x="{x(step):.1f}" y="{bottom + 16}" text-anchor="middle">{step}</text>')
    lines.append(f'<path class="axis" d="M{left} {TOP}V{bottom}H{right}"/>')
    lines.append(f'<text x="{(left + right) / 2}" y="{bottom + 32}" text-anchor="middle">optimizer step</text>')
    for number, (run, curve) in enumerate(zip(runs, curves)):
        colour = COLOURS[number % len(COLOURS)]
        first = next((i for i, loss in enumerate(curve) if loss <= high), 0)
        points = " ".join(f"{x(i + 1):.1f},{y(loss):.1f}" for i, loss in enumerate(curve) if i >= first)
        lines.append(f'<polyline class="curve" stroke="{colour}" points="{points}"/>')
        height = TOP + 14 + 18 * number
        lines.append(f'<path class="curve" stroke="{colour}" d="M{right - 170} {height - 4}h22"/>')
        lines.append(f'<text x="{right - 142}" y="{height}">{run["optimizer"]} {run["loss"]:.3f}</text>')
        frozen = run["params"].get("freeze_step", run["params"].get("var_freeze_step"))
        if frozen and number == 1:
            lines.append(f'<path class="axis" stroke-dasharray="3 3" d="M{x(frozen):.1f} {TOP}V{bottom}"/>')
            lines.append(f'<text x="{x(frozen) + 4:.1f}" y="{bottom - 6}">variance frozen</text>')
    return lines


def write_plot(path, results):
    """results: what convergence.py found, by optimizer."""
    groups = {}
    for run in results.values():
        groups.setdefault(run["dense"], []).append(run)
    lines = []
    for number, (dense, runs) in enumerate(groups.items()):
        lines += panel(LEFT + number * (WIDTH + GAP), f"Training loss, {dense} and its 1-bit forms", runs)
    width = len(groups) * (WIDTH + GAP) + GAP
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
                   f'height="{HEIGHT}">\n{STYLE}\n' + "\n".join(lines) + "\n</svg>\n")
