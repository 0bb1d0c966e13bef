# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts that source this file use these variables
# Sourced by up, down and node: paths, and functions that find, start, await and stop a daemon.
set -euo pipefail
umask 022

HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
NODES=(n1 n2 n3 n4)
DEADLINE_SECONDS=60 # for each condition that is awaited; most take less than a second
PATH=$PATH:/usr/sbin:/sbin
UNPACKED=${XDG_CACHE_HOME:-$HOME/.cache}/sparsify/slurm

die() {
    echo "slurm/devcluster: $*" >&2
    exit 2
}

# The newest SLURM that install --newer has unpacked.
newest() {
    [ ! -d "$UNPACKED" ] || find "$UNPACKED" -mindepth 1 -maxdepth 1 | sort -V | tail -n 1
}

# The SLURM of this machine, or a newer one beside it: each has programs, ports and a state of its own.
case ${SPARSIFY_SLURM:=system} in
system) PROGRAMS='' PORTS=268 STATE=sparsify-devcluster ;;
newer) PROGRAMS=$(newest) PORTS=269 STATE=sparsify-devcluster-newer ;;
*) die "SPARSIFY_SLURM (of make: SLURM) is system or newer, not '$SPARSIFY_SLURM'" ;;
esac
[ -z "$PROGRAMS" ] || PATH=$PROGRAMS/bin:$PATH
STATE=$(realpath -m "${SPARSIFY_DEVCLUSTER:-$HOME/.cache/$STATE}")
export SLURM_CONF=$STATE/slurm.conf

only_root() {
    [ "$(id -u)" = 0 ] || die "$1 needs root, because SLURM's daemons start jobs for any user; say: sudo $1"
}

# One up, down or node at a time. Daemons must not inherit descriptor 9 (see start): they would keep the lock.
lock() {
    mkdir -p "$STATE"
    exec 9>"$STATE/lock"
    flock 9
}

# marked NAME PROGRAM...: the running programs that carry the mark of a daemon of this cluster.
# Not by pid files: after a reboot they may name other processes.
marked() {
    local name=$1 program pid
    shift
    for program in "$@"; do
        for pid in $(pgrep -x "$program"); do
            if grep -qzxF "DEVCLUSTER=$STATE $name" "/proc/$pid/environ" 2>/dev/null; then echo "$pid"; fi
        done
    done
}

pids() {
    case $1 in
    n[0-9]*) marked "$1" slurmd ;;
    # The holder of the network, the programs by which it starts, and the relay that it becomes.
    switch) marked "$1" setsid unshare python3 'relay-.*' ;;
    *) marked "$1" "$1" ;;
    esac
}

running() {
    [ -n "$(pids "$1")" ]
}

# start NAME COMMAND...: in an environment of its own, so that no variable of the caller's reaches jobs.
start() {
    local name=$1
    shift
    STARTED+=("$name")
    if [ -e "$STATE/log/$name.log" ]; then mv "$STATE/log/$name.log" "$STATE/log/$name.log.1"; fi
    env -i PATH="$PATH" HOME="$HOME" LANG=C.UTF-8 SLURM_CONF="$SLURM_CONF" DEVCLUSTER="$STATE $name" \
        "$@" </dev/null >"$STATE/log/$name.out" 2>&1 9>&- || failed "$name" "did not start"
}
STARTED=()

start_node() {
    start "$1" slurmd -N "$1" -f "$SLURM_CONF"
}

# await NAME WHAT COMMAND...: until the command succeeds, a daemon has died, or the time is over.
await() {
    local name=$1 what=$2 deadline=$((SECONDS + DEADLINE_SECONDS)) looked=$((SECONDS + 1)) started
    shift 2
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || failed "$name" "$what within $DEADLINE_SECONDS s"
        if ((SECONDS > looked)); then # not at once: a daemon that is still forking looks dead as well
            looked=$SECONDS
            for started in "${STARTED[@]}"; do running "$started" || failed "$started" "died"; done
        fi
        sleep 0.05
    done
}

# failed NAME WHAT: ends the script, with the errors in the daemon's logs.
failed() {
    local log
    echo "slurm/devcluster: $1 $2; its last complaints in $STATE/log:" >&2
    for log in "$STATE/log/$1.out" "$STATE/log/$1.log"; do
        if [ -s "$log" ]; then grep -iE 'error|fatal|fail|denied|invalid' "$log" | tail -n 8 >&2 || true; fi
    done
    exit 1
}

# stop NAME: stops the daemon and waits until it has ended.
stop() {
    local found deadline=$((SECONDS + DEADLINE_SECONDS))
    found=$(pids "$1")
    [ -n "$found" ] || return 0
    # shellcheck disable=SC2086 # several ids are several words
    kill $found
    while running "$1"; do
        ((SECONDS < deadline)) || die "$1 (process $(pids "$1")) does not stop; see $STATE/log"
        sleep 0.05
    done
}

# The processes given and all their descendants.
families() {
    ps -e -o pid=,ppid= | awk -v roots="$*" '
        { parent[$1] = $2 }
        END {
            split(roots, list); for (i in list) root[list[i]]
            for (pid in parent) for (p = pid; p in parent; p = parent[p]) if (p in root) { print pid; break }
        }'
}

# The slurmstepd of node $1, by their log: the process title overwrites what they inherit.
steps() {
    local pid
    for pid in $(pgrep -x slurmstepd); do
        if [ -n "$(find "/proc/$pid/fd" -lname "$STATE/log/$1.log*" 2>/dev/null)" ]; then echo "$pid"; fi
    done
}

# The processes of jobs on node $1, by the variables that SLURM sets for them: orphans have no parent to search by.
tasks() {
    local file
    while read -r file; do
        if grep -qszxF "SLURM_CONF=$SLURM_CONF" "$file"; then cut -d/ -f3 <<<"$file"; fi
    done < <(grep -lszxF "SLURMD_NODENAME=$1" /proc/[0-9]*/environ)
}

# Like a power failure of node $1. All processes are stopped before the first is killed, so that none reports
# the end of a step to slurmctld, and none forks meanwhile.
kill_hard() {
    local victims
    victims=$(pids "$1"; steps "$1"; tasks "$1")
    [ -n "$victims" ] || return 0
    # shellcheck disable=SC2046,SC2086 # several ids are several words
    {
        kill -STOP $victims $(families $victims) 2>/dev/null || true # some may have ended meanwhile
        kill -KILL $victims $(families $victims) 2>/dev/null || true
    }
    while running "$1"; do sleep 0.05; done
}

listens() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

# Whether these nodes (n1,n2...) can take jobs, or run some. A node that is down or drained is resumed.
ready() {
    local states name state bad=0
    states=$(sinfo -h -N -p devel -n "$1" -o '%N %T') || return 1
    while read -r name state; do
        case $state in
        *down* | *drain*) scontrol update nodename="$name" state=resume || true ;; # it may be back meanwhile
        idle | mixed | allocated | completing | planned) continue ;;
        esac
        bad=1
    done <<<"$states"
    return $bad
}
