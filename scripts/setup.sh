# What scripts/demo and scripts/test share; sourced. Bash 3.2, as macOS has it, is enough.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$ROOT/.venv/bin/python
IMAGE=${RABBIT_TASKS_TEST_IMAGE:-rabbitmq:4-management}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

may_be_root() { [ "$(id -u)" = 0 ] || { have sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; }; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

apt_install() {
    local said
    have apt-get && may_be_root || return 1
    say "installing $* with apt"
    as_root apt-get update -qq >/dev/null 2>&1 || say "apt-get update failed; going on with what it knew"
    said=$(as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=120 \
        --no-install-recommends "$@" 2>&1 </dev/null) || { say "$said"; return 1; }
}

# --- Python -----------------------------------------------------------------------------------------

find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && return
    done
    return 1
}

# make_environment EXTRAS: .venv in the clone, with this package, editable, and its extras.
make_environment() {
    local wanted="$ROOT $(cksum <"$ROOT/pyproject.toml") $1"
    grep -qsxF "$wanted" "$ROOT/.venv/installed" && "$PYTHON" -c 'import rabbit_tasks' 2>/dev/null && return
    say "installing rabbit_tasks[$1] into .venv"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || rm -rf "$ROOT/.venv"
    if have uv; then
        [ -d "$ROOT/.venv" ] || uv venv --quiet --python '>=3.11' "$ROOT/.venv"
        uv pip install --quiet --python "$PYTHON" -e "$ROOT[$1]"
    else
        "$PYTHON" -m pip --version >/dev/null 2>&1 || create_venv
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$1]"
    fi
    # Workers start many times; where Python may not keep what it compiled, each would do it again.
    "$PYTHON" -m compileall -q "$ROOT/rabbit_tasks" "$ROOT/tests"
    printf '%s\n' "$wanted" >>"$ROOT/.venv/installed"
}

create_venv() {
    find_python || fail "there is no Python 3.11 or newer: install it, or uv (https://docs.astral.sh/uv)"
    # Debian keeps the half of venv that brings pip in a package of its own.
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        say "this Python cannot make virtual environments: python3-venv is missing"
        apt_install python3-venv || fail "install python3-venv as root, or uv (https://docs.astral.sh/uv)"
    fi
    rm -rf "$ROOT/.venv"
    "$python" -m venv "$ROOT/.venv"
}

# --- the broker -------------------------------------------------------------------------------------

private_node() { "$PYTHON" "$ROOT/scripts/broker.py" "$@"; }

has_docker() {
    have docker && docker info >/dev/null 2>&1 || return 1
    docker image inspect "$IMAGE" >/dev/null 2>&1 && return
    say "pulling $IMAGE"
    docker pull --quiet "$IMAGE" >/dev/null 2>&1 || { say "Docker cannot pull $IMAGE; looking further"; return 1; }
}

has_rabbitmq() {
    private_node installed && return
    if have apt-get && may_be_root; then
        install_with_apt
    elif have brew; then
        say "installing rabbitmq with brew"
        brew install --quiet rabbitmq >&2 </dev/null
    fi
    private_node installed
}

install_with_apt() {
    # Debian starts a service as soon as it is installed. What we want is the program, not a second
    # broker on this machine's own ports: for these minutes services stay down, and this one for good.
    local policy=/usr/sbin/policy-rc.d installed=0
    if [ -e "$policy" ]; then
        policy=
    else
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null && as_root chmod 755 "$policy"
    fi
    apt_install rabbitmq-server || installed=$?
    [ -z "$policy" ] || as_root rm -f "$policy"
    if [ -d /run/systemd/system ]; then as_root systemctl disable --quiet rabbitmq-server 2>/dev/null || true; fi
    return "$installed"
}

no_broker() {
    fail "no broker: set $1, start Docker, or install RabbitMQ (apt-get install rabbitmq-server, brew install rabbitmq)"
}
