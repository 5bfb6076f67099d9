-- What many sites have: no job without a project.
function slurm_job_submit(job, partitions, uid)
  if job.account == nil then
    slurm.log_user("SITE POLICY: jobs need a project code")
    slurm.log_user("ask hpc-help@example.org for one, and give it as --account")
    return slurm.ERROR
  end
  if job.partition == "urgent" then -- and of some: no requeue
    job.requeue = 0
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
