#!/usr/bin/env python3
"""usage: config_verdicts_script_test.py SOURCE

How scripts/config_verdicts reads files as people write them.
"""
import importlib.util
import importlib.machinery
import sys

path = f"{sys.argv[1]}/scripts/config_verdicts"
loader = importlib.machinery.SourceFileLoader("config_verdicts", path)
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("config_verdicts", loader))
sys.dont_write_bytecode = True
loader.exec_module(script)

CASES = [
    ('{"a": "http://host/x", "b": 1}', {"a": "http://host/x", "b": 1}),
    ('{"a": "x#y", // why\n "b": "\\"//\\"", # more\n}', {"a": "x#y", "b": '"//"'}),
    ('"a": "1,]",\n"b": [1, 2,], /* {\n */', {"a": "1,]", "b": [1, 2]}),
    ('{"a": [1}', {}),
]
for text, expected in CASES:
    found = script.lenient(text)
    if found != expected:
        sys.exit(f"FAILED: {text!r}: expected {expected}, found {found}")
