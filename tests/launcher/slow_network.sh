#!/usr/bin/env bash
# usage: slow_network.sh BUILD SCRATCH SOURCE
# scripts/slow_network with two nodes: a GPT trains as on one machine, bytes are counted, exit codes come through, and
# nothing is left after a failure or kill -9. Fails where namespaces are not allowed.
set -euo pipefail
build=$1 scratch=$2 source=$3
slow_network=("$source/scripts/slow_network" --ds_launch "$build/bin/ds-launch")
rm -rf "$scratch" && mkdir -p "$scratch" && cd "$scratch"
export OMP_NUM_THREADS=1

fail() {
  echo "FAILED: $1" >&2
  cat ./*.log >&2
  exit 1
}

# The network namespaces that processes of the machine are in.
namespaces() { readlink /proc/[0-9]*/ns/net 2>/dev/null || true; }

await_end_of_namespaces() { # FILE with lines that end in net:[...]
  local name
  for name in $(grep -o 'net:\[[0-9]*\]' "$1"); do
    for _ in $(seq 100); do
      namespaces | grep -qF "$name" || continue 2
      sleep 0.1
    done
    fail "the network namespace $name is still there"
  done
}

gpt=("$build/bin/gpt" --deepspeed_config "$source/configs/zero2.json" --data "$source/tests/parity/data/kjv_1m.bin"
     --layers 1 --hidden 32 --seq_len 32 --steps 3 --generate 0)
"${slow_network[@]}" --nodes 1 --procs_per_node 2 -- "${gpt[@]}" --metrics local.jsonl >local.log 2>&1 ||
  fail "the job on one node: exit code $?"
grep -q '^\[node0\].*all 2 ranks on one host' local.log || fail "the ranks of a node do not share it"
"${slow_network[@]}" --nodes 2 --report report.json -- "${gpt[@]}" --metrics nodes.jsonl >nodes.log 2>&1 ||
  fail "the job on two nodes: exit code $?"
grep -q '^\[node0\].*2 ranks on 2 hosts' nodes.log || fail "the ranks do not take the nodes for two hosts"
python3 - <<'PYTHON' 2>check.log || fail "bytes or losses"
import json
local, nodes = ([json.loads(line) for line in open(f)] for f in ("local.jsonl", "nodes.jsonl"))
steps = len(nodes) - 1
assert steps == 3, nodes
for a, b in zip(local[:-1], nodes[:-1]):
    assert abs(a["loss"] - b["loss"]) < 1e-6, (a, b)
report = json.load(open("report.json"))
first, second = report["node"]
assert report["exit_code"] == first["exit_code"] == second["exit_code"] == 0, report
assert [first["address"], second["address"]] == ["10.77.0.1", "10.77.0.2"], report
# Stage 2 on two ranks: half the gradients go out, then half the parameters. At the start node0 sends the parameters.
size = 4 * nodes[-1]["summary"]["parameters"]
for node, start in ((first, size), (second, 0)):
    extra = node["sent_payload_bytes"] - steps * size - start
    assert 0 <= extra < 65536, (extra, size, report)
assert first["sent_bytes"] == second["received_bytes"] and second["sent_bytes"] == first["received_bytes"], report
PYTHON

"${slow_network[@]}" --nodes 2 --procs_per_node 2 --rate 8mbit -- sh -c \
  'name="$(hostname)$(ls /dev/shm)"
   echo "$RANK $LOCAL_RANK $WORLD_SIZE $CROSS_RANK $CROSS_SIZE $name $(readlink /proc/self/ns/net)"
   PATH=$PATH:/usr/sbin tc qdisc show dev net0' >ranks.log 2>&1 || fail "four ranks: exit code $?"
for line in '0 0 4 0 2 node0 net:' '1 1 4 0 2 node0 net:' '2 0 4 1 2 node1 net:' '3 1 4 1 2 node1 net:'; do
  grep -qF "$line" ranks.log || fail "no rank says '$line'"
done
[ "$(grep -c 'tbf.* rate 8Mbit' ranks.log)" = 4 ] || fail "the rate is not that of --rate"
[ "$(grep -o 'net:\[[0-9]*\]' ranks.log | sort -u | wc -l)" = 2 ] || fail "not two network namespaces"
grep -qF "$(readlink /proc/self/ns/net)" ranks.log && fail "a node is in the machine's network namespace"
await_end_of_namespaces ranks.log

code=0
"${slow_network[@]}" --nodes 2 -- sh -c 'readlink /proc/self/ns/net; [ "$RANK" = 1 ] && exit 7; sleep 100' \
  >failing.log 2>&1 || code=$?
[ $code = 7 ] || fail "expected the failing rank's exit code 7, found $code"
grep -q 'node1 failed with exit code 7' failing.log || fail "the node that failed is not named"
await_end_of_namespaces failing.log

"${slow_network[@]}" --nodes 2 -- sh -c 'readlink /proc/self/ns/net; sleep 100' >killed.log 2>&1 &
job=$!
for _ in $(seq 300); do
  [ "$(grep -c 'net:' killed.log || true)" = 2 ] && break
  sleep 0.1
done
kill -KILL $job
wait $job 2>>killed.log && fail "a killed job ended with 0"
[ "$(grep -c 'net:' killed.log)" = 2 ] || fail "the nodes did not start"
await_end_of_namespaces killed.log

code=0
"${slow_network[@]}" --nodes 2 --rate fast -- true >flags.log 2>&1 || code=$?
[ $code = 2 ] && grep -q 'expected a number with kbit' flags.log || fail "a wrong rate is not refused: exit code $code"
