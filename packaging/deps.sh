# shellcheck shell=bash
# Sourced: installs the Debian packages that are missing.

apt_install() {
    apt-get install -q -y --no-install-recommends -o Dpkg::Use-Pty=0 "$@" 2>&1 </dev/null
}

# install_missing PACKAGE…: those of them that are not there; `postgresql` counts as there with any
# server of it. No server is started: whoever calls this brings up one of its own.
install_missing() {
    local package status missing=()
    for package in "$@"; do
        if [ "$package" = postgresql ]; then
            compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=("$package")
            continue
        fi
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
        [ "$status" = installed ] || missing+=("$package")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ]; then
        echo "missing packages; as root: apt install ${missing[*]}" >&2
        return 1
    fi
    echo "installing ${missing[*]}"
    (
        # Debian's package would make and start a cluster of its own.
        no_cluster=/etc/postgresql-common/createcluster.d/serversync.conf
        trap 'rm -f "$no_cluster"' EXIT
        trap 'exit 130' INT TERM
        mkdir -p "${no_cluster%/*}"
        echo 'create_main_cluster = false' >"$no_cluster"
        export DEBIAN_FRONTEND=noninteractive
        # Package lists that are there may do; missing or old ones are fetched.
        if ! apt_install "${missing[@]}" >/dev/null; then
            apt-get update -qq
            said=$(apt_install "${missing[@]}") || {
                echo "$said" >&2
                exit 1
            }
        fi
    )
}

# unpack_program PACKAGE PROGRAM DIRECTORY: one program of a package, which is not installed: it
# would start a server.
unpack_program() {
    local package=$1 program=$2 directory
    directory=$(realpath -m "$3")
    [ ! -x "$directory/$program" ] || return 0
    echo "unpacking $program from the package $package"
    (
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        trap 'exit 130' INT TERM
        cd "$work"
        download=(apt-get download -qq -o APT::Sandbox::User=root "$package")
        # Package lists that are there may do; missing or old ones are fetched.
        "${download[@]}" 2>/dev/null || {
            apt-get update -qq
            "${download[@]}"
        }
        dpkg-deb -x ./*.deb unpacked
        mkdir -p "$directory"
        mv "unpacked/usr/bin/$program" "$directory/"
    )
}
