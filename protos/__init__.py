"""The contract between nodes: `brigade.proto` and the code generated from it (tools/generate_protos.py)."""
