#!/bin/sh
# Two hosts on one machine: network namespaces with a cable between them, and one layout over both, under torchrun.
#
# Shards are within a host and stages across, tp2.pp2. On real hosts each runs its own line of torchrun, with the same
# secret. Needs root, for the namespaces, and iproute2; nothing of them is left afterwards.
#
#     examples/many_hosts.sh [MODEL]
set -eu

model=${1:-smollm2}
one=sw$$a
two=sw$$b
SHARDWISE_SECRET_FILE=$(mktemp) # which only its owner can read
export SHARDWISE_SECRET_FILE
python3 -c 'import secrets; print(secrets.token_hex(32))' >"$SHARDWISE_SECRET_FILE"

leave() {
    for host in "$one" "$two"; do
        ip netns pids "$host" | xargs -r kill -9 2>/dev/null || true
        ip netns del "$host" || true
    done
    rm -f "$SHARDWISE_SECRET_FILE"
}
trap leave EXIT
trap 'exit 130' INT TERM

ip netns add "$one"
ip netns add "$two"
ip link add cable netns "$one" type veth peer name cable netns "$two"
ip -n "$one" addr add 10.77.0.1/24 dev cable
ip -n "$two" addr add 10.77.0.2/24 dev cable
for host in "$one" "$two"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set cable up
done

on() { # HOST ITS-NUMBER: the same command on each
    ip netns exec "$1" torchrun --nnodes=2 --nproc-per-node=2 --node-rank="$2" \
        --master-addr=10.77.0.1 --master-port=29500 \
        -m shardwise generate --model "$model" --max-tokens 24 "The lighthouse keeper"
}

on "$two" 1 &
other=$!
on "$one" 0 & # else a signal would have to wait for it
wait $!
wait $other
