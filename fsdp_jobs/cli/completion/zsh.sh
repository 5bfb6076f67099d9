#compdef fsdp-jobs
# Completion of fsdp-jobs for zsh.
_fsdp_jobs_candidates='@CANDIDATES@'
_fsdp_jobs() {
    local -a found
    found=(${(f)"$(sh -c "$_fsdp_jobs_candidates" sh "${(j: :)words[1,CURRENT-1]} $PREFIX")"})
    compadd -S "" -- ${(M)found:#*[.=]}
    compadd -- ${found:#*[.=]}
    (( $#found )) && return
    compset -P "*="
    _files
}
if [[ $funcstack[1] == _fsdp-jobs ]]; then _fsdp_jobs; else compdef _fsdp_jobs fsdp-jobs; fi
