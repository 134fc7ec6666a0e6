"""The table of docs/gpu_measurements.md, from what was measured."""


def table_beside_torch(rows):
    """Markdown: each program's step of each model, and how many times as long as dsengine's of the same run it takes."""
    lines = ["| model | program | step | of dsengine's | tokens/s | MFU | memory |", "|---|---|---|---|---|---|---|"]
    own = {row["model"]: row["step_seconds"] for row in rows if row["program"] == "dsengine"}
    for row in rows:
        share = row.get("model_flops_utilization")
        ratio = f"{row['step_seconds'] / own[row['model']]:.2f}" if row["model"] in own else ""
        lines.append(f"| {row['model']} | {row['program']} | {row['step_seconds'] * 1e3:.1f} ms | {ratio} | "
                     f"{row['tokens_per_second']:.0f} | {f'{share:.3f}' if share else ''} | "
                     f"{row['device_peak_allocated_bytes'] / 1e9:.1f} GB |")
    return "\n".join(lines) + "\n"
