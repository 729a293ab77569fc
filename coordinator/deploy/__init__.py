"""The other Macs: discovery, cluster.yaml, launching workers over ssh, certificates, and diagnostics."""
