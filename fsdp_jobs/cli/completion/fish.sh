# Completion of fsdp-jobs for fish.
set -g __fsdp_jobs_candidates '@CANDIDATES@'
function __fsdp_jobs
    sh -c $__fsdp_jobs_candidates sh (commandline -cp | string collect)
end
complete -c fsdp-jobs -f -n '__fsdp_jobs | string length -q' -a '(__fsdp_jobs)'
