# What the tools in this folder share; sourced by them, never run.

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# Waits up to 10 s for a command to succeed.
wait_for() {
    local _
    for _ in $(seq 500); do
        "$@" && return
        sleep 0.02
    done
    return 1
}

# Whether the process whose id is in a file runs. One that has ended and that nobody has waited for yet
# (a zombie) has let go of its files and ports, so it counts as ended.
running() {
    local stat
    [ -s "$1" ] && stat=$(cat "/proc/$(cat "$1")/stat" 2>/dev/null) && [[ ${stat##*) } != Z* ]]
}

ended() { ! running "$1"; }

# end PIDFILE [SIGNAL]: ends that process, and returns when it has ended; kills it after 10 s.
end() {
    if running "$1"; then
        kill "-${2:-TERM}" "$(cat "$1")" 2>/dev/null || true
        wait_for ended "$1" || kill -KILL "$(cat "$1")" 2>/dev/null || true
        wait_for ended "$1" || die "process $(cat "$1") does not end"
    fi
    rm -f "$1"
}
