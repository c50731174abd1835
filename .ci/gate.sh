# The functions of `.ci/run`, for it and for tests/test_gate.py. A part runs once: a failure that passes when repeated is a failure.
# Needs: work, a folder that the caller made; TOTAL_SECONDS, the bound of all parts together.

notes=$work/notes
touch "$notes"

# Installers print the mirror they use. Remove it from the log, because it describes the machine.
mask_hosts() {
    sed -u -E \
        -e 's#(https?|ftp)://(127\.0\.0\.1|localhost|\[::1\])#\1:\2//#g' \
        -e 's#(https?|ftp)://[^/[:space:]"'\''()<>]+#\1://(host)#g' \
        -e 's#(https?|ftp):(127\.0\.0\.1|localhost|\[::1\])//#\1://\2#g' \
        -e "s#host='[^']*'#host='(host)'#g"
}

# part NAME SECONDS COMMAND...: run it once, within its budget and within what is left of the whole.
part() {
    local name=$1 budget=$2 left=$((TOTAL_SECONDS - SECONDS)) started=$SECONDS code=124 log=$work/$1.log
    shift 2
    ((budget < left)) || budget=$left
    printf '\n=== %s\n' "$name"
    if ((budget > 0)); then
        timeout --kill-after=15 "$budget" "$@" 2>&1 | mask_hosts | tee "$log"
        code=${PIPESTATUS[0]}
    fi
    note "$name" "$code" "$budget" $((SECONDS - started))
    [[ ! -e $log ]] || note_skips "$name" "$log"
}

note() {
    local name=$1 code=$2 budget=$3 took=$4 outcome
    case $code in
        0) outcome=passed ;;
        124 | 137) outcome="FAILED (over ${budget} s)" ;;
        *) outcome=FAILED ;;
    esac
    printf '%-16s %-24s %4d s of %4d s\n' "$name" "$outcome" "$took" "$budget" >>"$notes"
}

# What a part left out, which pytest prints as `SKIPPED [2] file.py:1: reason`. Only what .ci/may-not-run lists may be left out.
note_skips() {
    local name=$1 log=$2 count reason why
    sed -n -E 's/^SKIPPED \[([0-9]+)\] [^:]+:([0-9]+:)? *(Skipped: )?(.*)$/\1 \4/p' "$log" |
        awk '{count = $1; sub(/^[0-9]+ /, ""); counts[$0] += count} END {for (reason in counts) print counts[reason], reason}' |
        sort -k 2 | while read -r count reason; do
        why=$(reason_to_leave_out "$reason") && why="NOT RUN ($why)" || why='FAILED (may not be left out)'
        printf '  %-14s %s: %s tests, %s\n' "$name" "$why" "$count" "$reason" >>"$notes"
    done
}

# Print why this may be left out here; fail if it may not.
reason_to_leave_out() {
    local reason=$1 words when why
    while IFS='|' read -r words when why; do
        [[ $words == \#* || -z $words || $reason != *"${words%"${words##*[! ]}"}"* ]] && continue
        case $when in
            *missing*) ! can_install ;;
            *always*) true ;;
            *) false ;;
        esac && printf '%s' "${why# }" && return
    done <"$gate_folder/may-not-run"
    return 1
}

gate_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

can_install() {
    command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]
}

# summary NAME...: print the outcome of every part, and the tests that may be repeated. Succeeds if every part passed, and each
# that is named has reported: the shell of a part in the background may have been killed.
summary() {
    local name
    for name in "$@"; do
        grep -q "^$name " "$notes" || printf '%-16s FAILED (no report)\n' "$name" >>"$notes"
    done
    printf '\n=== summary: %d s of %d s\n' "$SECONDS" "$TOTAL_SECONDS"
    printf 'Tests that may run twice (tests/unsteady.toml): %s\n' "$(sed -n 's/^test = "\(.*\)"$/\1/p' tests/unsteady.toml | paste -sd ' ' - | sed 's/^$/none/')"
    cat "$notes"
    ! grep -q FAILED "$notes"
}
