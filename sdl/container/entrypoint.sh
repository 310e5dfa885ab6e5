#!/bin/bash
# The first process of a node's container: entrypoint.sh [COMMAND [ARGUMENT...]]
#
# With SSH_PUBKEY, public keys of OpenSSH, one a line: sshd on port 2222, for these keys alone. A COMMAND is the job: it
# is run once, and sshd stays when it has ended, so that what it made can be fetched. Without SSH_PUBKEY there is no sshd:
# the container is the COMMAND.
#
# It keeps in DETRAIN_NB_STATE (by default ~/.detrain_nb) the key of this host and how the job ended: on a volume that
# outlives the container both stay. DETRAIN_NB_SECRETS: names of variables that no file may have, with spaces between.
#
# An image that starts as root gives trainer the folder DETRAIN_NB_VOLUME, and goes on as trainer: Akash gives volumes
# to root, and no SDL says otherwise.
set -u

PORT=2222
END_LIMIT_S=10 # what SIGTERM leaves the job
LONGEST=16384  # a value that sessions are given: sshd hands all of them on in one message of 256 KB
# What a login sets itself, what this shell has set, and what is this script's own.
OWN='^(HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|MAIL|HOSTNAME|SSH_.*|DETRAIN_NB_(STATE|SECRETS))$'
SECRET='TOKEN(_|$)|SECRET|PASSW|CREDENTIAL|PRIVATE|_?KEY(_ID)?$'

say() { printf 'container: %s\n' "$*"; }

fail() {
  say "$*" >&2
  exit 2
}

become_trainer() {
  if [ -n "${DETRAIN_NB_VOLUME-}" ]; then
    chown trainer: "$DETRAIN_NB_VOLUME" || fail "DETRAIN_NB_VOLUME: $DETRAIN_NB_VOLUME cannot be given to trainer"
  fi
  exec setpriv --reuid=trainer --regid="$(id -g trainer)" --init-groups --no-new-privs "$0" "$@"
}

find_user() {
  user=$(id -un 2>/dev/null) || fail "uid $(id -u) is no user of this image: start it as the image's own user, trainer"
  [ "$(id -u)" != 0 ] || fail "it runs as root: start it as a user that is not, the image's own is trainer"
}

make_state() {
  HOME=$(getent passwd "$user" | cut -d: -f6) # where sessions are, whatever the variable says
  state=${DETRAIN_NB_STATE:-$HOME/.detrain_nb}
  mkdir -p "$state" 2>/dev/null && [ -w "$state" ] ||
    fail "$user cannot write $state: make it a folder of theirs, or name another one in DETRAIN_NB_STATE"
  state=$(cd "$state" && pwd -P)
  case $state in *[[:space:]\"\'\\%]*) fail "$state: sshd reads no such name: name another one in DETRAIN_NB_STATE" ;; esac
  refuse_loose_folders
}

# sshd lets nobody in whose keys stand where others can write, and says so in its log alone.
refuse_loose_folders() {
  local folder=$state owner
  chmod 700 "$state" 2>/dev/null
  while :; do
    owner=$(stat -c %u "$folder")
    if [ "$owner" != 0 ] && [ "$owner" != "$(id -u)" ] || [ -n "$(find "$folder" -prune -perm /022)" ]; then
      fail "others than $user can write $folder, where its keys are to be: name another folder in DETRAIN_NB_STATE"
    fi
    [ "$folder" != / ] || return 0
    folder=$(dirname "$folder")
  done
}

read_keys() {
  local line number=0 has_key=
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1)) line=${line%$'\r'}
    case $line in '' | '#'*) continue ;; esac
    # it may be a private key: nothing of it is said
    printf '%s\n' "$line" | ssh-keygen -l -f - >/dev/null 2>&1 ||
      fail "SSH_PUBKEY, line $number: no public key: give what is in a file as ~/.ssh/id_ed25519.pub"
    printf '%s\n' "$line"
    has_key=1
  done <<<"$SSH_PUBKEY"
  [ -n "$has_key" ] || fail "SSH_PUBKEY has no key: give what is in a file as ~/.ssh/id_ed25519.pub"
}

# In the form of sshd_config. sshd takes the first line of SetEnv alone: all stand in it.
list_environment() {
  local name value quoted
  for name in $(compgen -e); do
    [[ ! $name =~ $OWN ]] || continue
    if [[ ${name^^} =~ $SECRET ]] || [[ " ${DETRAIN_NB_SECRETS-} " == *" $name "* ]]; then
      say "sessions do not get $name: it is a secret" >&2
      continue
    fi
    value=${!name}
    if [[ $value == *$'\n'* ]] || ((${#value} > LONGEST)); then
      say "sessions do not get $name: it has several lines, or more than $LONGEST characters" >&2
      continue
    fi
    quoted=${value//\\/\\\\}
    quoted=${quoted//\"/\\\"}
    printf ' "%s=%s"' "$name" "$quoted"
  done
}

write_config() {
  local environment
  environment=$(list_environment)
  cat >"$state/sshd_config" <<CONFIG
Port $PORT
HostKey $state/host_key
AuthorizedKeysFile $state/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
AllowUsers $user
UsePAM no
StrictModes yes
UseDNS no
X11Forwarding no
AllowAgentForwarding no
PidFile none
Subsystem sftp internal-sftp
${environment:+SetEnv$environment}
CONFIG
}

start_sshd() {
  local sshd
  sshd=$(PATH=$PATH:/usr/sbin:/sbin command -v sshd) || fail "no sshd here: install openssh-server in the image"
  [ -f "$state/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$state/host_key" ||
    fail "no host key can be made in $state"
  "$sshd" -t -f "$state/sshd_config" || fail "sshd does not take $state/sshd_config"
  "$sshd" -D -e -f "$state/sshd_config" &
  sshd_pid=$!
  say "sshd on port $PORT, for $user; the key of this host: $(ssh-keygen -l -f "$state/host_key.pub" | cut -d' ' -f2)"
}

# Once: a container that is started again finds how the job of this very command line has ended.
run_job() {
  local mark status
  mark=$state/job-$(printf '%s\0' "$@" | sha256sum | cut -c1-16).status
  if [ -f "$mark" ]; then
    say "the job has ended before, with status $(<"$mark"), and is not run again: remove $mark, and it is"
    return
  fi
  set -m # a process group of its own
  "$@" </dev/null &
  job_pid=$!
  set +m
  wait "$job_pid"
  status=$?
  job_pid=
  echo "$status" >"$mark.new" && mv "$mark.new" "$mark" || say "$mark cannot be written" >&2
  say "the job has ended, with status $status; sshd stays for what it made"
}

end() {
  trap '' TERM INT
  local waited=0
  kill "$sshd_pid" 2>/dev/null
  if [ -n "$job_pid" ] && kill -TERM -- "-$job_pid" 2>/dev/null; then
    while kill -0 "$job_pid" 2>/dev/null && ((waited++ < END_LIMIT_S * 10)); do sleep 0.1; done
    kill -KILL -- "-$job_pid" 2>/dev/null
  fi
  kill -KILL "$sshd_pid" 2>/dev/null && wait "$sshd_pid" 2>/dev/null
  exit 143
}

sshd_pid='' job_pid=''
if [ "$(id -u)" = 0 ] && id trainer >/dev/null 2>&1; then become_trainer "$@"; fi
if [ -z "${SSH_PUBKEY-}" ]; then
  [ $# -gt 0 ] || fail "there is nothing to do: give SSH_PUBKEY, the public keys of who may log in, or a command, or both"
  exec "$@"
fi
trap end TERM INT # the first process of a container is spared by signals that it does not trap
given=$(umask)
umask 077
find_user
keys=$(read_keys) || exit
make_state
printf '%s\n' "$keys" >"$state/authorized_keys" && write_config || fail "$state cannot be written: is its disk full?"
umask "$given"
start_sshd
[ $# -eq 0 ] || run_job "$@"
wait "$sshd_pid"
say "sshd has ended" >&2
exit 1
