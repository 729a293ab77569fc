"""Code that every node shares, and everything that touches MLX. Imports nothing of the coordinator."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own logs of closed connections are not for users
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # nor are transformers' warnings about long prompts
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # gRPC may crash in a fork that runs another program
# resolve names as the system does: gRPC's own resolver does not know Bonjour (`mini.local`)
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
