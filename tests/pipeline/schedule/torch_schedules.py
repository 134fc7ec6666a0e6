#!/usr/bin/env python3
"""Makes torch_schedules.csv: the order in which torch.distributed.pipelining runs its schedules.

    python torch_schedules.py      (torch 2.11)

1f1b is not among them: torch runs it without such a list, and the one that Schedule1F1B can make for show leaves out the
last rank's first forward. For each schedule a line "# kind ranks chunks micro_batches", then its CSV, as torch writes it: a line for each rank.
"""
import pathlib
import types

from torch.distributed.pipelining import schedules

KINDS = {
    "gpipe": (schedules.ScheduleGPipe, [(1, 1, 3), (4, 1, 8), (5, 1, 3)]),
    # torch wants equal groups of at least as many micro-batches as ranks, or a single one.
    "interleaved": (schedules.ScheduleInterleaved1F1B,
                    [(4, 2, 8), (4, 3, 4), (3, 2, 8), (4, 2, 10), (2, 4, 6), (4, 2, 3), (1, 2, 2), (5, 2, 12)]),
    "zbv": (schedules.ScheduleZBVZeroBubble, [(1, 2, 1), (2, 2, 3), (4, 2, 8), (4, 2, 12), (4, 2, 5), (3, 2, 1)]),
    "dualpipev": (schedules.ScheduleDualPipeV, [(1, 2, 2), (2, 2, 4), (4, 2, 8), (4, 2, 11), (5, 2, 17)]),
}


def order_of(cls, ranks, chunks, micro_batches):
    """The pipeline_order of a schedule, without processes, devices or modules."""
    schedule = cls.__new__(cls)
    schedule.pp_group_size = ranks
    schedule._num_stages = schedule.num_stages = ranks * chunks
    schedule.n_local_stages = chunks
    schedule._n_microbatches = micro_batches
    if cls is schedules.ScheduleInterleaved1F1B:
        schedule.number_of_rounds = max(1, micro_batches // ranks)
        schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
        assert micro_batches % schedule.number_of_rounds == 0
    if issubclass(cls, schedules.PipelineScheduleSingle):
        schedule._stage = types.SimpleNamespace(group_size=ranks, is_first=True)
        return schedule._get_pipeline_order()
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


def is_work(action):
    """Computing, or idle time; REDUCE_GRAD is left out."""
    return action is None or action.is_compute_op


def main():
    lines = []
    for name, (cls, shapes) in KINDS.items():
        for shape in shapes:
            lines.append("# " + " ".join(str(part) for part in (name, *shape)))
            order = order_of(cls, *shape)
            for rank in range(shape[0]):
                cells = ["" if action is None else str(action) for action in order[rank] if is_work(action)]
                lines.append(",".join(cells))
    pathlib.Path(__file__).with_suffix(".csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
