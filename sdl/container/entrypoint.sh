#!/bin/bash
# The first process of a node's container: entrypoint.sh [COMMAND [ARGUMENT...]]
#
# With SSH_PUBKEY (OpenSSH public keys, one per line), sshd listens on port 2222 and accepts only these keys. A COMMAND is
# a job: it is run once, and sshd keeps running afterwards, so that its files can be fetched. Without SSH_PUBKEY, no sshd is
# started, and the container runs only the COMMAND.
#
# DETRAIN_NB_STATE is the folder of the host key and of the job's exit status. The default is .detrain_nb in the volume,
# which outlives the container, or in the home. DETRAIN_NB_SECRETS lists variables that must not be written to a file.
# Variables of this script begin with _: the environment of the container may have any other name.
#
# If the image starts as root, the script gives the folder DETRAIN_NB_VOLUME to trainer and continues as trainer: volumes
# of Akash belong to root, and an SDL cannot change that.
# Options that SHELLOPTS brings from outside could stop this script or its writes; the job must not inherit them either.
set -u +aefC +o pipefail
export -n SHELLOPTS

_port=2222 _trainer=trainer
_end_limit_s=10    # time for the job to exit after SIGTERM
_most_chars=16384  # of a value that is passed to sessions
_most_in_all=60000 # sshd passes all values in one message of 256 KB
# Variables that a login sets, that this shell has set, or that belong to this script.
_no_sessions='^(HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|MAIL|HOSTNAME|SSH_.*|DETRAIN_NB_(STATE|SECRETS))$'
# The same as SECRET_NAME in detrain_nb/formats/secret_words.py.
_secret='(TOKEN|KEY)(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|_(AUTH|PASS|PAT|PWD)$'

say() { printf 'container: %s\n' "$*"; }

fail() {
  say "$*" >&2
  exit 2
}

become_trainer() {
  if [ -n "${DETRAIN_NB_VOLUME-}" ]; then
    [ "$(realpath -s "$DETRAIN_NB_VOLUME")" = "$(realpath "$DETRAIN_NB_VOLUME")" ] ||
      fail "DETRAIN_NB_VOLUME: $DETRAIN_NB_VOLUME is a link or is below one: give the path of the folder itself"
    chown -h "$_trainer:" "$DETRAIN_NB_VOLUME" || fail "DETRAIN_NB_VOLUME: $DETRAIN_NB_VOLUME cannot be given to $_trainer"
  fi
  export HOME
  HOME=$(getent passwd "$_trainer" | cut -d: -f6)
  exec setpriv --reuid="$_trainer" --regid="$(id -g "$_trainer")" --init-groups --no-new-privs "$0" "$@"
}

find_user() {
  _user=$(id -un 2>/dev/null) || fail "uid $(id -u) has no user in this image: start the container as the image's own user, $_trainer"
  [ "$(id -u)" != 0 ] || fail "the container runs as root and has no user $_trainer to switch to: start it as another user"
}

make_state() {
  local _volume=${DETRAIN_NB_VOLUME-} _loose
  export HOME
  HOME=$(getent passwd "$_user" | cut -d: -f6) # where sessions look, whatever HOME was
  _state=$HOME/.detrain_nb
  if [[ $_volume =~ ^/[A-Za-z0-9._/-]+$ && -w $_volume ]] && [ -z "$(find_loose "$_volume")" ]; then
    _state=$_volume/.detrain_nb
  fi
  _state=${DETRAIN_NB_STATE:-$_state}
  mkdir -p "$_state" 2>/dev/null && [ -w "$_state" ] ||
    fail "$_user cannot write to $_state: change its owner, or set DETRAIN_NB_STATE to another folder"
  _state=$(cd "$_state" && pwd -P)
  case $_state in *[[:space:]\"\'\\%]*) fail "$_state: sshd cannot read a path with spaces, quotes, backslashes or %: set DETRAIN_NB_STATE to another folder" ;; esac
  chmod 700 "$_state" 2>/dev/null
  _loose=$(find_loose "$_state")
  [ -z "$_loose" ] ||
    fail "users other than $_user can write to $_loose, which must hold the keys: set DETRAIN_NB_STATE to another folder"
}

# Print the first folder on the path that other users can write to: sshd refuses keys below it, and only its log says so.
find_loose() {
  local _folder=$1 _owner
  while :; do
    _owner=$(stat -c %u "$_folder")
    if [ "$_owner" != 0 ] && [ "$_owner" != "$(id -u)" ] || [ -n "$(find "$_folder" -prune -perm /022)" ]; then
      echo "$_folder"
      return
    fi
    [ "$_folder" != / ] || return
    _folder=$(dirname "$_folder")
  done
}

read_keys() {
  local _line _number=0 _has_key=
  while IFS= read -r _line || [ -n "$_line" ]; do
    _number=$((_number + 1)) _line=${_line%$'\r'}
    case $_line in '' | '#'*) continue ;; esac
    # it may be a private key: print nothing of it
    printf '%s\n' "$_line" | ssh-keygen -l -f - >/dev/null 2>&1 ||
      fail "SSH_PUBKEY, line $_number: not a public key: give the contents of a file such as ~/.ssh/id_ed25519.pub"
    printf '%s\n' "$_line"
    _has_key=1
  done <<<"$SSH_PUBKEY"
  [ -n "$_has_key" ] || fail "SSH_PUBKEY has no key: give the contents of a file such as ~/.ssh/id_ed25519.pub"
}

# Print the variables as sshd_config needs them. sshd reads only the first SetEnv line, so all are on one line.
list_environment() {
  local _name _value _quoted _total=0
  for _name in $(compgen -e); do
    [[ ! $_name =~ $_no_sessions ]] || continue
    if [[ ${_name^^} =~ $_secret ]] || [[ " ${DETRAIN_NB_SECRETS-} " == *" $_name "* ]]; then
      say "sessions do not get $_name: it is a secret" >&2
      continue
    fi
    _value=${!_name}
    if [[ $_value == *$'\n'* ]] || ((${#_value} > _most_chars || _total + ${#_value} > _most_in_all)); then
      say "sessions do not get $_name: it has several lines, or is too long" >&2
      continue
    fi
    _quoted=${_value//\\/\\\\}
    _quoted=${_quoted//\"/\\\"}
    _total=$((_total + ${#_name} + ${#_quoted}))
    printf ' "%s=%s"' "$_name" "$_quoted"
  done
}

write_config() {
  local _environment
  _environment=$(list_environment)
  cat >"$_state/sshd_config" <<CONFIG
Port $_port
HostKey $_state/host_key
AuthorizedKeysFile $_state/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
AllowUsers $_user
UsePAM no
StrictModes yes
UseDNS no
X11Forwarding no
AllowAgentForwarding no
PidFile none
Subsystem sftp internal-sftp
${_environment:+SetEnv$_environment}
CONFIG
}

start_sshd() {
  local _sshd
  _sshd=$(PATH=$PATH:/usr/sbin:/sbin command -v sshd) || fail "sshd is not installed: install openssh-server in the image"
  [ -f "$_state/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$_state/host_key" ||
    fail "a host key could not be created in $_state"
  "$_sshd" -t -f "$_state/sshd_config" || fail "sshd rejects $_state/sshd_config"
  "$_sshd" -D -e -f "$_state/sshd_config" &
  _sshd_pid=$!
  say "sshd on port $_port, for $_user; the key of this host: $(ssh-keygen -l -f "$_state/host_key.pub" | cut -d' ' -f2)"
}

# Run a job once: a restarted container finds the exit status of the job with this command line.
run_job() {
  local _mark _status
  _mark=$_state/job-$(printf '%s\0' "$@" | sha256sum | cut -c1-16).status
  if [ -f "$_mark" ]; then
    say "the job has already exited with status $(<"$_mark"), and is not run again: to run it again, remove $_mark"
    return
  fi
  set -m # a process group of its own
  "$@" </dev/null &
  _job_pid=$!
  set +m
  wait "$_job_pid"
  _status=$?
  _job_pid=
  echo "$_status" >"$_mark.new" && mv "$_mark.new" "$_mark" || say "cannot write $_mark" >&2
  say "the job has exited with status $_status; sshd keeps running, so that its files can be fetched"
}

end() {
  trap '' TERM INT
  local _waited=0
  kill "$_sshd_pid" 2>/dev/null
  if [ -n "$_job_pid" ] && kill -TERM -- "-$_job_pid" 2>/dev/null; then
    while kill -0 "$_job_pid" 2>/dev/null && ((_waited++ < _end_limit_s * 10)); do sleep 0.1; done
    kill -KILL -- "-$_job_pid" 2>/dev/null
  fi
  kill -KILL "$_sshd_pid" 2>/dev/null && wait "$_sshd_pid" 2>/dev/null
  exit 143
}

_sshd_pid='' _job_pid=''
if [ "$(id -u)" = 0 ] && id "$_trainer" >/dev/null 2>&1; then become_trainer "$@"; fi
if [ -z "${SSH_PUBKEY-}" ]; then
  [ $# -gt 0 ] || fail "there is nothing to do: set SSH_PUBKEY to the public keys of those who may log in, or give a command, or both"
  exec "$@"
fi
trap end TERM INT # signals that the first process of a container does not trap have no effect on it
_umask=$(umask)
umask 077
find_user
_keys=$(read_keys) || exit
make_state
printf '%s\n' "$_keys" >"$_state/authorized_keys" && write_config || fail "cannot write to $_state: is its disk full?"
umask "$_umask"
start_sshd
[ $# -eq 0 ] || run_job "$@"
wait "$_sshd_pid"
say "sshd has exited" >&2
exit 1
