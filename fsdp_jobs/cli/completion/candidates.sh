# The candidates for the last word of a command line, one per line. POSIX, without single quotes: shells quote it whole.
line=$1 word=${1##* } runs_dir=runs conf= names= before=
set -f
for given in ${line% *}; do
    case $given in
    runs_dir=*) runs_dir=${given#*=} ;;
    --config-dir=*) conf=${given#*=} ;;
    esac
    case $before in --config-dir | -cd) conf=$given ;; esac
    before=$given
done
overrides="@OVERRIDES@"
set -- ${line% *}
case ${2-} in
@VERBS@
*) words="$overrides --multirun --config-dir --output" ;;
esac
[ $# -gt 1 ] || words="$words @NAMES@"
set +f
{
    printf "%s\n" $words
    [ "$names" ] && for job in "$runs_dir"/*/job.json; do
        job=${job%/job.json}
        case ${job##*/} in *[!A-Za-z0-9._-]*) continue ;; esac # a shell would execute what others wrote into it
        [ -d "$job" ] && printf "%s\n" "${job##*/}"
    done
    [ "$conf" ] && for file in "$conf"/*/*.yaml; do
        group=${file%/*} option=${file##*/}
        case ${group##*/}$option in *[!A-Za-z0-9._-]*) continue ;; esac
        [ -f "$file" ] && printf "%s\n" "${group##*/}=${option%.yaml}"
    done
} 2>/dev/null | while read -r candidate; do
    case $candidate in "$word"*) ;; *) continue ;; esac
    case $word,$candidate in
    *=*,*) [ "$candidate" != "${word%=}=" ] || continue ;; # its values, not the key again
    *,*=*)                                                 # a key: up to its next dot, or its equals sign
        rest=${candidate#"$word"}
        rest=${rest#"${rest%%[.=]*}"}
        candidate=${candidate%"$rest"}${rest%"${rest#?}"}
        ;;
    esac
    printf "%s\n" "$candidate"
done | sort -u
