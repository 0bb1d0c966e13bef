# shellcheck shell=bash
# Sourced by install and install-apptainer: packages of Debian's development release, unpacked into a folder,
# together with the newer C library that they need. The system itself is not changed.

# find_mirror: sets MIRROR, the one that this machine uses already: the first with Debian's main component.
find_mirror() {
    MIRROR=
    ! command -v dpkg-deb >/dev/null || MIRROR=$(
        # shellcheck disable=SC2016 # apt's own variables
        apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(REPO_URI)' 'Identifier: Packages' |
            awk '$1 == "Debian" && $2 == "main" && !/security/ {print $3; exit}'
    )
    [ -n "$MIRROR" ]
}

# unpack WORK HOW PACKAGE...: into WORK/root. HOW is download, just these, or install, with all that they depend on.
unpack() {
    local work=$1 how=$2 deb keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    shift 2
    mkdir -p "$work"/{lists,cache,debs/partial,root}
    echo "deb [signed-by=$keyring] $MIRROR sid main" >"$work/sources.list"
    : >"$work/status" # nothing is installed there yet
    local apt=(apt-get -q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=-
        -o "Dir::State::Lists=$work/lists" -o "Dir::State::Status=$work/status" -o "Dir::Cache=$work/cache"
        -o "Dir::Cache::Archives=$work/debs" -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=true)
    "${apt[@]}" update >&2 || return
    if [ "$how" = install ]; then
        "${apt[@]}" install --yes --no-install-recommends --download-only "$@" >&2 || return
    else
        (cd "$work/debs" && "${apt[@]}" download "$@" >&2) || return
    fi
    for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root" || return; done
}

# point ROOT PLACE FILE...: let programs and libraries below ROOT, which will be moved to PLACE, find their own C library.
point() {
    local root=$1 loader libraries file
    loader=$(find "$1" -name 'ld-linux-*.so.*' -type f -print -quit)
    libraries=$2$(dirname "${loader#"$1"}")
    shift 2
    for file in "$@"; do
        case $file in *.so) ;; *) patchelf --set-interpreter "$libraries/${loader##*/}" "$file" ;; esac
        patchelf --force-rpath --set-rpath "$libraries:$libraries/slurm-wlm" "$file"
    done
}
