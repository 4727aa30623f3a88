#!/bin/sh
# Runs what `cargo xtask bundle` packed, on a machine with an NVIDIA GPU.
set -eu
here=$(cd "$(dirname "$0")" && pwd)

help() {
    cat <<'TEXT'
run.sh test [FILTER] [ARGS...]      the tests on the GPU (WARPLOOM_TEST_DEVICES= to run them on the SIMT device as well);
                                    without arguments those of cudarc and DLPack too
run.sh ranks [FILTER] [ARGS...]     the tests of several ranks, which need the GPUs for themselves
run.sh bench [FILTER] [ARGS...]     the benches
run.sh report FOLDER [ARGS...]      benches and peers on this GPU, for `cargo xtask report FOLDER`; ARGS go to peers.py
                                    (--budget SECONDS bounds the peers, 160 by default). Then what products bound once more, in
                                    bursts. All on the first GPU, or the first that CUDA_VISIBLE_DEVICES names; where it leaves several, exchange and NCCL on them
run.sh peers FOLDER [ARGS...]       the peers alone, into the same folder: after the above, on the same GPU
run.sh sanitize [FILTER...]         the tests under compute-sanitizer: memcheck, racecheck, initcheck, synccheck. Several processes
                                    beside each other, a few tests each; a line for each tool and family says what came of it.
                                    TOOLS="memcheck" for only some; JOBS processes (as many as cores), LIMIT seconds for
                                    each (100), TOTAL for all, AT_ONCE tests in each (4), logs in LOGS (sanitize/ beside this)
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
    [ $# -eq 0 ] || exec "$here/test" "$@"
    code=0
    for program in "$here/test" "$here"/tests/*; do
        [ ! -x "$program" ] || "$program" || code=$?
    done
    exit $code
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
    # Cases that peers have, and no others. Names hold no spaces.
    cases=$(python3 "$here/peers/peers.py" --quick --cases)
    mkdir -p "$out"
    rm -f "$out"/*.jsonl
    cp "$here/version.txt" "$out/"
    # Times of ours and theirs are of one GPU, or they are no comparison.
    one() {
        first=${CUDA_VISIBLE_DEVICES-0}
        CUDA_VISIBLE_DEVICES="${first%%,*}" "$@"
    }
    # shellcheck disable=SC2086
    one "$here/bench" --bench --quick --json "$out/ours.jsonl" $cases generate/ overhead ||
        echo "run.sh: not every bench passed" >&2
    # Without PyTorch, ours alone make a report as well.
    one python3 "$here/peers/peers.py" --quick --compile --json "$out/peers.jsonl" "$@" || echo "run.sh: no peers" >&2
    # shellcheck disable=SC2086
    one "$here/bench" --bench --burst --json "$out/ours-bursts.jsonl" $cases ||
        echo "run.sh: not every bench passed in bursts" >&2
    # shellcheck disable=SC2046,SC2086
    one python3 "$here/peers/peers.py" --quick --burst --json "$out/peers-bursts.jsonl" \
        $("$here/bench" --bench --burst --list $cases) || echo "run.sh: no peers in bursts" >&2
    if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] && case ${CUDA_VISIBLE_DEVICES-,} in *,*) true ;; *) false ;; esac; then
        export NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=32
        "$here/bench" --bench --quick --json "$out/ours-ranks.jsonl" ep/dispatch ep/combine ||
            echo "run.sh: not every bench of several GPUs passed" >&2
        python3 "$here/peers/peers.py" --quick --json "$out/peers-ranks.jsonl" ep/ || echo "run.sh: no NCCL" >&2
    fi
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
    program=$(sanitizer)
    logs=${LOGS:-$here/sanitize}
    tools=${TOOLS:-racecheck initcheck memcheck synccheck}
    rm -rf "$logs"
    mkdir -p "$logs"
    "$here/test" --list "$@" | sed -n 's/: test$//p' >"$logs/all"
    # Those that take longest come first; none of these shares a process with another.
    slow='^(generate::model|moe::fused|gemm::linear|attention::prefill|sampling::top_k_top_p::draws|conformance)'
    {
        grep -E "$slow" "$logs/all" || true
        grep -vE "$slow" "$logs/all" || true
    } | awk -v folder="$logs" -v most="${AT_ONCE:-4}" -v slow="$slow" '
        {
            split($0, part, "::")
            if ($0 ~ slow || n == most || part[1] != family) {
                family = part[1]
                n = 0
                file = sprintf("%s/tests-%s-%03d", folder, family, ++files)
                print file >(folder "/files")
            }
            n = $0 ~ slow ? most : n + 1
            print >file
        }'
    # Tools take turns: should time run out, each has seen the same tests.
    while read -r file; do
        for tool in $tools; do
            echo "$tool $file"
        done
    done <"$logs/files" >"$logs/queue"
    PROGRAM="$program" LIMIT="${LIMIT:-100}" timeout "${TOTAL:-36000}" \
        xargs -P "${JOBS:-$(nproc)}" -n 2 "$here/run.sh" sanitize-some <"$logs/queue" || echo "sanitize: out of time"
    failed=
    for tool in $tools; do
        for family in $(sed 's/::.*//' "$logs/all" | sort -u); do
            line=$(cat "$logs/$tool-$family-"*.result 2>/dev/null | awk -v all="$(grep -c "^$family::" "$logs/all")" '
                { passed += $1; run += $2; errors += $3; late += $4; dead += $5 }
                END {
                    printf "%d of %d tests passed, %d errors, ", passed, all, errors
                    printf "%s", late || run < all ? "NOT finished" : "finished"
                    if (run < all) printf " (%d tests not begun)", all - run
                    if (late) printf " (%d processes ran out of time)", late
                    if (dead) printf " (%d processes gave no summary)", dead
                }')
            printf '%-10s %-12s %s\n' "$tool" "$family" "$line"
            case $line in *" 0 errors, finished") ;; *) failed=yes ;; esac
            cat "$logs/$tool-$family-"*.missing 2>/dev/null || true
            grep -q "not passed" "$logs/$tool-$family-"*.missing 2>/dev/null && failed=yes
        done
    done
    [ -z "$failed" ] || exit 1
    ;;
sanitize-some)
    # One process: a tool, and a file of tests. Leaves what it said, a line of numbers, and the tests that did not pass.
    tool=$1
    tests=$2
    log=$(dirname "$tests")/$tool-$(basename "$tests" | sed 's/^tests-//')
    export WARPLOOM_TEST_DEVICES=cuda WARPLOOM_TEST_SANITIZER=$tool
    code=0
    more=
    # A kernel with a ring for each of 16 warps has 131 in each block, more than the tool keeps count of unless told.
    [ "$tool" != synccheck ] || more="--num-cuda-barriers 65536"
    # Names of tests hold no spaces.
    # shellcheck disable=SC2046,SC2086
    timeout -k 5 "$LIMIT" "$PROGRAM" --tool "$tool" $more --report-api-errors no --error-exitcode 9 "$here/test" --exact \
        --test-threads=1 $(cat "$tests") >"$log.log" 2>&1 </dev/null || code=$?
    late=0
    case $code in 124 | 137) late=1 ;; esac
    awk -v late="$late" -v missing="$log.missing" '
        NR == FNR { all[++n] = $0; next }
        # Something may be printed between the name of a test and what came of it.
        $1 == "test" && $3 == "..." { name = $2 }
        / ok$/ || /^ok$/ { if (name != "") { good[name] = 1; passed++; name = "" } }
        /ERROR SUMMARY:/ && /[0-9]+ errors?$/ { summary = 1; errors += $(NF - 1) }
        # Tests of the host alone: there was nothing to look at.
        /before first instrumented API call/ { summary = 1 }
        /RACECHECK SUMMARY:/ { summary = 1; for (i = 1; i <= NF; i++) if ($i ~ /^error/) errors += substr($(i - 1), 2) }
        END {
            print passed + 0, n, errors + 0, late, !late && !summary
            printf "" >missing
            for (i = 1; i <= n; i++) if (!(all[i] in good)) print "    not passed: " all[i] >missing
        }' "$tests" "$log.log" >"$log.result"
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
