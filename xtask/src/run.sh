#!/bin/sh
# Runs what `cargo xtask bundle` packed, on a machine with an NVIDIA GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

help() {
    cat <<'TEXT'
run.sh test [FILTER] [ARGS...]      the tests on the GPU (WARPLOOM_TEST_DEVICES= to run them on the SIMT device as well)
run.sh ranks [FILTER] [ARGS...]     the tests of several ranks, which need the GPUs for themselves
run.sh bench [FILTER] [ARGS...]     the benches
run.sh sanitize [FILTER]            the tests under compute-sanitizer: memcheck, racecheck, initcheck, synccheck
                                    (TOOLS="memcheck" for only some)
run.sh example NAME [ARGS...]       an example; without a name, their list
TEXT
}

sanitizer() {
    for path in "$(command -v compute-sanitizer || true)" /usr/local/cuda/bin/compute-sanitizer \
        /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
        if [ -n "$path" ] && [ -x "$path" ]; then
            echo "$path"
            return
        fi
    done
    echo "run.sh: no compute-sanitizer on PATH or in /usr/local/cuda" >&2
    return 1
}

what=${1:-help}
[ $# -eq 0 ] || shift
case $what in
test)
    export WARPLOOM_TEST_DEVICES="${WARPLOOM_TEST_DEVICES-cuda}"
    exec "$here/test" "$@"
    ;;
ranks)
    export WARPLOOM_TEST_DEVICES=cuda WARPLOOM_TEST_RANKS=1 CUDA_DEVICE_MAX_CONNECTIONS=32
    # Keeps NCCL, if there is one, from NVLink multicast.
    export NCCL_NVLS_ENABLE=0
    exec "$here/test" --test-threads=1 "${@:-ep::}"
    ;;
bench)
    exec "$here/bench" --bench "$@"
    ;;
sanitize)
    export WARPLOOM_TEST_DEVICES=cuda WARPLOOM_TEST_SANITIZER=1
    program=$(sanitizer)
    failed=
    for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
        echo "== $tool"
        if ! "$program" --tool "$tool" --report-api-errors no --error-exitcode 9 "$here/test" --test-threads=1 "$@"; then
            failed="$failed $tool"
        fi
    done
    if [ -n "$failed" ]; then
        echo "sanitize: failed:$failed"
        exit 1
    fi
    echo "sanitize: all passed"
    ;;
example)
    if [ $# -eq 0 ]; then
        ls "$here/examples"
        exit
    fi
    name=$1
    shift
    exec "$here/examples/$name" "$@"
    ;;
*)
    help
    [ "$what" = help ]
    ;;
esac
