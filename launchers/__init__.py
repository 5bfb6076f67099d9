"""Launchers: each turns an AppDef into a submission on one kind of cluster, as a TorchX scheduler."""
