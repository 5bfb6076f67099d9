# A GPU site with rules: edits of slurm.conf, gres.conf and topology.conf.
s|^ClusterName=.*|ClusterName=gpu|
s|Gres=gpu:8|Gres=gpu:h100:8|
s|Name=gpu File|Name=gpu Type=h100 File|
s|^SwitchName=leaf1 .*|SwitchName=leaf1 Nodes=node[1,4]|
s|^SwitchName=leaf2 .*|SwitchName=leaf2 Nodes=node2\nSwitchName=leaf3 Nodes=node3|
s|leaf\[1-2\]|leaf[1-3]|
s|^JobRequeue=.*|JobRequeue=1\nMaxArraySize=5\nPrivateData=jobs,usage,users,accounts,reservations\nJobSubmitPlugins=lua|
s|^PartitionName=urgent .*|PartitionName=high Nodes=ALL MaxTime=2:00:00 DefaultTime=10 PriorityTier=5 GraceTime=20\n&|
