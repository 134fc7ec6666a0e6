#!/usr/bin/env python3
"""scripts/long_checks: whose turn it is, and that none is left out three times running.

  long_checks_test.py SOURCE-FOLDER
"""
import importlib.machinery
import importlib.util
import itertools
import pathlib
import sys


def load(path):
    loader = importlib.machinery.SourceFileLoader("long_checks", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("long_checks", loader))
    sys.modules["long_checks"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def expect(condition, what):
    if not condition:
        sys.exit(f"FAILED: {what}")


def main():
    checks = load(pathlib.Path(sys.argv[1]) / "scripts" / "long_checks")
    address, thread, grid = checks.MINUTES

    never = checks.records_of("# A page without the table\n")
    expect(all(record.date == checks.NEVER for record in never.values()), "a page without the table: nothing has run")
    expect(checks.order_of(never, ["comm/a.cc"])[0] == address, "what changed comes first")
    expect(checks.order_of(never, ["launcher/a.cc"])[0] in (address, grid), "the launcher has no test under ThreadSanitizer")
    expect(checks.order_of(never, ["docs/a.md"]) == [address, thread, grid], "without a subject they come in their order")

    ran = checks.after(never, {address: "green in 3 minutes"}, "2026-01-02", "abc")
    expect(ran[address] == checks.Record("2026-01-02", "abc", "green in 3 minutes", 0), "a run is recorded")
    expect([ran[thread].left_out, ran[grid].left_out] == [1, 1], "the others are counted as left out")
    page = "\n".join(["# Status", "", checks.HEADING, "", *checks.table_of(ran), "", "text"])
    expect(checks.records_of(page) == ran, "the table is read as it is written")
    expect(checks.order_of(ran, ["zero/a.cc"])[0] == thread, "of two that are concerned the one that ran longer ago")

    # Whatever changes, none is left out three times running.
    for changes in itertools.product([["comm/a.cc"], ["launcher/a.cc"], ["config/a.cc"], ["docs/a.md"]], repeat=6):
        records = never
        for day, changed in enumerate(changes, 1):
            turn = checks.order_of(records, changed)[0]
            records = checks.after(records, {turn: "green"}, f"2026-01-{day:02}", "abc")
            expect(all(record.left_out <= checks.MOST_LEFT_OUT for record in records.values()), f"left out too often: {changes}")

    expect(checks.thread_tests(["comm/flight/a.cc"]) == ["comm_test", "comm_flight_test"], "a room belongs to its folder too")
    expect(checks.thread_tests(["tests/parallel/a.cc"]) == ["parallel_test"], "a test belongs to its folder")
    expect(len(checks.thread_tests([])) == checks.MOST_THREAD_TESTS, "some run though nothing is concerned")
    expect(checks.run(["sleep", "20"], {}, 0.2) is None, "a turn ends with its limit")
    expect(checks.run(["sh", "-c", "exit $CODE"], {"CODE": "3"}, 20) == 3, "a finding is told")
    print("ok")


if __name__ == "__main__":
    main()
