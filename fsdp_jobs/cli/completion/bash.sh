# Completion of fsdp-jobs for bash.
_fsdp_jobs_candidates='@CANDIDATES@'
_fsdp_jobs() {
    local line=${COMP_LINE:0:COMP_POINT} broken=
    local word=${line##* }
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && broken=${word%=*}= # readline replaces only what follows
    mapfile -t COMPREPLY < <(sh -c "$_fsdp_jobs_candidates" sh "$line" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"$broken"}")
    [[ ${COMPREPLY[0]-} == *[.=] ]] && compopt -o nospace
    return 0
}
complete -o default -F _fsdp_jobs fsdp-jobs
