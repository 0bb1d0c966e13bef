#!/bin/sh
# The first thing that a SLURM job does: sh begin.sh PYTHON SPEC LEDGER
# Where PYTHON does not start, it can't say so itself: this notes the node, and lets the job go to another one.
# With PYTHON alone it only says this node's name where that does not start, for jobs of several nodes.
MOST=3 # nodes that a job tries: what so many lack is not a fault of theirs

starts() { "$1" -c "import msgspec, submitit, yaml"; }

python=$1 spec=$2 ledger=$3
node=${SLURMD_NODENAME:-$(uname -n)}
if [ $# = 1 ]; then
    starts "$python" >/dev/null 2>&1 || echo "$node"
    exit 0
fi
# Python takes modules from this folder before all others, and bytecode before their text. So what is no part of the code
# is removed before Python starts.
[ ! -f code.json ] || find . -name __pycache__ -prune -exec rm -rf {} +
[ ! -f code.json ] || for entry in *; do
    [ "$entry" = code.json ] || grep -qF -e "\"$entry/" -e "\"$entry\"" code.json || {
        echo "removed $entry from $PWD, for it is no part of the code" >&2
        rm -rf -- "./$entry"
    }
done
"$python" -u -m experiments.launch.job_hooks begin "$spec" && exit 0
starts "$python" && exit 1 # the hook has said why

job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
as_json=$(printf '%s' "$python" | sed 's/[\\"]/\\&/g')
echo "$node can't start $python" >&2
if [ -L "$ledger" ] || { [ -e "$ledger" ] && [ ! -f "$ledger" ]; }; then
    echo "this is not noted: $ledger is a link or no file; remove it" >&2
    tried=$((${SLURM_RESTART_COUNT:-0} + 1))
else
    printf '{"node": "%s", "job": "%s", "at": "%s", "python": "%s"}\n' \
        "$node" "$job" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$as_json" >>"$ledger"
    tried=$(grep -F "\"job\": \"$job\"" "$ledger" | grep -cF "\"python\": \"$as_json\"")
fi
[ "$tried" -lt $MOST ] || exit 1

# SLURM changes the nodes of waiting jobs only, which this one is from its requeueing on, and ends this script then.
trap '' TERM
before=$(squeue --all --noheader --jobs="$job" --format=%x)
case $before in "" | "(null)") before= ;; *) before=,$before ;; esac
echo "asking for other nodes"
scontrol requeue "$job" && scontrol update JobId="$job" ExcNodeList="$node$before"
exit 1
