# A site with an old configuration: edits of slurm.conf.
s|^ClusterName=.*|ClusterName=old|
s|^SelectType=.*|SelectType=select/linear|
/^SelectTypeParameters/d
s|^TopologyPlugin=.*|TopologyPlugin=topology/none|
s|^AccountingStorageType=.*|AccountingStorageType=accounting_storage/none|
/^AccountingStorage\(Host\|Pass\|Enforce\)/d
/^GresTypes/d
s| Gres=gpu:8||
s|^ProctrackType=.*|ProctrackType=proctrack/linuxproc|
s|^JobRequeue=.*|JobRequeue=0\nMaxArraySize=0\nMinJobAge=2|
s|^KillWait=.*|KillWait=10|
s|^EnforcePartLimits=.*|EnforcePartLimits=NO|
s|^PreemptType=.*|PreemptType=preempt/none|
s|^PreemptMode=.*|PreemptMode=OFF|
s| GraceTime=30||
s| PreemptMode=OFF$||
