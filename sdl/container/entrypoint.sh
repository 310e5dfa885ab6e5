#!/bin/bash
# The first process of a node's container: entrypoint.sh [COMMAND [ARGUMENT...]]
#
# With SSH_PUBKEY, public keys of OpenSSH, one a line: sshd on port 2222, for these keys alone. A COMMAND is the job: it
# is run once, and sshd stays when it has ended, so that what it made can be fetched. Without SSH_PUBKEY there is no sshd:
# the container is the COMMAND.
#
# It keeps in DETRAIN_NB_STATE the key of this host and how the job ended; by default in .detrain_nb of the volume, where
# both outlive the container, or of the home. DETRAIN_NB_SECRETS: names of variables that no file may have.
# A variable of its own begins with _: the container may have any other.
#
# An image that starts as root gives trainer the folder DETRAIN_NB_VOLUME, and goes on as trainer: Akash gives volumes
# to root, and no SDL says otherwise.
# SHELLOPTS of the environment would end it, or have it write no file anew; and a job has no such options of this shell.
set -u +aefC +o pipefail
export -n SHELLOPTS

_port=2222 _trainer=trainer
_end_limit_s=10    # what SIGTERM leaves the job
_most_chars=16384  # of a value that sessions get
_most_in_all=60000 # sshd hands all values on in one message of 256 KB
# What a login sets itself, what this shell has set, and what is this script's own.
_no_sessions='^(HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|MAIL|HOSTNAME|SSH_.*|DETRAIN_NB_(STATE|SECRETS))$'
# As SECRET_NAME in detrain_nb/formats/secret_words.py.
_secret='(TOKEN|KEY)(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|_(AUTH|PASS|PAT|PWD)$'

say() { printf 'container: %s\n' "$*"; }

fail() {
  say "$*" >&2
  exit 2
}

become_trainer() {
  if [ -n "${DETRAIN_NB_VOLUME-}" ]; then
    [ "$(realpath -s "$DETRAIN_NB_VOLUME")" = "$(realpath "$DETRAIN_NB_VOLUME")" ] ||
      fail "DETRAIN_NB_VOLUME: $DETRAIN_NB_VOLUME leads through a link: name the folder itself"
    chown -h "$_trainer:" "$DETRAIN_NB_VOLUME" || fail "DETRAIN_NB_VOLUME: $DETRAIN_NB_VOLUME cannot be given to $_trainer"
  fi
  export HOME
  HOME=$(getent passwd "$_trainer" | cut -d: -f6)
  exec setpriv --reuid="$_trainer" --regid="$(id -g "$_trainer")" --init-groups --no-new-privs "$0" "$@"
}

find_user() {
  _user=$(id -un 2>/dev/null) || fail "uid $(id -u) is no user of this image: start it as the image's own user, $_trainer"
  [ "$(id -u)" != 0 ] || fail "it runs as root, and has no user $_trainer to go on as: start it as another user"
}

make_state() {
  local _volume=${DETRAIN_NB_VOLUME-} _loose
  export HOME
  HOME=$(getent passwd "$_user" | cut -d: -f6) # where sessions are, whatever the variable says
  _state=$HOME/.detrain_nb
  if [[ $_volume =~ ^/[A-Za-z0-9._/-]+$ && -w $_volume ]] && [ -z "$(find_loose "$_volume")" ]; then
    _state=$_volume/.detrain_nb
  fi
  _state=${DETRAIN_NB_STATE:-$_state}
  mkdir -p "$_state" 2>/dev/null && [ -w "$_state" ] ||
    fail "$_user cannot write $_state: make it a folder of theirs, or name another one in DETRAIN_NB_STATE"
  _state=$(cd "$_state" && pwd -P)
  case $_state in *[[:space:]\"\'\\%]*) fail "$_state: sshd reads no such name: name another one in DETRAIN_NB_STATE" ;; esac
  chmod 700 "$_state" 2>/dev/null
  _loose=$(find_loose "$_state")
  [ -z "$_loose" ] ||
    fail "others than $_user can write $_loose, where its keys are to be: name another folder in DETRAIN_NB_STATE"
}

# Say which folder on the way others can write: sshd lets nobody in whose keys stand there, and says so in its log alone.
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
    # it may be a private key: nothing of it is said
    printf '%s\n' "$_line" | ssh-keygen -l -f - >/dev/null 2>&1 ||
      fail "SSH_PUBKEY, line $_number: no public key: give what is in a file as ~/.ssh/id_ed25519.pub"
    printf '%s\n' "$_line"
    _has_key=1
  done <<<"$SSH_PUBKEY"
  [ -n "$_has_key" ] || fail "SSH_PUBKEY has no key: give what is in a file as ~/.ssh/id_ed25519.pub"
}

# In the form of sshd_config. sshd takes the first line of SetEnv alone: all stand in it.
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
  _sshd=$(PATH=$PATH:/usr/sbin:/sbin command -v sshd) || fail "no sshd here: install openssh-server in the image"
  [ -f "$_state/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C "$(hostname)" -f "$_state/host_key" ||
    fail "no host key can be made in $_state"
  "$_sshd" -t -f "$_state/sshd_config" || fail "sshd does not take $_state/sshd_config"
  "$_sshd" -D -e -f "$_state/sshd_config" &
  _sshd_pid=$!
  say "sshd on port $_port, for $_user; the key of this host: $(ssh-keygen -l -f "$_state/host_key.pub" | cut -d' ' -f2)"
}

# Once: a container that is started again finds how the job of this very command line has ended.
run_job() {
  local _mark _status
  _mark=$_state/job-$(printf '%s\0' "$@" | sha256sum | cut -c1-16).status
  if [ -f "$_mark" ]; then
    say "the job has ended before, with status $(<"$_mark"), and is not run again: remove $_mark, and it is"
    return
  fi
  set -m # a process group of its own
  "$@" </dev/null &
  _job_pid=$!
  set +m
  wait "$_job_pid"
  _status=$?
  _job_pid=
  echo "$_status" >"$_mark.new" && mv "$_mark.new" "$_mark" || say "$_mark cannot be written" >&2
  say "the job has ended, with status $_status; sshd stays for what it made"
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
  [ $# -gt 0 ] || fail "there is nothing to do: give SSH_PUBKEY, the public keys of who may log in, or a command, or both"
  exec "$@"
fi
trap end TERM INT # the first process of a container is spared by signals that it does not trap
_umask=$(umask)
umask 077
find_user
_keys=$(read_keys) || exit
make_state
printf '%s\n' "$_keys" >"$_state/authorized_keys" && write_config || fail "$_state cannot be written: is its disk full?"
umask "$_umask"
start_sshd
[ $# -eq 0 ] || run_job "$@"
wait "$_sshd_pid"
say "sshd has ended" >&2
exit 1
