#!/bin/sh
# Runs what `cargo xtask bundle` packed, on a machine with an NVIDIA GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

help() {
    cat <<'TEXT'
run.sh test [FILTER] [ARGS...]      the tests on the GPU (WARPLOOM_TEST_DEVICES= to run them on the SIMT device as well)
run.sh ranks [FILTER] [ARGS...]     the tests of several ranks, which need the GPUs for themselves
run.sh bench [FILTER] [ARGS...]     the benches
run.sh report FOLDER [ARGS...]      benches and peers on this GPU, for `cargo xtask report FOLDER`; ARGS go to peers.py
                                    (--compile takes torch.compile in, --budget SECONDS bounds the peers, 60 by default);
                                    both on the first GPU, or the one that CUDA_VISIBLE_DEVICES names
run.sh peers FOLDER [ARGS...]       the peers alone, into the same folder: after the above, on the same GPU
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
report)
    out=${1:?run.sh report needs a folder}
    shift
    mkdir -p "$out"
    rm -f "$out"/*.jsonl
    # Times of ours and theirs are of one GPU, or they are no comparison.
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}"
    cp "$here/version.txt" "$out/"
    # Cases that peers have, and no others. Names hold no spaces.
    # shellcheck disable=SC2046
    "$here/bench" --bench --quick --json "$out/ours.jsonl" $(python3 "$here/peers/peers.py" --quick --cases) ||
        echo "run.sh: not every bench passed" >&2
    # Without PyTorch, ours alone make a report as well.
    python3 "$here/peers/peers.py" --quick --json "$out/peers.jsonl" "$@" || echo "run.sh: no peers" >&2
    ;;
peers)
    out=${1:?run.sh peers needs a folder}
    shift
    mkdir -p "$out"
    rm -f "$out/peers.jsonl"
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}"
    exec python3 "$here/peers/peers.py" --quick --json "$out/peers.jsonl" "$@"
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
