#!/usr/bin/env bash
# Runs Envoy so that a stop signal drains it, which Envoy alone does not do: SIGTERM would cut every stream.
#
#   OMNISERVE_STATE_DIR   where `python -m deploy.edge` wrote envoy/envoy.yaml and envoy/edge.env, where relay writes xds/,
#                         and where tokens/ is
#   OMNISERVE_EDGE_ENVOY  the Envoy binary (default: envoy, from the PATH)
#
# SIGTERM or SIGINT: /healthz turns to 503, listeners close after a notice, running streams end by themselves within a limit,
# then Envoy stops and the exit status is 0. A second signal ends the waiting. When Envoy dies by itself, the status is not 0.
# SIGHUP: a new Envoy takes over the open ports, and the old one ends when its streams have, within the same limit.
# `run.sh healthy` asks Envoy whether it is live and exits 0 or 1: a container's health check.
set -uo pipefail

state=${OMNISERVE_STATE_DIR:?is not set: the directory with envoy/envoy.yaml and tokens/}
envoy=${OMNISERVE_EDGE_ENVOY:-envoy}
config=$state/envoy/envoy.yaml
access_log=$state/logs/access.log
xds=$state/xds
# Longer than relay takes to read its settings and have them judged, on the busiest machine: five minutes.
xds_limit_s=300
max_log_bytes=$((32 * 1024 * 1024))
# Numbers only: ADMIN_PORT, DRAIN_NOTICE_S, DRAIN_LIMIT_S, WORKERS.
# shellcheck source=/dev/null
. "$state/envoy/edge.env" || exit 2

# admin METHOD PATH: prints Envoy's answer, status line and headers included; fails when there is none.
admin() (
  exec 3<>"/dev/tcp/127.0.0.1/$ADMIN_PORT" || exit 1
  printf '%s %s HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' "$1" "$2" >&3
  while IFS= read -r -t 5 line <&3 || [ -n "$line" ]; do printf '%s\n' "${line%$'\r'}"; done
) 2>/dev/null

# Requests in flight on all listeners; nothing when Envoy does not answer.
active_streams() {
  admin GET '/stats?filter=downstream_rq_active' |
    awk '/^http\.(public|operator|mesh)\.downstream_rq_active:/ {sum += $2; seen = 1} END {if (seen) print sum}'
}

token() {
  local file=$state/tokens/$1
  [ -s "$file" ] || { echo "run.sh: no token in $file; python -m deploy.edge makes it" >&2; return 1; }
  cat "$file"
}

# pause SECONDS: sleeps without a process of its own, so that a signal ends it and nothing is left behind.
exec {never}<> <(:)
pause() { read -r -t "$1" -u "$never"; return 0; }

# Four files of 32 MiB at most, until the wrapper is gone.
keep_access_log_small() {
  while pause 60 && kill -0 $$; do
    [ "$(wc -c 2>/dev/null <"$access_log" || echo 0)" -lt "$max_log_bytes" ] && continue
    for n in 2 1; do [ -f "$access_log.$n" ] && mv "$access_log.$n" "$access_log.$((n + 1))"; done
    mv "$access_log" "$access_log.1" && admin POST /reopen_logs >/dev/null
  done
}

alive() { kill -0 "$pid" 2>/dev/null; }

drain() {
  echo "run.sh: draining: running streams have ${DRAIN_LIMIT_S} s" >&2
  # Connections are asked to close (GOAWAY, connection: close), and health checks fail; new ones still get in for the notice.
  if admin POST /healthcheck/fail >/dev/null && admin POST '/drain_listeners?graceful&skip_exit' >/dev/null; then
    wait_up_to "$DRAIN_NOTICE_S"
    admin POST /drain_listeners >/dev/null # the ports close, streams go on
    wait_up_to "$DRAIN_LIMIT_S" for_streams
  fi
  kill -TERM "$pid" 2>/dev/null
  for _ in $(seq 25); do alive || return; pause 0.2; done
  kill -KILL "$pid" 2>/dev/null
}

# wait_up_to SECONDS [for_streams]: ends early when Envoy is gone, a second signal came, or no stream is left.
wait_up_to() {
  local ends=$((SECONDS + $1))
  while [ "$SECONDS" -lt "$ends" ] && [ "$signals" -lt 2 ] && alive; do
    [ "${2:-}" = for_streams ] && [ "$(active_streams)" = 0 ] && return
    pause 0.2
  done
}

if [ "${1:-}" = healthy ]; then
  [[ $(admin GET /ready) == *LIVE* ]]
  exit
fi

OMNISERVE_EDGE_PUBLIC_TOKEN=$(token envoy-public) || exit 2
OMNISERVE_EDGE_OPERATOR_TOKEN=$(token envoy-operator) || exit 2
OMNISERVE_EDGE_TOKEN=$(token envoy) || exit 2
export OMNISERVE_EDGE_PUBLIC_TOKEN OMNISERVE_EDGE_OPERATOR_TOKEN OMNISERVE_EDGE_TOKEN

# Where the system can, Envoy is tied to this wrapper: an orphan would keep the ports from its successor.
tie=()
if setpriv --pdeathsig KILL true 2>/dev/null; then tie=(setpriv --pdeathsig KILL --); fi
threads=()
if [ "$WORKERS" -gt 0 ]; then threads=(--concurrency "$WORKERS"); fi

signals=0
wishes=0
trap 'signals=$((signals + 1))' TERM INT
trap 'wishes=$((wishes + 1))' HUP

# Envoy wants relay's files at its start; those of a former run will do until relay has better ones.
wanted=("$xds/cds.yaml" "$xds"/rds.{gate,public,operator,mesh}.yaml)
missing() { for file in "${wanted[@]}"; do [ -s "$file" ] || return 0; done; return 1; } # sets file, and starts no process
while missing; do
  [ "$signals" -eq 0 ] || exit 0
  [ "$SECONDS" -lt "$xds_limit_s" ] || { echo "run.sh: no $file after $xds_limit_s s; relay writes it" >&2; exit 1; }
  pause 0.1
done

# Envoy shares memory between generations under a name made of its id, and leaves it behind. That of a run that was killed goes
# at the next start.
forget_shared_memory() {
  local id
  read -r id 2>/dev/null <"$state/envoy/base-id" || [ -n "${id:-}" ] || return 0
  rm -f "/dev/shm/envoy_shared_memory_${id}0" "$state/envoy/base-id" # Envoy counts in tens
}

# begin EPOCH: starts an Envoy, the first or one that takes over from the one before; sets pid.
begin() {
  local id=(--use-dynamic-base-id --base-id-path "$state/envoy/base-id")
  [ "$1" -eq 0 ] || id=(--base-id "$(cat "$state/envoy/base-id")")
  "${tie[@]}" "$envoy" -c "$config" "${id[@]}" --restart-epoch "$1" --log-level warning --file-flush-interval-msec 1000 \
    --drain-strategy immediate --drain-time-s "$DRAIN_NOTICE_S" \
    --parent-shutdown-time-s "$((DRAIN_NOTICE_S + DRAIN_LIMIT_S))" "${threads[@]}" &
  pid=$!
}

# take_over: a new Envoy in the old one's place. A configuration that is no good is found before the old one is touched: it
# gives its administration page up as soon as a new one starts, and cannot be taken over a second time when that one fails.
take_over() {
  local old=$pid
  if ! "$envoy" --mode validate -c "$config" --log-level error >&2; then
    echo "run.sh: the new configuration is no good; the old Envoy goes on" >&2
    return
  fi
  begin $((epoch + 1))
  while alive && [ "$signals" -eq 0 ] && ! [[ $(admin GET /server_info) == *"\"restart_epoch\": $((epoch + 1)),"* ]]; do
    pause 0.2
  done
  if alive; then
    epoch=$((epoch + 1))
    echo "run.sh: another Envoy has taken over" >&2
  else
    echo "run.sh: the new Envoy did not come up; the old one serves on without its administration page: restart" >&2
    pid=$old
  fi
}

epoch=0
forget_shared_memory
begin $epoch
keep_access_log_small &
keeper=$!
trap 'kill "$keeper" 2>/dev/null; forget_shared_memory' EXIT

status=0
while [ "$signals" -eq 0 ] && alive; do
  if [ "$wishes" -gt 0 ]; then
    wishes=0
    take_over
    continue # a signal that came meanwhile would not end the wait
  fi
  wait "$pid"
  status=$?
done
if [ "$signals" -gt 0 ]; then
  drain
  wait "$pid" 2>/dev/null
  exit 0
fi
echo "run.sh: Envoy ended by itself with status $status" >&2
[ "$status" -ne 0 ] && exit "$status"
exit 1
