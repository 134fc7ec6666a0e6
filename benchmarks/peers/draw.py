"""Speed, memory and start of the cases that compare.py has measured, as one picture.

  scripts/draw_comparison RESULTS.json PICTURE.svg

Colours suit light and dark pages. Nothing is drawn that does not stand in the results file.
"""
import html
import json
import sys

NAMES = {"ddp": "torch DDP", "fsdp2": "torch FSDP2", "ds": "DeepSpeed stage ", "ours": "dsengine stage "}
PEER, OURS = "#8a8f98", "#2f86d6"
LABELS, PANEL, GAP, ROW, BAR, TOP, BOTTOM = 170, 180, 60, 24, 15, 56, 34

STYLE = """<style>
text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold } .small { font-size: 11px; fill: #777 }
.axis { stroke: #888 } @media (prefers-color-scheme: dark) { text { fill: #ddd } .small { fill: #aaa } }
</style>"""


def name_of(case):
    for prefix, name in NAMES.items():
        if case == prefix:
            return name
        if case.startswith(prefix) and case[len(prefix):][:1].isdigit():
            stage = case[len(prefix):]
            return name + stage.removesuffix("offload") + (", offload" if stage.endswith("offload") else "")
    sys.exit(f"draw_comparison: expected cases of compare.py, found {case!r}")


def panels(cases):
    """Title, what is better, and of each case a value and how it is written."""
    ddp = cases["ddp"]["step_seconds"]
    speed = {c: ddp / f["step_seconds"] for c, f in cases.items()}
    return [("speed, DDP = 1", "longer is better", speed, "{:.2f}"),
            ("memory of a rank, GiB", "shorter is better", {c: f["peak_gib"] for c, f in cases.items()}, "{:.2f}"),
            ("launch to first step, s", "shorter is better", {c: f["start_seconds"] for c, f in cases.items()}, "{:.1f}")]


def panel(left, title, better, values, form):
    largest = max(values.values())
    lines = [f'<text class="title" x="{left}" y="20">{title}</text>', f'<text class="small" x="{left}" y="38">{better}</text>']
    for row, (case, value) in enumerate(values.items()):
        y = TOP + row * ROW
        width = PANEL * value / largest
        colour = OURS if case.startswith("ours") else PEER
        lines.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        lines.append(f'<text x="{left + width + 5:.1f}" y="{y + 12}">{form.format(value)}</text>')
    lines.append(f'<path class="axis" d="M{left} {TOP - 4}v{len(values) * ROW}"/>')
    return lines


def picture(results):
    cases = results["cases"]
    lines = [f'<text x="{LABELS - 10}" y="{TOP + row * ROW + 12}" text-anchor="end">{name_of(case)}</text>'
             for row, case in enumerate(cases)]
    drawn = panels(cases)
    for number, of_panel in enumerate(drawn):
        lines += panel(LABELS + number * (PANEL + GAP), *of_panel)
    width, height = LABELS + len(drawn) * (PANEL + GAP), TOP + len(cases) * ROW + BOTTOM
    what = (f'{results["model"]}, {results["ranks"]} ranks x 1 thread, {results["rounds"]} rounds of {results["steps"]} steps, '
            f'medians; {results["machine"]}, {results["date"]}; scripts/compare_peers')
    lines.append(f'<text class="small" x="10" y="{height - 10}">{html.escape(what)}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
            f'{STYLE}\n' + "\n".join(lines) + "\n</svg>\n")


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: draw_comparison RESULTS.json PICTURE.svg")
    with open(sys.argv[1], encoding="utf-8") as f:
        results = json.load(f)
    if "cases" not in results or "ddp" not in results["cases"]:
        sys.exit(f"draw_comparison: expected what scripts/compare_peers --json writes, found other content in {sys.argv[1]}")
    with open(sys.argv[2], "w", encoding="utf-8") as f:
        f.write(picture(results))


if __name__ == "__main__":
    main()
